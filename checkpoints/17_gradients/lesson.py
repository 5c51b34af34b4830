# %% [markdown]
# # 17 gradients
#
# 75 minutes, nine small functions, each checked alone. This is the longest lesson.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# The loss is a number ([16](../16_loss/README.md)). Every number of the adapter influenced it. The gradient says for
# each number: if it were a little larger, by how much would the loss grow? The optimizer
# ([18](../18_optimizer_step/README.md)) then moves it the other way.
#
# ## Idea
#
# You need not derive the whole model. You derive each op alone and pass the result on: this is the chain rule. On the
# way back, an op gets `grad`, which says how the loss changes with each number that the op *returned*. It returns how
# the loss changes with each number that the op *was given*. There are three rules:
#
# - $y = f(x)$: send `grad` back through $f$.
# - $y = a + b$: both get `grad` as it is. So the residual stream carries it past every block unchanged.
# - $x$ goes to two places: the two gradients are added.
#
# You can test a derivative without any engine. Move one input a little, up and down, and look at the change of the
# output:

# %%
import numpy as np

from llorch.ops.swiglu import swiglu, swiglu_backward

rng = np.random.default_rng(0)
gate, up, grad = (rng.standard_normal((2, 5)) for _ in range(3))
by_hand = swiglu_backward(grad, gate, up)[0][0, 3]
print(f"by hand      {by_hand:+.10f}")
for h in (1e-1, 1e-5, 1e-13):
    moved = np.zeros_like(gate)
    moved[0, 3] = h
    slope = ((swiglu(gate + moved, up) - swiglu(gate - moved, up)) * grad).sum() / (2 * h)
    result = f"{slope:+.10f}" if h > 1e-12 else f"off by ~{abs(slope - by_hand):.0e}"
    print(f"h = {h:.0e}    {result}")

# %% [markdown]
# With a large $h$ the curvature spoils the result, with a tiny $h$ the rounding. In between, ten digits agree.
#
# ## The maths
#
# ```math
# \begin{aligned}
# \frac{\partial L}{\partial B} &= s\,g\,(A x)^\top, \qquad \frac{\partial L}{\partial A} = s\,(B^\top g)\,x^\top,
# \qquad g = \frac{\partial L}{\partial y} \\
# \frac{\partial L}{\partial x} &= W^\top g + s\,A^\top B^\top g
# \end{aligned}
# ```
#
# | op | forward | back |
# | --- | --- | --- |
# | cross entropy | $\frac{1}{n}\sum -\log p_y$ | $(p - \text{target}) / n$ |
# | projection with LoRA | $W x + s B A x$ | above |
# | SwiGLU | $\text{silu}(z)\,u$ | $g\,u\,\sigma (1 + z (1 - \sigma))$ and $g\,\text{silu}(z)$, $\sigma = \sigma(z)$ |
# | RMSNorm | $n\,w$, $n = x / \text{root}$ | $(h - n\,\text{mean}(h\,n)) / \text{root}$, $h = g\,w$ |
# | mixing of values | $P V$ | $g V^\top$ and $P^\top g$ |
# | softmax | $p$ | $p\,(g - \sum g\,p)$ |
# | scores | $Q K^\top / \sqrt{d}$ | $g K / \sqrt{d}$ and $g^\top Q / \sqrt{d}$ |
# | RoPE | turned by $\theta$ | turned by $-\theta$ |
# | residual | $x + f(x)$ | $g$ + the gradient through $f$ |
#
# Each gradient has the shape of its variable: $\partial L / \partial x$ has the shape of $x$. This rule settles half of
# the transposes.
#
# ## The picture
#
# ![Error of a finite difference against its step, in two precisions](fig/difference.svg)
#
# Every gradient check has this U. On the right the step is too coarse: ten times the step gives a hundred times the
# error. On the left the two values are so close that their difference is rounding. In float32 the lowest error is 1e-5,
# so check gradients in float64.
#
# ![Distance of every tensor's gradient from float64, of PEFT and of a mistake](fig/tensors.svg)
#
# The second picture shows the gradients of the last layer, all 14 tensors. Blue is PEFT in float32 against PEFT in
# float64. The dashed line is the tolerance. Orange is an exact run with one mistake in the softmax: it has bars at
# `q_proj` and `k_proj` and nowhere else, because the gradient comes from the end of the layer and meets the softmax
# only before these two. So the first wrong tensor, in the order of the backward pass, says where to look.
#
# ## Exercise
#
# Write nine functions in `l17_gradients.py`, in any order. The check puts each one alone into llorch's backward pass,
# so a PASS of one does not depend on the rest:
#
# ```
# llorch learn check 17
# llorch learn hint 17
# llorch learn check 17 --chain       # all of yours together, from the loss down to the embedding
# ```
#
# Begin with `residual_backward` (one line), `rope_backward` (you wrote its forward function in
# [01b](../01b_rope/README.md)) and `attention_probs_backward` (one line, if you think first). Do the two of grouped
# attention last: the gradient of a shared key is the sum over all its heads. A matrix product with group and queries as
# one axis computes this sum.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the tensors that
# are still right ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 17.
#
# ## Run it
#
# The finite difference works for each of your functions, before any check. Here for the norm, every input at once:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.ops.rms_norm import rms_norm

# yours: from l17_gradients import rms_norm_backward
parts = {part.name: part.reference for part in BY_NUMBER["17"].parts}
rms_norm_backward = parts["rms_norm_backward"]
x, grad, gain = *rng.standard_normal((2, 1, 6)), rng.standard_normal(6)
slopes = []
for step in 1e-5 * np.eye(6):
    moved = rms_norm(x + step, gain, eps=1e-5) - rms_norm(x - step, gain, eps=1e-5)
    slopes.append((moved * grad).sum() / 2e-5)
print("difference", np.round(slopes, 6))
print("by hand   ", rms_norm_backward(grad, x, gain, 1e-5)[0].round(6))
print(check_functions("17", **parts))

# %% [markdown]
# Training starts with $B = 0$, and $\partial L / \partial A$ has $B$ as a factor: half of all gradients are exactly
# zero at the first step. The check therefore uses an adapter without zeros.
#
# ## A mistake to plant
#
# The derivative of a sigmoid is $p (1 - p)$. A softmax looks similar, and the diagonal of its derivative is the same.
# Use the sigmoid's in `attention_probs_backward`: it forgets the rest of the matrix, which exists because a row adds up
# to 1.

# %%
mistakes = typed_mistakes(BY_NUMBER["17"])["attention_probs_backward"]
wrong = mistakes["gradient-softmax-as-sigmoid"]
print(check_functions("17", attention_probs_backward=wrong))

# %% [markdown]
# A loss that grows equally with all probabilities never changes, so its gradient is 0. This function returns something
# else. A training run with it does not crash, and the model does learn something, because the sign of each element is
# often right.
#
# ## Both engines
#
# - The reference is PEFT with torch's autograd. Autograd and a pass by hand compute the same sums in another order.
# - Autograd has no gradient for frozen tensors. llorch requests the gradients of block inputs by a hook.
# - `model.double()` is no float64 reference in transformers: RMSNorm, RoPE, softmax and loss pass through float32.
#
# [For porters](PORTING.md): reference code, bfloat16, compared values and all known mistakes of this lesson.

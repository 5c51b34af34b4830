# %% [markdown]
# # 17 gradients
#
# 75 minutes, nine small functions, each checked alone. This is the longest lesson. After it, you know every step of
# training.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# The loss is a number ([16](../16_loss/README.md)). Every number of the adapter influenced it. The gradient says for
# each number: if it were a little larger, by how much would the loss grow? The optimizer
# ([18](../18_optimizer_step/README.md)) then moves it the other way.
#
# ## Idea
#
# You need not derive the whole model. You derive each op alone and pass the result on: this is the chain rule. On the
# way back, an op gets `grad`, which says how the loss changes with each number that the op *returned*. It returns how
# the loss changes with each number that the op *was given*. Read `forward.py` from its last line to its first,
# replace each op by its backward function, and you have [`backward.py`](../../llorch/model/backward.py). There are
# three rules:
#
# - $y = f(x)$: send `grad` back through $f$.
# - $y = a + b$: both get `grad` as it is. So the residual stream carries it past every block unchanged.
# - $x$ goes to two places: the two gradients are added.
#
# You can test a derivative. Move one input a little and look at the change of the output:

# %%
import inspect

import numpy as np

from llorch.ops.swiglu import swiglu, swiglu_backward

rng = np.random.default_rng(0)
gate, up, grad = (rng.standard_normal((2, 5)) for _ in range(3))
d_gate, _ = swiglu_backward(grad, gate, up)
print(f"by hand      {d_gate[0, 3]:+.10f}")
for h in (1e-1, 1e-5, 1e-13):
    moved = np.zeros_like(gate)
    moved[0, 3] = h
    slope = ((swiglu(gate + moved, up) - swiglu(gate - moved, up)) * grad).sum() / (2 * h)
    print(f"h = {h:.0e}    {slope:+.10f}" if h > 1e-12 else f"h = {h:.0e}    off by ~{abs(slope - d_gate[0, 3]):.0e}")

# %% [markdown]
# With a large $h$ the curvature spoils the result, with a tiny $h$ the rounding. In between, ten digits agree. This
# is no proof, because other inputs were not tried. It is strong evidence that needs no other engine.
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
# Each gradient has the shape of its variable: $\partial L / \partial x$ has the shape of $x$. This rule settles half
# of the transposes.
#
# ## The picture
#
# ![Error of a finite difference against its step, in two precisions](fig/difference.svg)
#
# Every gradient check has this U. On the right the step is too coarse: ten times the step gives a hundred times the
# error. On the left the two values are so close that their difference is rounding. In float32 the lowest error is
# 1e-5. A check in float32 cannot tell a right gradient from one that is off by 1e-5, so use float64.
#
# ![Distance of every tensor's gradient from float64, of PEFT and of a mistake](fig/tensors.svg)
#
# The second picture shows the gradients of the last layer, all 14 tensors. Blue is PEFT's autograd in float32 against
# PEFT in float64. The dashed line is the tolerance. Orange is an exact run with one mistake in the softmax. The
# orange run has bars at `q_proj` and `k_proj` and nowhere else: the gradient comes from the end of the layer and
# meets the softmax only before these two. In the layers that the gradient reaches afterwards, every tensor is wrong.
# So the first wrong tensor, in the order of the backward pass, says where to look.
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
# attention last: the gradient of a shared key is the sum over all its heads. A matrix product with group and queries
# as one axis computes this sum.
#
# ## Run it
#
# Here is one whole backward pass of `micro-llama`, compared with PEFT's:

# %%
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.judging.goldens.training_recipe import with_zero_b
from llorch.training.numpy_step import loss_and_gradients

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
loss, grads = loss_and_gradients(weights, adapter, golden.batches[:1], label_smoothing=0.0)
for name in ("layers.2.down_proj.lora_B", "layers.1.v_proj.lora_A", "layers.0.q_proj.lora_A"):
    _, layer, part = name.split(".", 2)
    expected = golden.shown(at("gradient", int(layer), part))
    error = np.linalg.norm(grads[name] - expected) / np.linalg.norm(expected)
    print(f"{name:27} {expected.shape!s:9} size {np.linalg.norm(expected):.4f}   from PEFT ~{error:.0e}")

# %% [markdown]
# Training starts with $B = 0$, and $\partial L / \partial A$ has $B$ as a factor.

# %%
_, at_start = loss_and_gradients(weights, with_zero_b(adapter), golden.batches[:1], label_smoothing=0.0)
for kind in ("lora_A", "lora_B"):
    largest = max(np.abs(grad).max() for name, grad in at_start.items() if name.endswith(kind))
    print(f"{kind}: largest gradient of all {largest:.4f}")

# %% [markdown]
# Half of all gradients are exactly zero at the first step. So a test of gradients on a fresh adapter tests only the
# other half.
#
# ## The mistake
#
# The derivative of a sigmoid is $p (1 - p)$. A softmax looks similar, and the diagonal of its derivative is the same.
# The mistake forgets the rest of the matrix, which exists because a row adds up to 1:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.ops.attention import attention_probs, attention_probs_backward

wrong = typed_mistakes(BY_NUMBER["17"])["attention_probs_backward"]["gradient-softmax-as-sigmoid"]
print(inspect.getsource(wrong))
probs = attention_probs(rng.standard_normal((1, 1, 4)))
grad = np.array([[[1.0, 1.0, 1.0, 1.0]]])
print("right", attention_probs_backward(grad, probs).round(4) + 0.0)
print("wrong", wrong(grad, probs).round(4))

# %% [markdown]
# The example has a loss that grows equally with all four probabilities. They always add up to 1, so no change of a
# score changes this loss. The right function gives 0, the wrong one changes all four scores. A training run with the
# wrong function does not crash, and the model does learn something, since the sign of each element is often right.
# The comparison with another engine shows it:

# %%
print(check_functions("17", attention_probs_backward=wrong))

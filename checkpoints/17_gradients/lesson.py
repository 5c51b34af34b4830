# %% [markdown]
# # 17 gradients
#
# 75 minutes, nine small functions, each checked alone. The longest lesson, and the one after which nothing about
# training is magic.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# The loss is a number ([16](../16_loss/README.md)). Every number of the adapter had a part in it. The gradient says
# for each of them: if you were a little larger, by how much would the loss grow? The optimizer
# ([18](../18_optimizer_step/README.md)) then goes the other way.
#
# ## Idea
#
# Nobody derives the whole model. One derives each op alone, and hands on what comes out: that is the chain rule. An op
# on the way back is given `grad`, how the loss changes with each number that the op *returned*, and says how it changes
# with each number that the op *was given*. Read the forward page from its last line to its first, put the backward
# function in the place of each op, and you have [`backward.py`](../../llorch/backward.py). Three rules make it:
#
# - $y = f(x)$: send `grad` back through $f$.
# - $y = a + b$: both get `grad` as it is. So the residual stream carries it past every block, untouched.
# - $x$ goes to two places: what comes back from both is added.
#
# Whether a derivative is right can be tried. Move one input by a little, look at what the output does:

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
# A large $h$ sees the curve, a tiny one sees rounding. In between it agrees in ten digits. This is no proof, because
# other inputs were not tried. It is strong evidence that needs no other engine.
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
# | residual | $x + f(x)$ | $g$ + what came back through $f$ |
#
# Everything has the shape of what it belongs to: $\partial L / \partial x$ that of $x$. Keep that in mind and half of
# the transposes write themselves.
#
# ## The picture
#
# ![Error of a finite difference against its step, in two precisions](fig/difference.svg)
#
# The U of every gradient check. To the right the difference is too coarse, and ten times the step costs a hundred
# times the error; to the left the two values are so alike that their difference is rounding. In float32 the bottom is
# at 1e-5: a check that is done there cannot tell a right gradient from one that is a hundred-thousandth off. Hence
# float64.
#
# ![Distance of every tensor's gradient from float64, of PEFT and of a mistake](fig/tensors.svg)
#
# And the gradients of the last layer, all 14 tensors. Blue is PEFT's autograd in float32 beside itself in float64; the
# dashed line is the limit. Orange is an exact run with one mistake in the softmax. It has bars at `q_proj` and `k_proj`
# and nowhere else: the gradient comes from the end of the layer and meets the softmax only before these two. Below, in
# the layers that it reaches next, everything is wrong. So the first wrong tensor, in the order in which the gradient
# comes, says where to look.
#
# ## The reference
#
# The loss first, where the gradient begins:
#
# <!-- source: llorch.ops.cross_entropy.cross_entropy_backward -->
#
# Then the only place where something is trained:
#
# <!-- source: llorch.ops.lora.lora_backward -->
#
# And two that are worth reading slowly. A softmax gives probabilities: if one grows, the others shrink, and the sum
# that is taken away says so. A norm undoes a change of length: of the gradient, the share along the row is taken
# away.
#
# <!-- source: llorch.ops.attention.attention_probs_backward -->
#
# <!-- source: llorch.ops.rms_norm.rms_norm_backward -->
#
# The others stand below their forward functions, in [`ops/`](../../llorch/ops).
#
# ## Run it
#
# One whole backward pass of `micro-llama`, beside PEFT's:

# %%
from llorch.train.numpy_step import loss_and_gradients
from llorch.verify.training.claims import stored
from llorch.verify.training.places import at
from llorch.verify.training.recipe import with_zero_b

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
loss, grads = loss_and_gradients(weights, adapter, golden.batches[:1], label_smoothing=0.0)
for name in ("layers.2.down_proj.lora_B", "layers.1.v_proj.lora_A", "layers.0.q_proj.lora_A"):
    _, layer, part = name.split(".", 2)
    theirs = golden.shown(at("gradient", int(layer), part))
    off = np.linalg.norm(grads[name] - theirs) / np.linalg.norm(theirs)
    print(f"{name:27} {theirs.shape!s:9} size {np.linalg.norm(theirs):.4f}   from PEFT ~{off:.0e}")

# %% [markdown]
# Training starts with $B = 0$. Look at what that does to the formulas: $\partial L / \partial A$ has $B$ as a factor.

# %%
_, at_start = loss_and_gradients(weights, with_zero_b(adapter), golden.batches[:1], label_smoothing=0.0)
for kind in ("lora_A", "lora_B"):
    largest = max(np.abs(grad).max() for name, grad in at_start.items() if name.endswith(kind))
    print(f"{kind}: largest gradient of all {largest:.4f}")

# %% [markdown]
# Half of all gradients are exactly zero at the first step. A test of gradients on a fresh adapter tests the other half.
#
# ## The mistake
#
# The derivative of a sigmoid is $p (1 - p)$. A softmax looks like one, and in the diagonal of its derivative that is
# what stands. The rest of the matrix, that a row adds up to 1, is forgotten:

# %%
from llorch.learn.check import check_functions
from llorch.learn.lessons import BY_NUMBER
from llorch.learn.materials import typed_mistakes
from llorch.ops.attention import attention_probs, attention_probs_backward

wrong = typed_mistakes(BY_NUMBER["17"])["attention_probs_backward"]["gradient-softmax-as-sigmoid"]
print(inspect.getsource(wrong))
probs = attention_probs(rng.standard_normal((1, 1, 4)))
grad = np.array([[[1.0, 1.0, 1.0, 1.0]]])
print("right", attention_probs_backward(grad, probs).round(4) + 0.0)
print("wrong", wrong(grad, probs).round(4))

# %% [markdown]
# If the loss would grow equally with all four probabilities, no score matters: they cannot all grow. The right function
# says 0, the wrong one pushes all four. A run with it does not crash, and what it learns is not nothing, since the
# sign of each element is often right. A number from somebody else shows it:

# %%
print(check_functions("17", attention_probs_backward=wrong))

# %% [markdown]
# ## Exercise
#
# Write nine functions in `l17_gradients.py`, in any order. Every one is put alone into a backward pass whose other
# parts are ours, so a PASS of one does not wait for the rest:
#
# ```
# llorch learn check 17
# llorch learn hint 17
# llorch learn check 17 --chain       # all of yours together, from the loss down to the embedding
# ```
#
# Begin with `residual_backward` (one line), `rope_backward` (you wrote it in [01b](../01b_rope/README.md)),
# `attention_probs_backward` (one line, if you think first). Keep the two of grouped attention for the end: a key that
# serves several heads collects from all of them. In the matrix product with group and queries as one axis, that sum
# makes itself.
#
# ## Where the engines differ
#
# Autograd and a hand-written pass do the same sums in another order. Over all tensors of this model:

# %%
truth = {
    name: golden.truth("chained", at("gradient", int(name.split(".")[1]), name.split(".", 2)[2])) for name in grads
}
theirs = {name: golden.shown(at("gradient", int(name.split(".")[1]), name.split(".", 2)[2])) for name in grads}
for who, found in (("PEFT", theirs), ("ours", grads)):
    off = [np.linalg.norm(found[name] - truth[name]) / np.linalg.norm(truth[name]) for name in truth]
    print(f"{who}: worst of {len(off)} tensors ~{max(off):.0e}, median ~{np.median(off):.0e}")

# %% [markdown]
# - `model.double()` in transformers is no float64 reference: RMSNorm, RoPE, softmax and loss pass through float32. For
#   the truth every float dtype that is asked for, in any operator, is turned into float64
#   ([`wide.py`](../../llorch/verify/witnesses/transformers_capture.py)).
# - Autograd has no gradient for what is frozen. Block inputs get one because a hook asks for it.
# - `-trainer` on the torch path is how `llorch lora train` runs when it saves memory: fused attention, products of
#   frozen weights by oneDNN, each block run again for its gradient, logits in chunks. Running again changes no bit.
#
# Further reading:
#
# - Karpathy, [Yes you should understand
#   backprop](https://karpathy.medium.com/yes-you-should-understand-backprop-e2f06eab496b), 2016; and
#   [llm.c](https://github.com/karpathy/llm.c), whose `test_gpt2.c` checks every gradient against stored ones of
#   PyTorch, the ancestor of this page.
# - Baydin et al., [Automatic Differentiation in Machine Learning: a Survey](https://arxiv.org/abs/1502.05767), 2015.
# - peft issue [1142](https://github.com/huggingface/peft/issues/1142): gradient checkpointing cuts the graph, and
#   adapters are silently not trained. It is the mistake `gradient-graph-cut-between-blocks` below.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## What is compared
#
# Isolated, one block is given PEFT's input of it and PEFT's gradient of its output, so that an error is in that
# block. Chained, everything from the tokens to the embedding is ours. In the case `zero_b` the adapter is as training
# starts it: every gradient of A must be exactly zero, that of B not. In float64 our torch path and our NumPy path
# meet PEFT's at 1e-14.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../README.md#how-to-read-a-page).
#
# ## In bfloat16
#
# bfloat16 is what training runs in on CUDA if it is not told. Base and activations are rounded; the adapter, its
# gradients and the optimizer stay float32, in PEFT and here. As in [14](../14_torch/README.md) the goldens are those
# above, the truth is float64 with the weights as they are stored, and a tolerance is 4 times how far PEFT is from it
# on a base in bfloat16, at least 4u = 1.6e-2. This is so for all of 15 to 20:
#
# <!-- generated: half -->
# <!-- end -->
#
# Isolated, PEFT's distance is measured on its own inputs, which are bfloat16 numbers; ours are goldens that are
# rounded first. An optimizer step alone is float32 and keeps the tolerance of float32. No tolerance is above the root
# of the roundings times 4u: one at each stage of the forward pass, another on the way back, twice as much for a
# square.
#
# Left out, because it would show nothing:
#
# - Chained: parameters after a step, all moments after the first step, and the norms of the curve. Adam's first step
#   is nearly the sign of the gradient. Where that is smaller than its rounding, a correct run goes the other way and
#   is 2 learning rates off: PEFT itself by 0.3 on the root mean square of a tensor, and 4 times that is more than the
#   step is long. What follows from such parameters differs by chance as well: with other instructions of the same CPU
#   the norms of PEFT's curve are 0.6 to 2.1 times as far off, and moments after ten steps are off by 0.3. The losses
#   of the curve stay within 3e-3 all the same, below the smallest tolerance, and are judged.
# - Learning rates, files and their logits, which have no dtype here.
# - float16: `llorch lora train` does not offer it, since small gradients vanish in it unless the loss is scaled.
#
# The known mistakes of 15 to 20 that dense models can have were judged by these tolerances as well. 47 of 62 are red by
# ten times and more. Red, but by 2.9 to 8.5 times: `merge-without-scale`, `loss-smoothing-added`,
# `accumulation-mean-of-means`, `gradient-norm-second-term-missing`, `gradient-silu-second-term-missing`,
# `gradient-lora-input-left-out`, `gradient-graph-cut-between-blocks`, `gradient-residual-left-out`,
# `gradient-divided-by-rows`. Not seen, since they are made where no dtype is: `schedule-one-step-late`,
# `schedule-one-step-early`, `schedule-decays-from-the-start`, `schedule-without-warmup`, `export-b-rows-not-permuted`,
# `export-one-alpha`.
#
# ## Mistakes it catches
#
# Each is a function of ours, replaced in the running code by `pytest -k teeth`, which wants this checkpoint red
# first, by at least ten times the tolerance. Those of routers, experts and delta nets have no golden: they are planted
# into random models of these families, whose gradients are judged by PEFT's.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_17                   # the comparison, and every mistake of this page planted
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# llorch verify micro-llama --backend torch --dtype bfloat16 --detail
# ```

# %% [markdown]
# # 17 gradients: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# The loss first, where the gradient begins:
#
# <!-- source: llorch.ops.cross_entropy.cross_entropy_backward -->
#
# Then the only op with trained parameters:
#
# <!-- source: llorch.ops.lora.lora_backward -->
#
# Read the next two slowly. A softmax gives probabilities: if one grows, the others shrink, and the subtracted sum
# expresses this. A norm undoes a change of length, so the part of the gradient along the row is subtracted.
#
# <!-- source: llorch.ops.attention.attention_probs_backward -->
#
# <!-- source: llorch.ops.rms_norm.rms_norm_backward -->
#
# The others stand below their forward functions, in [`ops/`](../../llorch/ops).
#
# ## Where the engines differ
#
# Autograd and a hand-written pass compute the same sums in another order. These are the differences over all tensors
# of this model:

# %%
import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.judging.goldens.training_recipe import with_zero_b
from llorch.training.numpy_step import loss_and_gradients

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
_, grads = loss_and_gradients(weights, adapter, golden.batches[:1], label_smoothing=0.0)
reference = {
    name: golden.reference("chained", at("gradient", int(name.split(".")[1]), name.split(".", 2)[2])) for name in grads
}
peft_grads = {name: golden.shown(at("gradient", int(name.split(".")[1]), name.split(".", 2)[2])) for name in grads}
for engine, gradients in (("PEFT", peft_grads), ("llorch", grads)):
    errors = [np.linalg.norm(gradients[name] - reference[name]) / np.linalg.norm(reference[name]) for name in reference]
    print(f"{engine}: worst of {len(errors)} tensors ~{max(errors):.0e}, median ~{np.median(errors):.0e}")

# %% [markdown]
# Training starts with $B = 0$, and $\partial L / \partial A$ has $B$ as a factor. So a test of gradients on a fresh
# adapter tests only half of them:

# %%
_, at_start = loss_and_gradients(weights, with_zero_b(adapter), golden.batches[:1], label_smoothing=0.0)
for kind in ("lora_A", "lora_B"):
    largest = max(np.abs(grad).max() for name, grad in at_start.items() if name.endswith(kind))
    print(f"{kind}: largest gradient of all {largest:.4f}")

# %% [markdown]
# - `model.double()` in transformers is no float64 reference: RMSNorm, RoPE, softmax and loss pass through float32.
#   For the float64 reference, llorch turns every requested float dtype, in any operator, into float64
#   ([`transformers_capture.py`](../../llorch/engines/transformers_capture.py)).
# - Autograd has no gradient for frozen tensors. Block inputs get one because a hook requests it.
# - In the output of `llorch verify`, a backend whose name ends with `-trainer` is the torch path in the memory-saving
#   mode of `llorch lora train`: attention is fused, oneDNN multiplies by the frozen weights, each block runs again
#   for its gradient, and logits are computed in chunks. Running a block again changes no bit.
#
# Further reading:
#
# - Karpathy, [Yes you should understand
#   backprop](https://karpathy.medium.com/yes-you-should-understand-backprop-e2f06eab496b), 2016; and
#   [llm.c](https://github.com/karpathy/llm.c), whose `test_gpt2.c` checks every gradient against stored gradients of
#   PyTorch, as this page does.
# - Baydin et al., [Automatic Differentiation in Machine Learning: a Survey](https://arxiv.org/abs/1502.05767), 2015.
# - peft issue [1142](https://github.com/huggingface/peft/issues/1142): gradient checkpointing cuts the graph, and
#   adapters are silently not trained. It is the mistake `gradient-graph-cut-between-blocks` below.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# Isolated, one block gets PEFT's input of the block and PEFT's gradient of its output, so an error is in this block.
# Chained, llorch computes everything from the tokens to the embedding. In the case `zero_b` the adapter is in its
# initial state: every gradient of A must be exactly zero, and those of B must not be zero. In float64, llorch's torch
# path and NumPy path agree with PEFT to 1e-14.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## In bfloat16
#
# Training on CUDA runs in bfloat16 by default. Base and activations are rounded. The adapter, its gradients and the
# optimizer stay float32, in PEFT and in llorch. As in [14](../14_torch/README.md), the goldens are the same as for
# float32, and the float64 reference uses the weights as they are stored. A tolerance is 4 times the distance of PEFT
# on a bfloat16 base from this reference, at least 4u = 1.6e-2. This applies to all of 15 to 20:
#
# <!-- generated: half -->
# <!-- end -->
#
# Isolated, PEFT's distance is measured on PEFT's inputs, which are bfloat16 numbers. llorch's inputs are the goldens,
# rounded first. An optimizer step alone is float32 and keeps the tolerance of float32. No tolerance is above 4u times
# the root of the number of roundings. Each stage of the forward pass counts as one rounding, and as another on the
# way back. A square counts twice.
#
# These comparisons are left out, because they would show nothing:
#
# - Chained: parameters after a step, all moments after the first step, and the norms of the curve. Adam's first step
#   is nearly the sign of the gradient. If a gradient is smaller than its rounding, a correct run may go the other way
#   and be 2 learning rates off. PEFT's own distance is 0.3 of the step (root mean square over a tensor), and a
#   tolerance of 4 times this would be larger than the step. Later results differ by chance as well. If the same CPU
#   uses another instruction set, the norms of PEFT's curve are 0.6 to 2.1 times as far off, and moments after ten
#   steps are off by 0.3. The losses of the curve still stay within 3e-3, below the smallest tolerance, and they are
#   judged.
# - Learning rates, files and the logits of files, which do not depend on this dtype.
# - float16: `llorch lora train` does not offer it, since small gradients vanish in it unless the loss is scaled.
#
# The known mistakes of 15 to 20 that dense models can have were judged by these tolerances as well. 47 of 62 fail by
# ten times the tolerance or more. These fail by 2.9 to 8.5 times: `merge-without-scale`, `loss-smoothing-added`,
# `accumulation-mean-of-means`, `gradient-norm-second-term-missing`, `gradient-silu-second-term-missing`,
# `gradient-lora-input-left-out`, `gradient-graph-cut-between-blocks`, `gradient-residual-left-out`,
# `gradient-divided-by-rows`. These are not detected here, since their stages do not depend on the dtype:
# `schedule-one-step-late`, `schedule-one-step-early`, `schedule-decays-from-the-start`, `schedule-without-warmup`,
# `export-b-rows-not-permuted`, `export-one-alpha`.
#
# ## Mistakes it catches
#
# `pytest tests/faults` injects each mistake in turn: it replaces the right function of llorch by the wrong one. The
# test requires that this validation point fails first, by at least ten times the tolerance. The mistakes of routers,
# experts and delta nets have no golden. They are injected into random models of these families, and PEFT's gradients
# judge them.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_17                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# llorch verify micro-llama --backend torch --dtype bfloat16 --detail
# ```

# %% [markdown]
# # 19 training_curve: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.training.numpy_step.loss_and_gradients -->
#
# No micro-batch is divided by the number of its tokens: `n_trained` of the whole step is known before the first one
# runs.
#
# ## Where the engines differ
#
# In thirty steps, with Adam's division in each, errors could grow without bound. They do not:

# %%
import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at

weights, golden = stored("micro-llama")
stage_ref = at("loss_curve", case="curve")
gap = np.abs(golden.shown(stage_ref) - golden.reference("chained", stage_ref))
print(
    f"PEFT from float64: step 1 ~{gap[0]:.0e}, step 30 ~{gap[29]:.0e}, largest ~{gap.max():.0e}, of losses around 1.5"
)

# %% [markdown]
# The first step of the goldens has two micro-batches. Here it is in one piece, then cut:

# %%
from llorch.apps.learn.exercises.training import accumulated
from llorch.judging.goldens.training_recipe import CURVE, SMOOTHING, step_batches
from llorch.training.numpy_step import loss_and_gradients

weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
batches = step_batches(golden.batches, 1, CURVE.accumulation)
loss, grads = loss_and_gradients(weights, adapter, batches, label_smoothing=SMOOTHING)
per_batch = [loss_and_gradients(weights, adapter, [batch], label_smoothing=SMOOTHING) for batch in batches]
n = np.array([batch.n_trained for batch in batches])
sums = np.array([mean for mean, _ in per_batch]) * n
rows = np.stack([np.concatenate([g.ravel() for g in batch_grads.values()]) for _, batch_grads in per_batch])
cut, row = accumulated(sums, n, rows * n[:, None].astype(np.float32))
print(f"learned tokens {n.tolist()}, mean losses {[round(mean, 4) for mean, _ in per_batch]}")
print(f"at once {loss:.6f}   cut {cut:.6f}   golden {golden.shown(stage_ref)[0]:.6f}")
full = np.concatenate([g.ravel() for g in grads.values()])
print(f"gradients: {len(row):,} numbers, apart by ~{np.linalg.norm(row - full) / np.linalg.norm(full):.0e}")

# %% [markdown]
# - After 30 steps, PEFT is as close to the float64 reference as after a single forward pass. Not every run behaves so
#   well: with larger rates, two correct runs diverge after some hundred steps, and then only distributions can be
#   compared.
# - The loss is compared, because it hides harmless differences: parameters whose gradient is as small as $\epsilon$
#   may be a tenth of a step off ([18](../18_optimizer_step/README.md)), and the loss hardly depends on them.
# - On a base in bfloat16, single parameters go the other way from the first step on. The losses of the run are still
#   within 3e-3 of the float64 reference ([17](../17_gradients/PORTING.md#in-bfloat16)).
#
# Further reading:
#
# - [Fixing Gradient Accumulation](https://huggingface.co/blog/gradient_accumulation), Hugging Face, October 2024, and
#   [Bug Fixes in LLM Training](https://unsloth.ai/blog/gradient), Unsloth: the mistake of this page, described by
#   those who found and repaired it.
# - McCandlish et al., [An Empirical Model of Large-Batch Training](https://arxiv.org/abs/1812.06162), 2018: how many
#   tokens a step should have.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# The loss of every step is compared, and the norm of every step's gradient before clipping. The micro-batches of a
# step have different numbers of learned tokens, so that a mean of means is another number. On the torch path the run
# is judged twice: as written, and in the trainer's mode that saves memory.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# `pytest tests/faults` replaces one of llorch's functions by each mistake. The test requires that this validation
# point fails first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_19                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# ```

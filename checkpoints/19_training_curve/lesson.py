# %% [markdown]
# # 19 training_curve
#
# 40 minutes, one function of two lines, and a run of all your functions since 15.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# Adapter, loss, gradients and step are ready ([15](../15_lora_delta/README.md) to
# [18](../18_optimizer_step/README.md)). Training runs them in a row, thirty times here, a hundred thousand times
# elsewhere. If each piece is right but they are put together wrongly, it shows here.
#
# ## Idea
#
# A step needs many tokens, so that its gradient points the right way on average. The memory of a machine allows few.
# So a step is cut into *micro-batches*: run one, keep its gradient, run the next, add the gradients, and only then
# move. This is called gradient accumulation. It promises that the step equals the step of the large batch.
#
# ## The maths
#
# ```math
# L_k = \frac{\sum_{b \in \mathrm{step}_k} \sum_t \ell_t(\theta_{k-1})}{\sum_{b \in \mathrm{step}_k} n_b}, \qquad
# \theta_k = \mathrm{AdamW}(\theta_{k-1}, \nabla L_k, \eta_k)
# ```
#
# | symbol | meaning |
# | --- | --- |
# | $\ell_t$ | loss of one learned token |
# | $n_b$ | learned tokens of micro-batch $b$ |
# | $\theta_{k-1}$ | the adapter before step $k$; all of its micro-batches see the same |
# | $\eta_k$ | rate of step $k$: here five steps of warm-up, then a cosine |
#
# The division decides whether the promise holds. A mean of means is another number unless all $n_b$ are equal, and
# texts have different lengths. By hand: one batch has 1 token with loss 4, the other has 3 tokens with losses 2. The
# mean of four tokens is 2.5. The mean of the two means is 3: the single token counts three times as much as any
# other.
#
# ## The picture
#
# ![Thirty losses, and how far four runs are from the golden ones](fig/curve.svg)
#
# Above are the losses of the golden run. They go up and down in threes, because three batches take turns. Below is
# the distance of each run from the float64 reference, which the eye cannot see above. The grey band is the tolerance,
# made from the error of PEFT in float32. For each wrong run, a ring marks the first step outside the band. It is
# always the first step.
#
# ## Exercise
#
# Write one function in `l19_training_curve.py`:
#
# ```python
# def accumulated(loss_sums, n_trained, grad_sums) -> tuple[float, np.ndarray]:
# ```
#
# ```
# llorch learn check 19
# llorch learn check 19 --chain      # thirty steps with all that you have written; some seconds
# ```
#
# The quick check runs the first four steps of the curve, which show every known mistake. The chain runs all thirty,
# with your delta, your loss, your nine gradients, your clipping, AdamW and schedule. If it passes, you have written a
# trainer whose every step agrees with PEFT and torch.
#
# A real run looks the same, but longer. This is `story`, 180 steps on 240 pirate tales, 16 seconds on two cores
# (`llorch lora train story --data pirate -o my-adapter`):
#
# ![Loss of 180 steps on pirate tales: training and validation fall together from 8.0 to 0.4](pirate.svg)
#
# > Once upon a time, there was a cheerful pirate named Joe who sailed the warm south sea. One foggy evening, captain
# > Noah could not find his blue hat. "Where be me hat?" he roared.
#
# It begins at 8, above the 6.91 of a blind guess: lesson [16](../16_loss/README.md) showed why. It ends at 0.4, not
# at 0. The validation loss, on 20 tales that were never shown, ends at the same value: the model learned the style,
# not the tales.
#
# ## Run it
#
# The first step of the goldens has two micro-batches. Here it is in one piece, then cut:

# %%
import inspect

import numpy as np

from llorch.apps.learn.exercises.training import accumulated
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.judging.goldens.training_recipe import CURVE, SMOOTHING, step_batches
from llorch.training.numpy_step import loss_and_gradients

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
batches = step_batches(golden.batches, 1, CURVE.accumulation)
loss, grads = loss_and_gradients(weights, adapter, batches, label_smoothing=SMOOTHING)

per_batch = [loss_and_gradients(weights, adapter, [batch], label_smoothing=SMOOTHING) for batch in batches]
n = np.array([batch.n_trained for batch in batches])
sums = np.array([mean for mean, _ in per_batch]) * n
rows = np.stack([np.concatenate([g.ravel() for g in batch_grads.values()]) for _, batch_grads in per_batch])
cut, row = accumulated(sums, n, rows * n[:, None].astype(np.float32))
print(f"learned tokens {n.tolist()}, mean losses {[round(mean, 4) for mean, _ in per_batch]}")
print(f"at once {loss:.6f}   cut {cut:.6f}   golden {golden.shown(at('loss_curve', case='curve'))[0]:.6f}")
full = np.concatenate([g.ravel() for g in grads.values()])
print(f"gradients: {len(row):,} numbers, apart by ~{np.linalg.norm(row - full) / np.linalg.norm(full):.0e}")

# %% [markdown]
#
# ## The mistake
#
# This mistake was in nearly every library for years. It calls `loss.backward()` on the *mean* of each micro-batch,
# divided by the number of micro-batches:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["19"])["accumulated"]
for name, wrong in typed.items():
    print(f"{name:29} loss {wrong(sums, n, rows)[0]:.4f}   right {loss:.4f}")
print()
print(inspect.getsource(typed["accumulation-mean-of-means"]))
print(check_functions("19", accumulated=typed["accumulation-mean-of-means"]))

# %% [markdown]
# The loss is off by 0.12 of 3.66, which is hard to see. In October 2024 a developer trained on the same data with and
# without accumulation and compared the curves, and they did not agree. transformers, TRL and others were repaired
# within weeks. A closer look at one curve does not find this mistake. A second number that must be equal does.
#
# If all rows have the same number of learned tokens, the mistake has no effect. The batches of the goldens have 10,
# 13 and 8.

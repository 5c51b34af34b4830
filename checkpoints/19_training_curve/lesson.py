# %% [markdown]
# # 19 training_curve
#
# 40 minutes, one function of two lines, and a run of all your functions since 15. At the end your gradients teach
# `story` to talk like a pirate.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# Adapter, loss, gradients and step are ready ([15](../15_lora_delta/README.md) to
# [18](../18_optimizer_step/README.md)). Training runs them in a row, thirty times here, a hundred thousand times
# elsewhere. If each piece is right but they are put together wrongly, it shows here.
#
# ## Idea
#
# A step needs many tokens, so that its gradient points the right way on average. The memory of a machine allows few. So
# a step is cut into *micro-batches*: run one, keep its gradient, run the next, add the gradients, and only then move.
# This is called gradient accumulation. It promises that the step equals the step of the large batch.
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
# mean of four tokens is 2.5. The mean of the two means is 3: the single token counts three times as much as any other.
#
# ## The picture
#
# ![Thirty losses, and how far four runs are from the golden ones](fig/curve.svg)
#
# Above are the losses of the golden run. They go up and down in threes, because three batches take turns. Below is the
# distance of each run from the float64 reference, which the eye cannot see above. The grey band is the tolerance, made
# from the error of PEFT in float32. For each wrong run, a ring marks the first step outside the band. It is always the
# first step.
#
# ## Exercise
#
# Write one function in `l19_training_curve.py`:
#
# ```python
# def accumulated(loss_sums, n_trained, grad_sums) -> tuple[float, np.ndarray]: ...
# ```
#
# ```
# llorch learn check 19
# llorch learn check 19 --chain      # thirty steps with all that you have written; some seconds
# llorch learn hint 19
# ```
#
# The quick check runs the first four steps of the curve, which show every known mistake. The chain runs all thirty,
# with your delta, your loss, your nine gradients, your clipping, AdamW and schedule.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's function runs. Red is `FAIL`, with the first wrong
# loss of the curve ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 19.
#
# ## Run it
#
# The example from above, with two parameters:

# %%
import numpy as np

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

accumulated = PARTS["accumulated"].reference  # yours: from l19_training_curve import ...
gradients = np.array([[4, 0], [0, 8]], np.float32)
loss, gradient = accumulated(np.array([4.0, 6.0]), np.array([1, 3]), gradients)
print(loss, gradient)
print(check_functions("19", accumulated=accumulated))

# %% [markdown]
# ## A mistake to plant
#
# Average the means of the micro-batches. Nearly every library did so for years: it called `loss.backward()` on the
# *mean* of each micro-batch, divided by the number of micro-batches.

# %%
wrong = typed_mistakes(BY_NUMBER["19"])["accumulated"]["accumulation-mean-of-means"]
print(check_functions("19", accumulated=wrong))

# %% [markdown]
# The loss is off by 0.12 of 3.66, which is hard to see. In October 2024 a developer trained on the same data with and
# without accumulation, and the two curves did not agree. transformers, TRL and others were repaired within weeks. A
# closer look at one curve does not find this mistake. A second number that must be equal does.
#
# If all micro-batches have the same number of learned tokens, the mistake has no effect. Those of this check have 10,
# 13 and 8.
#
# ## Both engines
#
# - PEFT with torch is the reference. transformers divides by the tokens of the whole step if it gets
#   `num_items_in_batch`, and llorch always does.
# - In thirty steps, with Adam's division in each, errors could grow without bound. They do not: after step 30, PEFT in
#   float32 is as close to float64 as after a single forward pass.
# - With larger rates, two correct runs part after some hundred steps. Then only distributions can be compared.
#
# ## The finish: your gradients teach a pirate
#
# `story` comes with llorch, and so do 240 pirate tales. Your delta, your loss, your gradients, your clipping, your
# AdamW and your schedule train an adapter, in NumPy (`pip install 'llorch[train]'` reads and writes its files):
#
# ```
# llorch lora train story --data pirate --impl . -o pirate
# llorch run story "Once upon a time" --adapter pirate   # without --impl, by llorch
# ```
#
# The command prints the names of your functions first, and then the losses. These are some of its lines, with all 18
# functions written, on one core:
#
# ```text
# step 0: validation loss 8.0032
# step 18 of 180: loss 3.6217, norm 1.4, rate 4.24e-03
# step 54 of 180: loss 1.1727, norm 0.825, rate 3.61e-03
# 180 steps in 107.2 s, loss 0.3430
# validation loss 8.0032 before, 0.3831 after
# ```
#
# > Once upon a time, there was a cheerful pirate named Tom who sailed the cold north sea. He sailed with a duck named
# > Coco. [...] "Where be the wind?" said Coco. They waited for five days and ate all the fish soup. Nora had an idea.
# > "All hands to the oars!" she roared.
#
# ![Loss of 180 steps on pirate tales: training and validation fall together from 8.0 to 0.4](pirate.svg)
#
# The curve is that of llorch's run on torch, which takes 16 seconds on two cores. It begins at 8, above the 6.91 of a
# blind guess: lesson [16](../16_loss/README.md) showed why. It ends at 0.4, not at 0. The validation loss, on 20 tales
# that were never shown, ends at the same value: the model learned the style, not the tales.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

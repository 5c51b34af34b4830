# %% [markdown]
# # 10 argmax
#
# 10 minutes, one function. It is easy, except for one case.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# One row of logits is left ([09](../09_selected_logits/README.md)): a number for every token of the vocabulary. The
# simplest way to get one token out of it is to take the largest. This is called greedy, or temperature 0.
#
# ## Idea
#
# Logits are not probabilities, but they have the same order: the softmax of [11](../11_probabilities/README.md) keeps
# it, and so does every temperature. So the likeliest token is found without computing a single exponential.

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
row = story.forward(story.tokenizer.encode("Once upon a time there was a little"), last_only=True)[0]
for i in np.argsort(-row)[:4]:
    print(f"{i:4} {story.tokenizer.token_bytes(int(i)).decode()!r:9} {row[i]:.3f}")
first, second = np.sort(row)[::-1][:2]
print(f"lead {first - second:.3f}")

# %% [markdown]
# ` boy` wins, by a lead of less than a tenth. What if two were equal?
#
# ## The maths
#
# ```math
# \mathrm{id} = \min\, \{\, i : z_i = \max_j z_j \,\}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $z$ | (vocab,) | the row of logits |
# | $\mathrm{id}$ | a whole number | from 0 to vocab - 1; among equals the lowest |
#
# By hand: $z = (1, 4, 2, 4)$ gives 1, not 3.
#
# The lowest id is a convention, not a law. But two programs that must write the same text need the same convention.
# Equal logits are rare in float32 and common in bfloat16, where between 8 and 16 there are only 128 different numbers
# for a vocabulary of 150,000.
#
# ## The picture
#
# ![How far the best token led over the second, in every step of five greedy texts](fig/leads.svg)
#
# Every dot is a step of a greedy text of 24 tokens, with one line for each built-in model. It shows by how much the
# best logit was larger than the second, in float64 and in units of the size of the row. Left of the dashed line, the
# rounding of float32 can decide, and two right programs may choose differently. No dot is there.
#
# ## Exercise
#
# Write `argmax` in `l10_argmax.py`:
#
# ```python
# def argmax(row: np.ndarray) -> int: ...
# ```
#
# ```
# llorch learn check 10
# llorch learn hint 10
# ```
#
# ## Run it

# %%
from llorch.ops.sampling import greedy

print(greedy(np.array([1.0, 4.0, 2.0, 4.0])))
half = (row.view(np.uint32) >> 16 << 16).view(np.float32)  # what bfloat16 leaves of each number
print(f"~{len(np.unique(row))} different logits in float32, ~{len(np.unique(half))} in bfloat16")
print(
    "largest in bfloat16:", [story.tokenizer.token_bytes(int(i)).decode() for i in np.flatnonzero(half == half.max())]
)

# %% [markdown]
#
# ## The mistake
#
# The mistake is a loop with `>=`. Rust's `max_by` does the same: it returns the last of equals. On ordinary rows
# there is no difference.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["10"])["argmax"]["argmax-last-of-ties"]
print(inspect.getsource(wrong))
report = check_functions("10", argmax=wrong)
print(report)
print(
    {
        comparison.stage_ref.run: sum(failed.stage_ref.run == comparison.stage_ref.run for failed in report.wrong)
        for comparison in report.comparisons
    }
)

# %% [markdown]
# All rows of the engines are right. The check fails only on a row that was made for it: an engine's row, with the
# largest number written to two later places. No golden decides this row. The convention above does, and both engines
# keep it.

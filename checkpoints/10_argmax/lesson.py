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
# it, and so does every temperature. So the likeliest token is found without computing a single exponential. Here are
# the four largest logits after *little*, in float32 and as bfloat16 stores them:

# %%
import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little")
row = story.forward(ids, last_only=True)[0]
half = (row.view(np.uint32) >> 16 << 16).view(np.float32)  # what bfloat16 leaves
for i in np.argsort(-row)[:4]:
    word = story.tokenizer.decode([int(i)])
    print(f"{i:4} {word!r:9} {row[i]:.3f}   {half[i]:.3f}")

# %% [markdown]
# ` boy` wins, by a lead of less than a tenth. In bfloat16, ` lion` and ` frog` are equal. Which token is chosen when
# two equal logits lead?
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
# Equal logits are rare in float32 and common in bfloat16. Between 8 and 16, bfloat16 has only 128 different numbers,
# for a vocabulary of 150,000.
#
# ## The picture
#
# ![How far the best token led over the second, in every step of five greedy texts](fig/leads.svg)
#
# Every dot is a step of a greedy text of 24 tokens, with one line for each of five models. It shows by how much the
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
# **Red and green:** the untouched file gives `BORROWED`: llorch's function runs. Red is `FAIL`, with the expected id
# and yours ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and `llorch learn list`
# shows `PASS` next to 10.
#
# ## Run it

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

argmax = PARTS["argmax"].reference  # yours: from l10_argmax import argmax
print(argmax(np.array([1.0, 4.0, 2.0, 4.0])))
print(check_functions("10", argmax=argmax))

# %% [markdown]
# ## A mistake to plant
#
# Let the later of two equal logits win: a loop that compares with `>=` does so, and so does Rust's `max_by`. On
# ordinary rows there is no difference.

# %%
wrong = typed_mistakes(BY_NUMBER["10"])["argmax"]["argmax-last-of-ties"]
print(check_functions("10", argmax=wrong))

# %% [markdown]
# All rows of the engines are right. The check fails only on a row that was made for it, `tie`: an engine's row, with
# the largest number written to two later places. No golden decides this row. The convention above does, and both
# engines keep it.
#
# ## Both engines
#
# - llama.cpp's greedy sampler replaces its choice only by a larger logit. `torch.argmax` returns the first maximum.
#   Both take the lowest id, as NumPy does.
# - Both engines make the same choice in every built-in model, by leads that are larger than rounding.
# - A larger model in a longer text comes to a closer pair sooner or later. Then llorch's verdict is TIE, with the gap,
#   and not FAIL.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

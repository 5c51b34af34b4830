# %% [markdown]
# # 09 selected_logits
#
# 10 minutes, one line. The question is which row to take.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# The model has made logits ([08](../08_logits/README.md)): for each token of the text, one number for every token of
# the vocabulary. To continue the text, one row of them is needed.
#
# ## Idea
#
# Row $t$ was made from the tokens 0 to $t$ and nothing after them, because the mask of
# [04](../04_attention_scores/README.md) hides later tokens. It predicts the token *after* token $t$. Training uses all
# rows at once. Writing uses only one.

# %%
import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
logits = story.forward(ids)
print(logits.shape)
for token, candidates in zip(ids, np.argsort(-logits), strict=True):
    piece, best = (story.tokenizer.decode([int(i)]) for i in (token, candidates[0]))
    print(f"after {piece or 'the begin':10} {best!r}")

# %% [markdown]
# The left column is the text, the right column is the model's choice. They agree for the first words. They differ where
# the text could continue in several ways.
#
# ## The maths
#
# ```math
# z_\mathrm{selected} = z_{T-1}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $z$ | (seq, vocab) | logits, one row a token |
# | $T$ | a number | tokens of the pass; rows count from 0, so the last is $T - 1$ |
#
# By hand: three tokens have the rows (1, 0), (0, 2) and (5, 3). The selected row is (5, 3).
#
# ## The picture
#
# ![For every row the five likeliest tokens; the last row is outlined](fig/rows.svg)
#
# The picture has one column for each token of the text. Below it stand the five likeliest next tokens and their
# probabilities. Sampling sees only the outlined column.
#
# ## Exercise
#
# Write `last_row` in `l09_selected_logits.py`:
#
# ```python
# def last_row(logits: np.ndarray) -> np.ndarray: ...
# ```
#
# ```
# llorch learn check 09
# llorch learn hint 09
# ```
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's function runs. Red is `FAIL`, with the first wrong
# number of the row ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 09.
#
# ## Run it
#
# While your function is in place, llorch computes all rows, so that there is something to choose from. Without it,
# llorch computes only one row of logits:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

last_row = PARTS["last_row"].reference  # yours: from l09_selected_logits import last_row
print(last_row(np.array([[1, 0], [0, 2], [5, 3]], np.float32)))
difference = story.forward(ids, last_only=True)[0] - last_row(logits)
print(f"one row against the last of ten: ~{np.abs(difference).max():.0e} apart")
print(check_functions("09", last_row=last_row))

# %% [markdown]
# The bits are not always the same: a matrix product uses another routine for one row than for ten, and adds in another
# order.
#
# ## A mistake to plant
#
# Return the row before the last. An index that is too large raises an error; an index that is too small raises none.

# %%
wrong = typed_mistakes(BY_NUMBER["09"])["last_row"]["selected-row-before-last"]
print(check_functions("09", last_row=wrong))

# %% [markdown]
# Row $T - 2$ predicts the token that the prompt already ends with. So a program with this mistake repeats the last
# word, and the model looks bad. In batches the mistake has another form: sequences of different lengths are padded, and
# "the last row" is a row of padding.
#
# ## Both engines
#
# - llama.cpp drops the other rows in its last layer, before the first addition.
# - transformers runs all rows through the blocks and the final norm, and applies `lm_head` to the last one
#   (`logits_to_keep=1`).
# - llorch drops them before the final norm. For a prompt of 500 tokens this saves 499 of 500 parts of the product with
#   the largest matrix of the model.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

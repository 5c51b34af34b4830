# %% [markdown]
# # 09 selected_logits
#
# 10 minutes, one line. The question is which row to take.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# The model has made logits ([08](../08_logits/README.md)): for each token of the text one number for every token of
# the vocabulary. To go on with the text, one row of them is needed.
#
# ## Idea
#
# Row $t$ was made from the tokens 0 to $t$ and nothing after them, because the mask of
# [04](../04_attention_scores/README.md) hides later tokens. It predicts the token *after* token $t$. Training uses
# all rows at once. Writing uses only the last one.

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
logits = story.forward(ids)
print(logits.shape)
for i, row in zip(ids, logits, strict=True):
    piece, best = (story.tokenizer.token_bytes(int(token_id)).decode() for token_id in (i, row.argmax()))
    print(f"after {piece or 'the begin':10} {best!r}")

# %% [markdown]
# The left column is the text, the right column is the model's choice. They agree for the first words and differ where
# the text could go on in several ways.
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
# While your function is in place, llorch computes all rows, so that there is something to choose from.
#
# ## Run it

# %%
last = story.forward(ids, last_only=True)
print(last.shape, "the same token:", last[0].argmax() == logits[-1].argmax())
print(f"largest difference ~{np.abs(last[0] - logits[-1]).max():.0e}")

# %% [markdown]
# The bits are not always the same: a matrix product uses another routine for one row than for ten, and adds in
# another order.
#
# ## The mistake
#
# The mistake is off by one, towards the front. Towards the end, the index would be out of range and raise an error.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["09"])["last_row"]["selected-row-before-last"]
print(inspect.getsource(wrong))
print(check_functions("09", last_row=wrong))

# %% [markdown]
# Row $T - 2$ predicts the token that the prompt already ends with. So a program with this mistake repeats the last
# word and looks as if the model were bad. In batches the mistake has another form: sequences of different lengths are
# padded, and "the last row" is a row of padding.

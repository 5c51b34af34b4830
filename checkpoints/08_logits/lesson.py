# %% [markdown]
# # 08 logits
#
# 20 minutes, one function of two lines. It completes the forward pass.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# The last block has added its part to the stream ([07](../07_block/README.md)). Each token is now a row of 192 numbers
# in `story`. This row holds the model's prediction of the next word, and this lesson turns it into words.
#
# ## Idea
#
# One norm and one product are left. The output matrix has a row for every token of the vocabulary, 1003 in `story`.
# Each row is as wide as the stream. The dot product of the stream with row $t$ is the *logit* of token $t$: the more
# the stream points in the direction of that row, the likelier token $t$ is next. Logits are not yet probabilities. The
# softmax over them comes in [11](../11_probabilities/README.md).

# %%
import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
z = story.forward(ids)
print("logits", z.shape)
for position in (1, 4, 9):
    best = np.argsort(-z[position])[:3]
    print(f"after {story.tokenizer.decode([ids[position]]).strip()!r}:", end=" ")
    words = (story.tokenizer.decode([int(token)]).strip() for token in best)
    print(*(f"{word!r} {logit:.1f}" for word, logit in zip(words, z[position, best], strict=True)))

# %% [markdown]
# Every position gives a prediction, not only the last one, because the mask of 04 hides later tokens from each
# position. Training uses all of them. Generation needs only the last row.
#
# Does a model need a second table of the size of the vocabulary? The embedding table already has one row for each
# token, of the same width. Many small models use it twice, for reading and for writing: they are *tied*. `story` is
# tied and saves 192,576 numbers. A tied file has no `lm_head`. An untied file has both tables, and they are different.
#
# ## The maths
#
# ```math
# z_t = f_t\, W^\top, \qquad W = W_\mathrm{lm\_head} \text{ or } E
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $f$ | (seq, hidden) | `final_norm`: the stream after the last block, normalised |
# | $W_\mathrm{lm\_head}$ | (vocab, hidden) | the output matrix of an untied model |
# | $E$ | (vocab, hidden) | `embed_tokens`, which a tied model uses again |
# | $z$ | (seq, vocab) | logits |
#
# By hand: a stream of (1, -1), which the norm leaves as it is, and three tokens with the rows (2, 0), (0, 2) and (1,
# -1). The logits are 2, -2 and 2. A long row that points half the right way counts as much as a short row that points
# exactly there.
#
# ## The picture
#
# ![The five likeliest next tokens after fox, if the model ended after each of its layers](fig/lens.svg)
#
# Blocks only add to the stream, so the last norm and the output matrix can be applied after any layer. This is called
# the logit lens: what would the model say if it ended here? With no layer at all, `story` repeats the last word, *fox*:
# the tied table finds its row again, and the next best are other animals. One block later this is gone, and the guesses
# are words that follow an animal. Then the full stop leads for three layers. Only the last block decides that this fox
# gets a clause (*who*) or a name (*named*).
#
# ## Exercise
#
# Write `logits` in `l08_logits.py`. It gets both matrices, and your function decides which one to use:
#
# ```python
# def logits(x, final_norm, lm_head, embed_tokens, eps) -> np.ndarray: ...
# ```
#
# ```
# llorch learn check 08
# llorch learn check 08 --chain     # on the results of your own earlier functions
# llorch learn hint 08              # a direction; again for the formula, again for the code
# ```
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's function runs. Red is `FAIL`, with the line of your
# function and the first wrong number ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)),
# and `llorch learn list` shows `PASS` next to 08.
#
# ## Run it

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import PARTS

logits = PARTS["logits"].reference  # yours: from l08_logits import logits
x, gain = np.array([[1, -1]], np.float32), np.ones(2, np.float32)
rows = np.array([[2, 0], [0, 2], [1, -1]], np.float32)
print(logits(x, final_norm=gain, lm_head=rows, embed_tokens=0 * rows, eps=0.0))
print(check_functions("08", logits=logits))

# %% [markdown]
# If `--chain` passes and you have written everything up to here, this is your model from ids to logits:
#
# ```
# llorch run story "Once upon a time there was a little fox" --impl .
# ```
#
# ## A mistake to plant
#
# Leave out the last norm in your file. It is easy to forget: it stands outside the blocks, and its absence raises no
# error. The same mistake in llorch's function:

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["08"])["logits"]["logits-final-norm-skipped"]
with Implementation("this page", {"logits": wrong}).installed():
    tokens = story.generate("Once upon a time there was a little fox", max_tokens=20)
    print("".join(token.text for token in tokens), "\n")
    unnormed = story.forward(ids)
print(f"largest logit after fox {z[-1].max():.1f}, now {unnormed[-1].max():.0f}\n")
print(check_functions("08", logits=wrong))

# %% [markdown]
# The text is still a good story. The norm divides a whole row by one number, which changes no ranking; only its gain
# does. So greedy text changes little. Sampling would suffer: with logits around 1900, the softmax gives everything to
# one token at any usual temperature.
#
# ## Both engines
#
# - llama.cpp computes logits only for the tokens that the caller asks for. transformers computes all rows unless told
#   otherwise.
# - A tied GGUF file has no `output.weight`, and llama.cpp takes `token_embd.weight`. In transformers, `lm_head` and
#   `embed_tokens` share one parameter.
# - On `story`, nine of ten logits of the two engines differ, by 1.4e-05 at most. Both choose the same token after every
#   word: the closest two logits are a thousand times further apart.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

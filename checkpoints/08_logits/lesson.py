# %% [markdown]
# # 08 logits
#
# 20 minutes, one function of two lines. It completes the forward pass.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# The last block has added its part to the stream ([07](../07_block/README.md)). Each token is a row of 192 numbers in
# `story`, and this row holds the model's prediction of the next word. It has to become words.
#
# ## Idea
#
# One more norm and one more product are left. The output matrix has a row for every token of the vocabulary, 1003 in
# `story`, as wide as the stream. The dot product of the stream with row $t$ is the *logit* of token $t$: the more the
# stream points in that direction, the likelier token $t$ is next. Logits are not yet probabilities. The softmax over
# them comes in [11](../11_probabilities/README.md).

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
trace: dict[str, np.ndarray] = {}
logits = story.forward(ids, trace=trace)
print("logits", logits.shape)
for position in (1, 4, 9):
    best = np.argsort(-logits[position])[:3]
    candidates = ", ".join(f"{story.tokenizer.decode([int(t)]).strip()!r} {logits[position, t]:.1f}" for t in best)
    print(f"after {story.tokenizer.decode([ids[position]]).strip()!r}: {candidates}")

# %% [markdown]
# Every position gives a prediction, not only the last one, because the mask of 04 hides later tokens from each
# position. Training uses all of them. Generation needs only the last row.
#
# Is a second table of the size of the vocabulary needed? The embedding table has one row for each token already, of
# the same width. Many small models use it twice, for reading and for writing: they are *tied*. `story` is tied and
# saves 192,576 numbers. A tied file has no `lm_head`. An untied file has both tables, and they are different.
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
# By hand: a stream of (1, -1), and three tokens with the rows (2, 0), (0, 2) and (1, -1). The logits are 2, -2 and 2.
# A long row that points half the right way counts as much as a short row that points exactly there.
#
# ## The picture
#
# ![The five likeliest next tokens after fox, if the model ended after each of its layers](fig/lens.svg)
#
# Since blocks only add to the stream, the last norm and the output matrix can be applied after any layer. This is
# called the logit lens: what would the model say if it ended here? With no layer at all, `story` repeats the last
# word, *fox*: the tied table finds its row again, and the next best are other animals. One block later this is gone,
# and the guesses are words that follow an animal. Then the full stop leads for three layers, and only the last block
# decides that this fox gets a clause (*who*) or a name (*named*).
#
# ## Exercise
#
# Write `logits` in `l08_logits.py`. It gets both matrices. Your function decides which one to use.
#
# ```python
# def logits(x, final_norm, lm_head, embed_tokens, eps) -> np.ndarray:
# ```
#
# ```
# llorch learn check 08
# llorch learn check 08 --chain
# llorch learn hint 08          # a direction; once more for the formula, once more for the code
# ```
#
# After it passes, break it: always use `embed_tokens`. The verdict's line *still right* then names the tied models,
# where this is no mistake. A test with `story` alone never finds it.
#
# If you have written everything up to here and `--chain` passes, this is your model from ids to logits:
#
# ```
# llorch run story "Once upon a time there was a little fox" --impl .
# ```
#
# ## Run it
#
# Here is the example from above (without the norm), then `micro-llama`, which is not tied, from the tensors that
# llama.cpp stored:

# %%
from llorch.judging.goldens.forward import read
from llorch.ops.linear import linear
from llorch.runtime.builtin import goldens_folder

print(linear(np.array([[1, -1]], np.float32), np.array([[2, 0], [0, 2], [1, -1]], np.float32)))

golden = read(goldens_folder() / "micro-llama")
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
weights = llorch.load("micro-llama").weights
z = linear(llamacpp["final_norm"], weights["lm_head"])
print("stream", llamacpp["final_norm"].shape, " matrix", weights["lm_head"].shape, " logits", z.shape)
print("llama.cpp's logits, within 1e-4:", bool(np.abs(z - llamacpp["logits"]).max() < 1e-4))

# %% [markdown]
#
# ## The mistake
#
# The last norm is easy to forget: it stands outside the blocks, and its absence raises no error.

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["08"])["logits"]["logits-final-norm-skipped"]
print(inspect.getsource(wrong))


def continued(**parts) -> str:
    with Implementation("this page", parts).installed():
        return "".join(token.text for token in story.generate("Once upon a time there was a little fox", max_tokens=20))


print("right  ", continued())
print("no norm", continued(logits=wrong))
with Implementation("this page", {"logits": wrong}).installed():
    unnormed = story.forward(ids)
print(f"largest logit after fox: {logits[-1].max():.1f}, without the norm {unnormed[-1].max():.0f}")
print("same first choice at", int(np.sum(logits.argmax(-1) == unnormed.argmax(-1))), "of", len(ids), "places")

# %% [markdown]
# The text without the norm is still a good story, about a fox named Teddy. The gain of the norm weighs the elements
# of the stream, and the division only scales a row. So the ranking is disturbed but not destroyed, and greedy text
# changes little. Sampling would suffer: with logits around 1900, the softmax gives everything to one token at any
# usual temperature. The check finds it:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("08", logits=wrong))

# %% [markdown]
# # 03 kv_cache
#
# 40 minutes, one function of a few lines. A wrong cache still writes good English.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# Each token has a query, a key and a value ([02](../02_qkv/README.md)), and queries and keys are turned by their
# position ([01b](../01b_rope/README.md)). In the next lesson every query meets the keys of its own token and of all
# tokens before. A model writes one token at a time, so each new token needs the same keys and values again.
#
# ## Idea
#
# A key depends on its token and on the tokens before, never on later ones. Once made, it does not change. So keys and
# values are kept in the *cache*, two arrays for each layer. A pass takes the new tokens alone and appends their rows.
# Attention reads the whole context.
#
# The cache saves nearly all of the work. To compute token 100 of a text, `story` needs 215 million multiplications
# without a cache, and 2.3 million with one.
#
# The price is memory: for each token and layer a key and a value of every key head. In `story` that is 5 KiB a token in
# float32. In Llama 3.1 8B it is 128 KiB a token in 16 bits, and 16 GiB for a full context of 131,072 tokens: as much as
# the weights. Therefore models have fewer key heads than query heads.
#
# ## The maths
#
# ```math
# K = [\,K_\mathrm{past};\; k_\mathrm{rope}\,], \quad V = [\,V_\mathrm{past};\; v_\mathrm{proj}\,]
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $k_\mathrm{rope}, v_\mathrm{proj}$ | (seq, kv_heads, head_dim) | rows of the new tokens: keys turned, values not |
# | $K_\mathrm{past}, V_\mathrm{past}$ | (kv_heads, past, head_dim) | rows of earlier passes; past may be 0 |
# | $K, V$ | (kv_heads, ctx, head_dim) | rows that attention reads; ctx is past + seq |
#
# $[\,a;\, b\,]$ puts $b$ after $a$, along the tokens. Mind the axes: tokens come first in the new rows and second in
# the cache, where all rows of one head lie together.
#
# ## The picture
#
# ![Multiplications for the next token, and memory, by the length of the text](fig/cost.svg)
#
# Left: the cost of the next token of `story`, with the cache and without. Right: the memory that the cache takes. All
# axes are logarithmic.
#
# ## Exercise
#
# Write one function in `l03_kv_cache.py`:
#
# ```python
# def append(past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
# ```
#
# ```
# llorch learn check 03
# llorch learn hint 03
# ```
#
# Attention reads the arrays that you return, and the next pass hands them to `append` again. The check runs all tokens
# at once, then 1 and the rest, half and half, and all but the last and the last.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: append`, a wrong
# function `FAIL`, the right one `PASS` after 320 comparisons in 4 models.
#
# ## Run it
#
# Two key heads of one number each. The first pass has the tokens 10 and 11 in head 0, 20 and 21 in head 1. The second
# pass adds one token:

# %%
import numpy as np

from llorch.apps.learn.lessons import PARTS

append = PARTS["append"].reference  # yours: from l03_kv_cache import append
nothing = np.zeros((2, 0, 1))  # (kv_heads, past, head_dim)
first, second = np.array([[[10.0], [20]], [[11], [21]]]), np.array([[[12.0], [22]]])  # (seq, kv_heads, head_dim)
k, v = append(nothing, nothing, first, -first)
print("first pass ", first.shape, "->", k.shape, k[..., 0].tolist())
k, v = append(k, v, second, -second)
print("second pass", second.shape, "->", k.shape, k[..., 0].tolist())
print("values     ", v[..., 0].tolist())

# %% [markdown]
# Each head has its tokens in the order of the text.
#
# ## A mistake to plant
#
# Make an off-by-one error: take the position of the last token for the first free slot. In the first pass, all is well.
# The second pass begins one slot too early and overwrites the last token of the prompt. From then on every token lies
# one slot too early, and the last slot stays empty. The running model writes this:

# %%
import llorch
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["03"])["append"]
story = llorch.load("story")


def continue_story(**functions) -> str:
    with Implementation("this page", functions).installed():
        tokens = story.generate("Once upon a time there was a little fox", max_tokens=40)
        text = "".join(token.text for token in tokens)
    return text[text.index("One day") :]  # up to there all three are the same


print("right:             ", continue_story())
print("one slot early:    ", continue_story(append=wrong["cache-one-slot-early"]))
print("newest token first:", continue_story(append=wrong["cache-newest-first"]))

# %% [markdown]
# The second text is good English from a model that has lost one word of its prompt. The fox is overwritten, so the
# story goes on with a puppy. Without the right text for comparison, no reader would notice. The third text is *right*,
# from a wrong cache: new tokens were put in front of the old ones, and a single query that sees all keys does not
# depend on their order. So texts are a weak test. The check looks into the cache:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("03", append=wrong["cache-one-slot-early"]))

# %% [markdown]
# "1 cached" in the first line names the split: 1 token in the first pass, the rest in the second. Nothing was wrong
# before the second pass.
#
# ## Both engines
#
# - Nothing is computed here, so the cache of each engine holds, bit by bit, what the engine made one step before. The
#   tolerance of the isolated check is 0.
# - llama.cpp keeps keys and values in 16 bits by default, which costs 2e-04 in every number. llorch compares with a
#   cache in 32 bits.
# - llama.cpp keeps values transposed, with tokens as the fastest axis. transformers joins arrays as you do, along
#   another axis.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

# %% [markdown]
# # 03 kv_cache
#
# 40 minutes, one function of a few lines. A wrong cache still writes good English.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# Each token has a query, a key and a value ([02](../02_qkv/README.md)), and queries and keys are turned by their
# position ([01b](../01b_rope/README.md)). In the next lesson every query meets the keys of its own token and of all
# tokens before. A model writes one token at a time, so the same keys and values are needed again for each token to
# come.
#
# ## Idea
#
# A key depends on its token and on the tokens before, never on later ones. Once made, it does not change. So keys and
# values are kept in the cache, two arrays for each layer. A pass takes the new tokens alone, appends their rows, and
# attention reads the whole context.
#
# The cache saves nearly all of the work. These are the multiplications for token 100 in `story`:

# %%
import numpy as np

import llorch

story = llorch.load("story")
c = story.config
matrices = sum(w.size for w in story.weights.layer(0).values() if w.ndim == 2)
attention = 2 * c.q_width  # with one token of the context: a score and a share of its value


def multiplications(new: int, context: int) -> int:
    return c.n_layers * new * (matrices + attention * context)


print(f"all 100 tokens again  {multiplications(100, 50):>12,}")  # 50: what a token sees on the average
print(f"one token, and cache  {multiplications(1, 100):>12,}")

# %% [markdown]
# The price is memory: for each token and layer a key and a value of every key head. In `story` that is 2 * 5 * 4 * 32
# numbers, 5 KiB in float32. In Llama 3.1 8B it is 128 KiB a token in 16 bits, and 16 GiB for a full context of
# 131,072 tokens: as much as the weights. Hence the few key heads of lesson 02.
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
# $[\,a;\, b\,]$ puts $b$ after $a$, along the tokens. Mind the axes: tokens come first in the rows and second in the
# cache, where all rows of one head lie together.
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
# Break it on purpose: use `k.reshape(kv_heads, seq, head_dim)` to exchange the axes. It has the right shape and mixes
# heads with tokens.
#
# ## Run it
#
# A cache is right if a text given in parts ends in the same numbers as a text given at once.

# %%
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

ids = story.tokenizer.encode("Once upon a time there was a little fox")


def logits(*parts: list[int]) -> np.ndarray:
    cache = KVCache(c, np.float32)
    rows = [forward(np.array(part), story.weights, cache) for part in parts]
    print("passes of", [len(part) for part in parts], "tokens leave", cache.length, "in the cache")
    return np.concatenate(rows)


one_pass, halves, single = logits(ids), logits(ids[:4], ids[4:]), logits(*([token] for token in ids))
same = [bool(np.allclose(split, one_pass, rtol=1e-5, atol=1e-4)) for split in (halves, single)]
print("the same logits:", same)

# %% [markdown]
#
# ## The mistake
#
# It is an off-by-one error: the position of the last token is taken for the first free slot.

# %%
import inspect

from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["03"])["append"]["cache-one-slot-early"]
print(inspect.getsource(wrong))

# %% [markdown]
# `room` is the old cache with zeros after it. In the first pass `start` is 0, and all is well. The second pass begins
# one slot too early and overwrites the last token of the prompt. From then on every token lies one slot too early,
# and the last slot stays empty. In the running model it writes this:

# %%
from llorch.apps.learn.choice import Implementation


def continue_story() -> str:
    tokens = story.generate("Once upon a time there was a little fox", max_tokens=40)
    text = "".join(token.text for token in tokens)
    return text[text.index("One day") :]  # up to there all three are the same


print("right:\n   ", continue_story())
for name in ("cache-one-slot-early", "cache-newest-first"):
    with Implementation("this page", {"append": typed_mistakes(BY_NUMBER["03"])["append"][name]}).installed():
        print(f"{name}:\n    {continue_story()}")

# %% [markdown]
# This is good English from a model that has lost one word of its prompt. It still knows that something was little.
# The fox is overwritten, so the story goes on with a puppy. Without the right text for comparison, no reader would
# notice. The third text is *right*, from a wrong cache: new tokens were put in front of the old ones, and a single
# query that sees all keys does not depend on their order. With two tokens in one pass, it does.
#
# So texts are a weak test. The check looks into the cache:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("03", append=wrong))

# %% [markdown]
# It runs your `append` on all tokens at once, on 1 and the rest, on half and half, and on all but the last and the
# last. "1 cached" names the split: nothing was wrong before the second pass.

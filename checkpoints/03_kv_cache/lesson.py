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
# ## The reference
#
# <!-- source: llorch.model.cache.KVCache.append -->
#
# The reference writes into storage that grows by doubling, so that a token does not copy the whole context. Your
# `append` may simply join two arrays and return the result. Attention reads the returned array, and the next pass
# hands it to `append` again.
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
# ## Where the engines differ
#
# They do not differ: nothing is computed here. The cache of each engine holds what the engine made one step before,
# bit by bit.

# %%
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

for name, output in read(goldens_folder() / "micro-llama").engine_outputs.items():
    trace = output.traces["near"]
    keys, values = trace["l0.k_rope"].swapaxes(0, 1), trace["l0.v_proj"].reshape(12, 2, 32).swapaxes(0, 1)
    wrong_bits = np.sum(trace["l0.k_cache"] != keys) + np.sum(trace["l0.v_cache"] != values)
    print(f"{name:12} {trace['l0.k_cache'].shape}: {wrong_bits} of {keys.size + values.size} numbers differ")

# %% [markdown]
# Therefore the tolerance of the isolated check is 0. This changes if an engine keeps its cache in fewer bits.
# float16, llama.cpp's default, costs 2e-4 in every number. These goldens were taken without it.
#
# - Nothing is computed between `k_rope`, `v_proj` and the caches, so isolated distances are exactly 0.
# - The caches are read where attention reads them: in llama.cpp as the first source of the nodes `kq-{i}` and
#   `kqv-{i}`, in transformers as arguments of the attention function, before keys and values are repeated for the
#   grouped heads.
# - llama.cpp keeps v transposed (tokens are the fastest axis) when flash attention is off, and its view of the
#   context is padded. llorch cuts it to the real tokens and brings it into llorch's order of axes.
# - llama.cpp keeps keys and values in F16 by default, which also rounds what they are multiplied with. Goldens are
#   taken with F32 instead.
#
# Further reading:
#
# - Pope and others, [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), 2022: what the
#   cache costs in memory and in time spent reading it.
# - Kwon and others, [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), 2023: the cache in pages, for many texts at once.
# - `DynamicCache` in transformers
#   ([cache_utils.py](https://github.com/huggingface/transformers/blob/main/src/transformers/cache_utils.py)): the
#   same concatenation, along another axis.
# - [transformers 43082](https://github.com/huggingface/transformers/issues/43082): positions that are wrong once a
#   cache is there, the other half of this lesson's bugs.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# Both caches are compared after one pass over the whole input. Then, in mode `decode`, llorch's model runs in two
# passes. The first pass takes 1 token, half of the tokens, or all but the last one. The second takes the rest. Every
# stage of the second pass is compared with the same rows of the single pass of each engine, on their own scale.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../README.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_03                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

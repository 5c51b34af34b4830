# %% [markdown]
# # 03 kv_cache: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.model.cache.KVCache.append -->
#
# The reference writes into storage that grows by doubling, so that a token does not copy the whole context. The
# `append` of the exercise may simply join two arrays and return the result.
#
# ## Where the engines differ
#
# They do not differ: nothing is computed here. The cache of each engine holds what the engine made one step before,
# bit by bit.

# %%
import numpy as np

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
# A cache is right if a text given in parts ends in the same logits as a text given at once:

# %%
import llorch
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")


def logits(*parts: list[int]) -> np.ndarray:
    cache = KVCache(story.config, np.float32)
    return np.concatenate([forward(np.array(part), story.weights, cache) for part in parts])


one_pass, halves, single = logits(ids), logits(ids[:4], ids[4:]), logits(*([token] for token in ids))
print("the same logits:", [bool(np.allclose(split, one_pass, rtol=1e-5, atol=1e-4)) for split in (halves, single)])

# %% [markdown]
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
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
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

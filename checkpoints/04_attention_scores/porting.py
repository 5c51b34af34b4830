# %% [markdown]
# # 04 attention_scores: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.attention.attention_scores -->
#
# <!-- source: llorch.ops.attention.attention_probs -->
#
# Two things serve only speed and exactness. The query heads of a group are laid one after
# the other, so that one product with the shared key head is enough. Repeating the keys with `np.repeat(k, heads //
# kv_heads, axis=0)` gives the same numbers. And `widen` computes small arrays in float64.
#
# ## Where the engines differ
#
# This is layer 0 of `micro-llama`, computed from each engine's queries and keys:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
reference = golden.reference.engine_output.traces["near"]
for stage in ("attn_scores", "attn_probs"):
    a, b, exact = (run[f"l0.{stage}"].astype(np.float64) for run in (llamacpp, transformers, reference))
    print(f"{stage}: hidden at the same places: {np.array_equal(np.isfinite(a), np.isfinite(b))}")
    a, b, exact = (array[np.isfinite(array)] for array in (a, b, exact))
    print(f"  {np.sum(a != b)} of {a.size} numbers differ, by {np.abs(a - b).max():.1e} at most")
    for name, actual in (("llama.cpp", a), ("transformers", b)):
        print(f"  {name:12} from float64: {np.linalg.norm(actual - exact) / np.linalg.norm(exact):.1e}")
for name, run in (("llama.cpp", llamacpp), ("transformers", transformers)):
    sums = run["l0.attn_probs"].sum(axis=-1, dtype=np.float64)
    print(f"rows of {name:12} sum to one within {np.abs(sums - 1).max():.1e}")

# %% [markdown]
# The hidden places agree exactly. All other differences are rounding, and no row of shares sums to exactly one in
# float32.
#
# - llama.cpp's `kq-{i}` holds bare products. Scale and mask are applied inside its softmax node, so no node holds the
#   scores. llorch multiplies `kq-{i}` by the scale and adds the mask that this node was given. It is the only stage
#   of llama.cpp that is put together outside the engine.
# - transformers adds the lowest finite float32 where it hides a key. The trace has -inf there.
# - llama.cpp and llorch collect the sum of the softmax in float64. transformers computes the softmax in float32.
# - transformers repeats keys and values until there is one for every query head. In llama.cpp and llorch, several
#   query heads read the same one.
# - With flash attention (llama.cpp) or `sdpa` (transformers) these tensors do not exist. Goldens are taken with both
#   off.
#
# Further reading:
#
# - Vaswani and others, [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: section 3.2.1, with the
#   scale and its reason in a footnote.
# - Ainslie and others, [GQA](https://arxiv.org/abs/2305.13245), 2023: why heads share keys.
# - Xiao and others, [Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453),
#   2023: why so many heads look at the first token.
# - Milakov and Gimelshein, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867), 2018: the
#   same shares in one pass, which flash attention is built on.
# - `eager_attention_forward` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py))
#   and `build_attn_mha` in llama.cpp
#   ([llama-graph.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp)).
# - [onnx 7274](https://github.com/onnx/onnx/issues/7274): keys tiled where they are to be repeated, in a standard's
#   own reference.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# Scores and probabilities of every layer are compared. In the scores, -inf marks the hidden keys. Both sides must
# have it in the same places, and the other entries are compared as numbers.
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
# pytest -k checkpoint_04                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

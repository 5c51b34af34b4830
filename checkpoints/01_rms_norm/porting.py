# %% [markdown]
# # 01 rms_norm: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.rms_norm.rms_norm -->
#
# <!-- source: llorch.ops.rms_norm.root_mean_square -->
#
# `widen` makes float64 copies of small arrays, so that the reference is as exact as float32 can show. A float32 version
# stays well inside the tolerance.
#
# ## Where the engines differ
#
# Both engines read the same embeddings, bit by bit, and use the same formula. Still, they differ:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
a, b, reference = (t["l0.attn_norm"] for t in (llamacpp, transformers, golden.reference.engine_output.traces["near"]))
print("inputs the same:", np.array_equal(llamacpp["embed"], transformers["embed"]))
print(f"outputs differ in {np.sum(a != b)} of {a.size} numbers, by {np.abs(a - b).max():.1e} at most")
for name, actual in (("llama.cpp", a), ("transformers", b)):
    print(f"{name:12} from float64: {np.linalg.norm(actual - reference) / np.linalg.norm(reference):.1e}")

# %% [markdown]
# Neither is wrong: a float32 number has 24 bits, and both are off by half a bit or so. The tolerance is derived from
# rounding, never chosen: here it is 4 units in the last place, 4.8e-07. An $\epsilon$ after the root is 20,000 times
# beyond.
#
# - llama.cpp makes two nodes, `norm-{i}` (RMS_NORM, without the gain) and `attn_norm-{i}` (MUL). The stage is the
#   second. The CPU backend can fuse the two, which is switched off for goldens.
# - llama.cpp squares in float32, sums in float64 and multiplies with $1 / \sqrt{\cdot}$ in float32. transformers does
#   all of it in float32, with `rsqrt`. llorch takes the mean in float64. Up to 100,000 elements, everything is
#   float64 and rounded once ([`ops/precision.py`](../../llorch/ops/precision.py)).
# - transformers casts back to the dtype of the model *before* the gain is multiplied. This changes nothing in
#   float32, but it does in bfloat16.
# - The last entry of transformers' `hidden_states` is `final_norm`, not the output of the last block.
# - Qwen3 uses the same function on every query and key head. These two stages belong to [02](../02_qkv/README.md).
#
# Further reading:
#
# - Zhang and Sennrich, [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467), 2019: section 3 is
#   the formula, the rest is what leaving out the mean costs (nothing) and saves.
# - `LlamaRMSNorm` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py))
#   and `ggml_compute_forward_rms_norm_f32` in ggml
#   ([ops.cpp](https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-cpu/ops.cpp)): the two other ways to
#   write it.
# - [llama.cpp 2373](https://github.com/ggml-org/llama.cpp/issues/2373) and
#   [2374](https://github.com/ggml-org/llama.cpp/pull/2374): $\epsilon$ was fixed at 1e-6, but Llama 2 needs 1e-5.
#   With 1e-5 the perplexity of the 7B model went from 5.90 to 5.83.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# All three stages are compared, in every layer. The size of the input decides which mistakes can be seen: where the
# mean square of a row is $m$, a wrong $\epsilon$ changes the result by about $\Delta\epsilon / 2m$. At $m = 1$ the
# difference between 1e-5 and 1e-6 is 5e-6; for embeddings of standard deviation 0.02 (`micro-llama` and
# `micro-qwen3`), it is 1e-2.
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
# pytest -k "checkpoint_01 and not checkpoint_01b"
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 07 block: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.model.forward.block -->
#
# <!-- source: llorch.model.forward.attention -->
#
# The `block` of the exercise does both in one function, without `config` and `keep`. It gets `head_dim` and `eps`,
# takes the caches as arrays, and returns them.
#
# ## Where the engines differ
#
# They differ in rounding only. Isolated, all engines add the same two float32 numbers and get the same result. But
# `block_out` carries the rounding of everything before it, so it shows how errors grow with depth. Here is `story`
# from layer to layer, each engine against float64:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "story")
runs = {name: golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers")}
reference = golden.reference.engine_output.traces["near"]
for layer in range(5):
    exact = reference[f"l{layer}.block_out"]
    errors = [np.linalg.norm(run[f"l{layer}.block_out"] - exact) / np.linalg.norm(exact) for run in runs.values()]
    between = np.abs(runs["llamacpp"][f"l{layer}.block_out"] - runs["transformers"][f"l{layer}.block_out"]).max()
    print(f"layer {layer}: llama.cpp {errors[0]:.1e}, transformers {errors[1]:.1e}, between them {between:.1e} at most")

# %% [markdown]
# The relative error hardly grows over five layers: each addition brings new rounding and dilutes the one before. The
# last column grows because the rows do.
#
# Do not take `block_out` of the last layer from the last entry of transformers' `hidden_states`: that entry comes
# after the final norm. The stage is the output of the decoder layer itself.
#
# Further reading:
#
# - He and others, [Deep Residual Learning](https://arxiv.org/abs/1512.03385), 2015: adding, and what depth is worth
#   without it.
# - Xiong and others, [On Layer Normalization in the Transformer Architecture](https://arxiv.org/abs/2002.04745), 2020:
#   norm in the branch against norm in the stream.
# - Elhage and others,
#   [A Mathematical Framework for Transformer Circuits](https://transformer-circuits.pub/2021/framework/index.html),
#   2021: the stream as a shared memory that blocks read and write.
# - `LlamaDecoderLayer` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py))
#   and the graph of Llama in llama.cpp
#   ([llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/models/llama.cpp)): the same twelve lines, twice.
# - [torchtune 2809](https://github.com/meta-pytorch/torchtune/issues/2809): heads of Qwen3 rotated first and normalised
#   then. Right parts in the wrong order.
# - [hipfire 258](https://github.com/warpfront/hipfire/issues/258): weeks lost to a comparison with the wrong side of
#   the last norm.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# `block_out` of every layer is compared. Isolated, it is the last addition only. Chained, it carries the rounding of
# everything before it, so this line shows how errors grow through the blocks.
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
# pytest -k checkpoint_07                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 05 attention_output: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.attention.attention_context -->
#
# <!-- source: llorch.model.forward.attention_output -->
#
# As in 04, one product handles all heads of a group. `np.repeat(v, heads // kv_heads, axis=0)` and a plain
# `probs @ v` give the same numbers. `keep` names the stage so that it can be compared.
#
# ## Where the engines differ
#
# This is layer 0 of `micro-llama`, computed from each engine's shares and values:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
reference = golden.reference.engine_output.traces["near"]
for stage in ("attn_context", "attn_out", "attn_residual"):
    a, b, exact = (run[f"l0.{stage}"] for run in (llamacpp, transformers, reference))
    errors = [np.linalg.norm(actual - exact) / np.linalg.norm(exact) for actual in (a, b)]
    print(f"{stage:13}  {np.sum(a != b):4} of {a.size} numbers differ, by {np.abs(a - b).max():.1e} at most")
    print(f"{'':13}  from float64: llama.cpp {errors[0]:.1e}, transformers {errors[1]:.1e}")
for name, run in (("llama.cpp", llamacpp), ("transformers", transformers)):
    same = np.array_equal(run["embed"] + run["l0.attn_out"], run["l0.attn_residual"])
    print(f"the sum of {name} made again by llorch, bit by bit: {same}")

# %% [markdown]
# Each engine sums a product over 192 numbers in another order, so nearly every number differs in its last bits. The
# addition at the end adds only two numbers, so the order does not matter: from the same two float32 numbers, every
# engine gets the same result.
#
# - The output projection is the node `attn_out-{i}` in llama.cpp's Llama graph and has no name in its Qwen graphs. It
#   is found as the MUL_MAT with the source `blk.{i}.attn_output.weight`.
# - In the last layer, from the first addition on, llama.cpp keeps only the rows of tokens whose logits are requested.
#   llorch's goldens were made with the logits of all tokens. [09](../09_selected_logits/README.md) asks for the last
#   one.
# - transformers has no module for the addition. The sum is read as the input of `post_attention_layernorm`, and the
#   joined heads as the input of `o_proj`.
#
# Further reading:
#
# - Vaswani and others, [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: section 3.2.2, heads and
#   their concatenation.
# - Elhage and others, [A Mathematical Framework for Transformer Circuits](https://transformer-circuits.pub/2021/framework/index.html),
#   2021: heads as independent additions to the stream, the view behind the picture of the lesson.
# - `LlamaAttention` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py)),
#   its last lines: `transpose`, `reshape`, `o_proj`; in llama.cpp `build_attn_mha`
#   ([llama-graph.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp)).
# - [nntile 347](https://github.com/nntile/nntile/issues/347): tests with one head and one key head could not see a
#   wrong order of heads.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# All stages of the table above are compared, in every layer that has them. Isolated, `attn_residual` is one addition
# of float32 numbers. All engines get the same result, and its distance from the float64 reference is one rounding.
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
# pytest -k checkpoint_05                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 02 qkv: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.linear.linear -->
#
# <!-- source: llorch.model.forward.qkv -->
#
# `keep` records a stage under its name for the comparison and changes nothing. The `qkv` of the exercise gets arrays
# instead of the layer's dictionary, and `None` for what a family does not have.
#
# ## Where the engines differ
#
# They differ in the order in which they add. A number of `v_proj` is a sum of 96 products. Here is one, added up in
# float32 in three orders. After it stands the error of each engine over the whole tensor, computed from the engine's
# `attn_norm`:

# %%
import numpy as np

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
h = golden.reference.engine_output.traces["near"]["l0.attn_norm"].astype(np.float32)
w = llorch.load("micro-llama").weights.layer(0)
products = h[3] * w["v_proj"][0]
ways = {"one by one": products, "backwards": products[::-1], "in 8 lanes": products.reshape(12, 8).cumsum(0)[-1]}
exact = products.astype(np.float64).sum()
for name, order in ways.items():
    total = np.float32(0)
    for product in order:
        total += product
    print(f"{name:11} {total:.9f}   off by {abs(total - exact):.0e}")
for name, cases in golden.reference.isolated.items():
    print(f"{name:12} l0.v_proj off by {cases['near']['l0.v_proj'].error:.1e}")

# %% [markdown]
# All of it is rounding, and no engine is right. Processors add in lanes, 4 to 16 numbers at a time, so the same
# engine gives other last digits on another machine. Wider matrices differ by more, and the tolerance grows with them.
#
# - GGUF files of the Llama family hold the rows of q_proj and k_proj in another order than Hugging Face (see
#   [01b](../01b_rope/README.md)). llorch's loader restores the order of the weights. The q and k stages of llama.cpp
#   are put back into the order of Hugging Face when they are captured. v is never reordered.
# - With a bias, llama.cpp makes two nodes of one name, a MUL_MAT and an ADD. The stage is the ADD. In transformers
#   the bias is part of the `Linear`, so the module's output has it.
# - transformers' Llama and Qwen3 classes have biases on q, k, v and o, or on none of them (`attention_bias`). Qwen2
#   has them on q, k and v.
# - The gain of the head norm is `head_dim` wide and the same for all heads.
# - Apart from this, the engines differ in the order in which they add up float32 products.
#
# Further reading:
#
# - Ainslie and others, [GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
#   Checkpoints](https://arxiv.org/abs/2305.13245), 2023: figure 2 draws three ways to share.
# - Vaswani and others, [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017, section 3.2: where
#   queries, keys and values got their names.
# - `Qwen3Attention` in transformers
#   ([modeling_qwen3.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen3/modeling_qwen3.py)):
#   the head norm, "only on the head dim", as a comment there says.
# - [TinyLlama 24](https://github.com/jzhang38/TinyLlama/issues/24): gibberish, because the rows of k were reordered
#   with the number of query heads.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# q, k and v are compared one by one in every layer, after the bias if there is one. The two head norms are compared
# if the family has them. In `micro-qwen2` q_proj is square, because llama.cpp requires it for the qwen2 architecture.
# In all other built-in models a transposed projection does not even fit.
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
# pytest -k checkpoint_02                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

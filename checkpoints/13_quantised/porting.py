# %% [markdown]
# # 13 quantised: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.files.blocks.uniform.decode_q8_0 -->
#
# <!-- source: llorch.files.blocks.uniform.decode_q4_0 -->
#
# For speed, the reference writes into memory that is used again. Its functions are in
# [`chunk.py`](../../llorch/files/blocks/chunk.py).
#
# ## Where the engines differ
#
# - transformers has no such arithmetic: it decodes these files and goes on in float32. llama.cpp is the only
#   reference engine.
# - ggml has three ways to compute the codes of Q8_0 and Q8_1, and the processor decides which is used. On x86 it is
#   127 over the maximum, with halves rounded to even. On ARM it is the reciprocal of the scale, with halves rounded
#   to even. In plain C it is the reciprocal, with halves rounded away from zero. They differ on edges only. The
#   goldens hold x86 and plain C. All three round the inputs of the stored products in the same way.
# - Repacked weights and the tiled path for many tokens add in another order. The goldens are made without them.
# - With a float16 cache, llama.cpp rounds queries and probabilities to float16 as well. The goldens have a float32
#   cache.
#
# Further reading:
#
# - [ggml-common.h](https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h): the layouts of all
#   types. [ggml-quants.c](https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c):
#   `dequantize_row_q4_0`.
# - Dettmers and Zettlemoyer, [The case for 4-bit precision](https://arxiv.org/abs/2212.09720), 2022: how much a bit
#   is worth.
#
# ## Two halves of a product
#
# llama.cpp multiplies such blocks with *integers*, so it rounds the activations too. This page covers both: the
# values of a block, and the result of its product.
#
# ## Formula
#
# ```math
# \begin{aligned}
# w_i &= d\,(c_i - z) && \text{one scale: Q4\_0, Q5\_0, Q8\_0 ...} \\
# w_i &= d\,c_i + m && \text{a scale and a minimum: Q4\_1, Q5\_1} \\
# w_i &= d\,s_b\,c_i - d_\mathrm{min}\,m_b && \text{scales of sub-blocks, themselves integers: Q2\_K, Q4\_K, Q5\_K} \\
# w_i &= d\,t[c_i] && \text{codes that are places in a table: IQ and FP4 types} \\
# y &= \mathrm{decode}(W)\;\mathrm{round}(x)
# \end{aligned}
# ```
#
# The function $\mathrm{round}$ depends on the type of the matrix:
#
# - **F16, BF16**: to F16, BF16, to nearest, ties to even.
# - **Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4, NVFP4, Q1_0, Q2_0**: to Q8_0, blocks of 32. The scale is the maximum over 127,
#   stored as float16.
# - **Q4_1, Q5_1**: to Q8_1, like Q8_0. Minima are multiplied by the sum of the block, which is stored as another
#   float16.
# - **Q2_K to Q6_K, all IQ types but IQ4_NL, TQ1_0, TQ2_0**: to Q8_K, blocks of 256. The scale is a float32 from the
#   largest value with its sign.
#
# ## Stages
#
# - `decode`: [`decode`](../../llorch/files/quant.py), [blocks](../../llorch/files/blocks). In ggml, `to_float` of the
#   type.
# - `rounding`: [`round_activations`, `quantize_blocks`, `block_sums`](../../llorch/ops/rounding.py). In ggml,
#   `from_float` of the type, and the plain C version.
# - products: [`Matrix.forward`](../../llorch/files/matrix.py). In ggml, the MUL_MAT nodes: q, k, v, attention output,
#   gate, up, down, logits.
#
# ## A run that differs by a hundredth and can be reproduced to a millionth
#
# Rounding activations to 8 bits moves the logits by 1e-2 or more. A comparison with exact arithmetic would need a
# tolerance of this size, and small mistakes would hide in it. But the rounding is not noise. It is a function of the
# activations. If llorch rounds in the same way, to the bit, only the order of a float32 sum remains: 1e-7 to 1e-6. So
# this validation point compares with the rounded arithmetic of llama.cpp, not with exact arithmetic:
#
# ```python
# from llorch.ops.numerics import GGML
# from llorch.files import open_weights
#
# weights = open_weights("model-Q4_K_M.gguf").using(GGML)  # and packed=True to keep the blocks as they are
# ```
#
# Rounding has edges. If a value lies half-way between two codes, a difference in its seventh digit decides, and the
# sum changes by a whole code. This is called a *flip*. Two builds of llama.cpp flip against each other as well.
# Isolated there is no flip, since the inputs come from llama.cpp. Chained, llorch's input of a product is *first*
# compared with llama.cpp's. Blocks with a flipped value are then replaced by llama.cpp's and counted. This happens
# only if all of llorch's values were within the tolerance before the rounding. A wrong value is no flip: it stays,
# and fails its row.
#
# ## Compared values
#
# Every type that llama.cpp can multiply with has a micro model of two layers,
# [made](../../llorch/judging/expectations/quantised_models.py) when it is needed. Its blocks are random bits, so that
# every code and every inner scale occurs. No quantiser would produce them all. `Q4_K_M` is mixed as in llama-quantize:
# Q4_K, with Q6_K for the output and for half of the value and down matrices. Each model is judged twice, with decoded
# matrices and with packed ones.
#
# <!-- generated: equal -->
# <!-- end -->
#
# Blocks are random or edge cases: zeros, the smallest and largest scales, minus zero, infinity. Activations are
# ordinary ones, exact halves, ties for the largest, zeros, denormals, outliers, and scales out of the range of
# float16.
#
# <!-- generated: types -->
# <!-- end -->
#
# - **isolated**: the largest difference of a stage from llama.cpp's. In this pass, llama.cpp's stage replaces
#   llorch's as soon as llorch has computed it. Stages that only copy (embedding, caches) must give the same bits.
# - **chained**: the same on llorch's results, and in passes that continue a cache.
# - **tolerance**: there is only one engine, so it does not come from the distance of two engines, as on other pages.
#   It never comes from llorch's numbers. It is [derived](../../llorch/judging/tolerances/forward.py) from llama.cpp's
#   numbers: every float32 sum may be off by the cost of another order, and passes this error on to the next stage,
#   element by element.
# - **flips**: the number of input values that round to another code than llama.cpp's.
# - **free**: the error of the logits as users get them, with no flip replaced. Next to it stands the possible effect
#   of flips: a value that is off by e flips with a chance of e divided by the step, and is then off by a step.
# - **exact arithmetic**: the error of the logits without the rounding of activations.
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# Each is injected into the decoded blocks, the rounded rows, or a product, for every type that can have it.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_13                   # the comparison, and every mistake of this page, injected
# llorch verify model-Q4_K_M.gguf --prompt "Once upon a time, a small fox found a stone"
# ```

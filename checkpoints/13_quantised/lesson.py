# %% [markdown]
# # 13 quantised
#
# 45 minutes, two functions of three lines. Sixteen bytes, thirty-two numbers.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# This lesson is about the matrices, which all earlier lessons use. Most model files hold no floats. A row of a matrix
# is a series of blocks of 32 or 256 weights. A block holds small integers packed into bits, and a scale that turns
# them into numbers.
#
# ## Idea
#
# Neighbouring weights have about the same size. So store this size once, as a float16, and each weight as a small
# whole number. For 32 weights, Q8_0 takes 34 bytes (8.5 bits each), Q4_0 takes 18 (4.5 bits each), and float32 takes
# 128 bytes. Generating text reads all weights for every token. Where reading takes most of the time, as in llama.cpp,
# a file of a quarter of the size is up to four times as fast. Decoding takes time, too: llorch in NumPy generates
# half as many tokens per second as llama.cpp from the same Q8_0 file
# ([figures](../../benchmarks/README.md#decode-and-prefill)).

# %%
import inspect

import numpy as np

from llorch.judging.goldens.quantised import FOLDER, read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / FOLDER)
blocks, values = golden.blocks["Q4_0.blocks"], golden.blocks["Q4_0.values"]
print(blocks.shape, blocks.dtype, "->", values.shape, values.dtype)
print("bytes  ", *blocks[0, :6], "...")
print("numbers", *values[0, :4], "...")

# %% [markdown]
# ggml's C function decoded the blocks in `values`, not llorch.
#
# ## The maths
#
# ```math
# w_i = d\,(c_i - z)
# ```
#
# | symbol | in Q8_0 | in Q4_0 | meaning |
# | --- | --- | --- | --- |
# | $d$ | bytes 0, 1 | bytes 0, 1 | scale, float16, lowest byte first |
# | $c_i$ | byte $2 + i$, -128 to 127 | half a byte, 0 to 15 | code |
# | $z$ | 0 | 8 | the code that stands for zero |
#
# The product is exact: 11 bits times 8 bits fit into the 24 of a float32. So nothing is rounded, and every bit must
# equal ggml's.
#
# ## The picture
#
# ![The 18 bytes of a Q4_0 block and the elements in their halves](fig/block.svg)
#
# Two elements share a byte, and they are not neighbours: 0 with 16, and 1 with 17. A processor that takes 16 bytes at
# a time gets 16 neighbours with one AND, and the other 16 with one shift.
#
# ![How far weights move when they are rounded to each type](fig/error.svg)
#
# Each bit that is removed doubles the error. One large weight in a block makes the scale large, which makes the other
# 31 less exact.
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
# ## Run it

# %%
d = blocks[:, :2].copy().view("<f2").astype(np.float32)
low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
codes = np.concatenate([low, high], axis=1)
print("scale  ", d[0, 0])
print("codes  ", *codes[0, :8], "...")
finite = np.isfinite(values).all(axis=1)  # without those whose scale is infinite
decoded = (codes[finite].astype(np.float32) - 8) * d[finite]
print("equal  ", np.array_equal(decoded, values[finite]), "in", finite.sum(), "blocks")

# %% [markdown]
# ## The mistake
#
# The mistake is the most natural reading of a packed byte: its two halves are two neighbours.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["13"])["q4_0"]
print(inspect.getsource(inspect.getclosurevars(wrong["block-nibbles-alternate"]).globals["neighbours"]))
print(check_functions("13", q4_0=wrong["block-nibbles-alternate"]))

# %% [markdown]
# The mean, the spread and the largest element of the matrix are right. The model writes nonsense, and no statistic of
# a tensor shows the reason. Therefore this lesson compares bits.
#
# ## Exercise
#
# Write `q8_0` and `q4_0` in `l13_quantised.py`:
#
# ```python
# def q8_0(blocks: np.ndarray) -> np.ndarray: ...  # (n, 34) uint8 -> (n, 32) float32
# def q4_0(blocks: np.ndarray) -> np.ndarray: ...  # (n, 18) uint8 -> (n, 32) float32
# ```
#
# ```
# llorch learn check 13
# llorch learn hint 13
# ```
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
# How to read the numbers: [index](../README.md#how-to-read-a-page).
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

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
#
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

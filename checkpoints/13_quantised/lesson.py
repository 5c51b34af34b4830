# %% [markdown]
# # 13 quantised
#
# 45 minutes, two functions of three lines. Optional: this lesson and [00](../00_foundation/README.md) are the block
# "Files and tokens", which follows [12](../12_generation/README.md).
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# Your model runs, and you have taken its matrices as floats. Most model files hold no floats: a row of a matrix is a
# series of blocks of 32 or 256 weights. This lesson turns the bytes of a block into numbers.
#
# ## Idea
#
# Neighbouring weights have about the same size. So store this size once, as a float16, and each weight as a small whole
# number. For 32 weights, Q8_0 takes 34 bytes (8.5 bits each), Q4_0 takes 18 (4.5 bits each), and float32 takes 128.
# Generating text reads all weights for every token. Where reading takes most of the time, as in llama.cpp, a file of a
# quarter of the size is up to four times as fast.
#
# Here are two blocks, written by hand. Both have the scale 0.5, which fills their first two bytes:

# %%
import numpy as np

scale = np.float16(0.5).tobytes()  # lowest byte first
q8_0_block = np.array([[*scale, 1, 255, 2, *[0] * 29]], np.uint8)  # 255 is the byte of -1
q4_0_block = np.array([[*scale, 0x19, *[0x88] * 15]], np.uint8)  # 0x19: halves 1 and 9
print("scale", [*scale], "shapes", q8_0_block.shape, q4_0_block.shape)

# %% [markdown]
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
# By hand: the first block holds the numbers $0.5 \cdot 1$, $0.5 \cdot (-1)$, $0.5 \cdot 2$ and zeros. In the second
# block, the low half 9 is element 0, $0.5 \cdot (9 - 8) = 0.5$. The high half 1 is element 16,
# $0.5 \cdot (1 - 8) = -3.5$.
#
# The product is exact: 11 bits times 8 bits fit into the 24 of a float32. So nothing is rounded, and every bit must
# equal the one that ggml, the library below llama.cpp, computes.
#
# ## The picture
#
# ![The 18 bytes of a Q4_0 block and the elements in their halves](fig/block.svg)
#
# Two elements share a byte, and they are not neighbours: 0 with 16, and 1 with 17. A processor that takes 16 bytes at a
# time gets 16 neighbours with one AND, and the other 16 with one shift.
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
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the number of
# values that differ ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 13.
#
# ## Run it

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

# yours: from l13_quantised import q4_0, q8_0
q8_0, q4_0 = PARTS["q8_0"].reference, PARTS["q4_0"].reference
print("elements 0 to 3 of Q8_0    ", q8_0(q8_0_block)[0, :4])
print("elements 0, 1, 16 of Q4_0  ", q4_0(q4_0_block)[0, [0, 1, 16]])
print(check_functions("13", q8_0=q8_0, q4_0=q4_0))

# %% [markdown]
# The check uses blocks of random bits and edge cases: zeros, the smallest and largest scales, minus zero, infinity.
# ggml's C function decoded them.
#
# ## A mistake to plant
#
# Take the two halves of a byte as two neighbours. This is the most natural reading of a packed byte.

# %%
wrong = typed_mistakes(BY_NUMBER["13"])["q4_0"]["block-nibbles-alternate"]
print(check_functions("13", q4_0=wrong))

# %% [markdown]
# The mean, the spread and the largest element of the matrix are right. The model writes nonsense, and no statistic of a
# tensor shows the reason. Therefore this lesson compares bits.
#
# ## Both engines
#
# - transformers decodes such a file and continues in float32. llama.cpp multiplies the blocks as they are.
# - For that, llama.cpp rounds the *activations* to 8 bits, too. This moves logits by 1e-2 or more. It is a function of
#   the activations, not noise: llorch can round in the same way, and then only 1e-7 to 1e-6 remain.
# - Decoding takes time: llorch in NumPy generates half as many tokens per second as llama.cpp from the same Q8_0 file
#   ([figures](../../benchmarks/README.md#decode-and-prefill)).
#
# This block ends here: `llorch learn museum` lists bugs of real engines, whose cause you find from the numbers.
#
# [For porters](PORTING.md): reference code, the other block types, compared values and all known mistakes of this
# lesson.

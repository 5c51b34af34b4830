# %% [markdown]
# # 15 lora_delta
#
# 25 minutes, two short functions. Training begins here, with the numbers that are trained.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# The forward pass is complete: ids in, logits out, and every matrix in it is frozen. Now `story` will learn to talk
# like a pirate. You could train all of its numbers. LoRA trains a separate set of numbers, 7 % as many, in a separate
# file: each matrix gets a narrow detour, and only the detour learns.
#
# ## Idea
#
# The matrices of `story` are between 128 x 192 and 448 x 192 large. The detour is narrow in the middle: it goes down to
# $r$ numbers per token and up again. Its output is added to the output of the matrix. $r$ is the *rank*; 8 is usual.

# %%
import numpy as np

import llorch

story = llorch.load("story")
layer = story.weights.layer(0)
shapes = [weight.shape for name, weight in layer.items() if name.endswith("_proj")]
frozen, trained = sum(n * m for n, m in shapes), sum(8 * (n + m) for n, m in shapes)
print(f"{len(shapes)} matrices a layer: {frozen:,} frozen numbers,", end=" ")
print(f"{trained:,} trained, {100 * trained / frozen:.1f} %")

# %% [markdown]
# In a model of 7 billion numbers, an adapter of the same rank has 0.3 % as many. This lets fine-tuning fit on one GPU.
# Each trained number needs the memory of four numbers (itself, its gradient, two moments of Adam). A frozen number
# needs the memory of one, and may even be quantised.
#
# Why is so narrow a detour enough? A task seems to change a matrix by a low rank: the authors found that 1 to 8 was
# enough, out of a possible 12,288. This is an observation, not a theorem.
#
# ## The maths
#
# ```math
# \begin{aligned}
# y &= W x + s\,B\,A\,x, \qquad A \in \mathbb{R}^{r \times \mathrm{in}},\; B \in \mathbb{R}^{\mathrm{out} \times r} \\
# s &= \frac{\alpha}{r} \quad\text{or, rank-stabilised,}\quad \frac{\alpha}{\sqrt{r}}
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $x$ | (seq, in) | input of the matrix |
# | $W$ | (out, in) | frozen |
# | $A$ | (r, in) | the way down: random when training starts |
# | $B$ | (out, r) | the way up: zero when training starts, so that the model begins as it was |
# | $s$ | a number | the scale; $\alpha$ is chosen once, so that $r$ can be changed without a new learning rate |
#
# An adapter may give some matrices another rank or another $\alpha$ (`rank_pattern`, `alpha_pattern`). Then $s$ differs
# from matrix to matrix, and a loader that ignores these settings is wrong in only some matrices.
#
# By hand: $x = (1, 2)$, $A$ has the one row $(3, 0)$, $B$ the one column $(1, -1)$, and $s = 2$. Down gives 3, up gives
# $(3, -3)$, and the detour adds $(6, -6)$.
#
# ## The picture
#
# ![Singular values of a matrix and of its adapter](fig/rank.svg)
#
# Singular values say how strongly a matrix acts along each of its directions. $W$ (grey, the `q_proj` of layer 0 in
# `micro-llama`) acts along all 96. The adapter acts along only 2 of them. Training can only turn and stretch these two.
#
# ## Exercise
#
# Write both functions in `l15_lora_delta.py`:
#
# ```python
# def lora_scaling(r, lora_alpha, own_r, own_alpha, use_rslora) -> float: ...
# def lora_delta(x, lora_A, lora_B, scaling) -> np.ndarray: ...
# ```
#
# ```
# llorch learn check 15
# llorch learn check 15 --chain      # with all that you have written so far, logits too
# llorch learn hint 15
# ```
#
# The quick check gives every matrix PEFT's input, with $\alpha / r$ and rank-stabilised.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the matrix and the
# first wrong number ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 15.
#
# ## Run it

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

# yours: from l15_lora_delta import lora_delta, lora_scaling
lora_scaling, lora_delta = PARTS["lora_scaling"].reference, PARTS["lora_delta"].reference
print("16 / 8               ", lora_scaling(8, 16, None, None, False))
print("own alpha: 4 / 8     ", lora_scaling(8, 16, None, 4, False))
print("own r: 16 / root of 4", lora_scaling(8, 16, 4, None, True))
A, B = np.array([[3.0, 0.0]]), np.array([[1.0], [-1.0]])
print(lora_delta(np.array([[1.0, 2.0]]), A, B, 2.0))
print(check_functions("15", lora_scaling=lora_scaling, lora_delta=lora_delta))

# %% [markdown]
# The detour never makes $BA$. For 17 tokens and a matrix of 192 x 96 the two narrow products of rank 2 cost 17 * 2 *
# (96 + 192) = 9,792 multiplications. $BA$ alone costs 36,864, before the first token, and is as large as $W$.
#
# ## A mistake to plant
#
# $A$ has shape (r, in) in PEFT and (in, r) in MLX. A port met the shape error and used `reshape`, which fits and gives
# another matrix. Plant that:

# %%
wrong = typed_mistakes(BY_NUMBER["15"])["lora_delta"]["lora-a-transposed"]
print(check_functions("15", lora_delta=wrong))

# %% [markdown]
# It runs, it trains, and its loss goes down, because training adapts to the wrong order of numbers. It fails when
# another program loads the adapter. A test with a new adapter does not find it: $B$ is 0 there, and so is the product,
# right or wrong. In this check, neither factor is zero.
#
# ## Both engines
#
# PEFT on torch is the reference engine of training.
#
# - PEFT multiplies by the scale after $B$, llorch in NumPy after both products, llorch on torch between them. All three
#   orders are right.
# - On a bfloat16 base, adapters stay float32 in PEFT and in llorch. The sum is rounded to the dtype of the base.
# - vLLM's loader ignores `alpha_pattern`, and serves such an adapter with the wrong strength, without a warning.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

# %% [markdown]
# # 20 merge_export
#
# 30 minutes, three functions. This is the last lesson: your adapter becomes a file for other programs.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# An adapter has been trained ([19](../19_training_curve/README.md)). It is useful only if other programs can load it.
# You can keep it separate, a small file next to the base. Or you can merge it: the result is a model like any other,
# and its user need not know of LoRA.
#
# ## Idea
#
# $W x + s B A x$ is $(W + s B A)\,x$. So after one addition, the detour is gone:

# %%
import numpy as np

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.ops.linear import linear
from llorch.ops.lora import lora_delta

# yours: from l20_merge_export import gguf_alpha, interleave, merged
parts = {part.name: part.reference for part in BY_NUMBER["20"].parts}
merged, interleave, gguf_alpha = parts.values()
rng = np.random.default_rng(0)
x, weight = rng.standard_normal((5, 96)), rng.standard_normal((64, 96))
lora_A, lora_B = rng.standard_normal((2, 96)), rng.standard_normal((64, 2))
separate = linear(x, weight) + lora_delta(x, lora_A, lora_B, scaling=0.5)
in_one_matrix = linear(x, merged(weight, lora_A, lora_B, 0.5))
effect = separate - linear(x, weight)
print(f"the adapter moves outputs by up to {np.abs(effect).max():.0f}")
print(f"merged against separate: ~{np.abs(in_one_matrix - separate).max():.0e} apart")

# %% [markdown]
# ## The maths
#
# ```math
# W' = \mathrm{round}(W + s\,B\,A), \qquad \text{LoRA GGUF: } B' = s\,P B
# ```
#
# | symbol | meaning |
# | --- | --- |
# | $W'$ | the merged matrix, in the dtype of the file; this rounding is the price |
# | $P$ | the order of rows of q and k in files of the llama family; elsewhere nothing moves |
# | $s$ | is multiplied into $B$ where one $\alpha$ for all matrices cannot say it |
#
# Why is there a $P$? RoPE turns pairs of numbers ([01b](../01b_rope/README.md)). Hugging Face pairs $j$ with
# $j + \text{half}$, llama.cpp pairs neighbours. Both give the same result if the rows of q and k have the fitting
# order. So converters reorder the rows of these matrices for Llama, and the adapter must be reordered like its matrix.
# The rows of $B$ are the outputs, so they change, and $A$ stays. A head of 4 has the rows 0 1 2 3 in halves (0 1 | 2
# 3), and 0 2 1 3 in pairs.
#
# The scale needs care, too. llama.cpp computes $s = \alpha / r$ with one $\alpha$ from the file and the $r$ of each
# matrix. An adapter with `alpha_pattern`, or a rank-stabilised one with several ranks, does not fit this form. Then
# llorch writes no alpha, which means $s = 1$, and first multiplies each $B$ by its scale.
#
# ## The picture
#
# ![Error of logits after rounding, of the base and of the merged model, by dtype](fig/dtypes.svg)
#
# The picture shows the loss from rounding weights, for the base alone (blue) and for the base with the merged adapter
# (orange). In float32 there is no loss. In bfloat16 the logits of both are off by about a third of a percent, so
# merging is hardly worse than the dtype. But a *separate* adapter on a bfloat16 base would have stayed float32. The
# dashed line is the effect of the adapter.
#
# ## Exercise
#
# Write three functions in `l20_merge_export.py`:
#
# ```python
# def merged(weight, lora_A, lora_B, scaling) -> np.ndarray: ...
# def interleave(rows, n_heads) -> np.ndarray: ...
# def gguf_alpha(lora_alpha, scalings, ranks) -> float: ...
# ```
#
# ```
# llorch learn check 20
# llorch learn hint 20
# llorch learn check 20 --chain      # all four files, written and read again
# ```
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first wrong
# number or the tensors with other bytes ([below](#a-mistake-to-plant)). Green is one line with `PASS`
# ([below](#run-it)), and `llorch learn list` shows `PASS` next to 20.
#
# ## Run it
#
# The head of 4 from above, then the alpha of two matrices with scale 2: with ranks 4 and 4, one alpha fits. With ranks
# 4 and 8, none does.

# %%
print(interleave(np.arange(4)[:, None], n_heads=1).ravel())
for ranks in ([4, 4], [4, 8]):
    print(ranks, gguf_alpha(8, np.array([2.0, 2.0]), np.array(ranks)))
print(check_functions("20", **parts))

# %% [markdown]
# ## A mistake to plant
#
# Return the rows of $B$ in their old order. A conversion that only loops over names does so. Shapes fit, the file
# loads, and llama.cpp prints no warning.

# %%
wrong = typed_mistakes(BY_NUMBER["20"])["interleave"]["export-b-rows-not-permuted"]
print(check_functions("20", interleave=wrong))

# %% [markdown]
# Half of the adapter's effect goes wrong, and the text is still fluent. The check compares bytes with the file from
# which llama.cpp made the right logits.
#
# Merging has a mistake that no formula shows: a script that runs again on its result merges twice.
#
# ## Both engines
#
# - PEFT rounds the product before it adds it. llorch rounds once. Some elements differ in their last bit.
# - llama.cpp applies an adapter in its graph, `scale * (B (A x))`, and never merges.
# - llama.cpp's converter writes only the adapter's alpha. With rank-stabilised LoRA or alpha patterns, its files give
#   another scale, without an error.
# - A tied base has no output matrix in GGUF, so a LoRA file cannot hold an adapter of it. Merge instead.
#
# Nothing is left to write. From a text to a token, from a token to a loss, and from the loss to a file that llama.cpp
# loads: you have computed every number, and two engines have checked it. `llorch learn certificate` records it, and
# `llorch learn museum` lists bugs of real engines, whose cause you find from the numbers.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

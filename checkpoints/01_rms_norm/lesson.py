# %% [markdown]
# # 01 rms_norm
#
# 20 minutes, one function of two lines.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# A text has become token ids, and every id has picked a row of numbers from a table
# ([00](../00_foundation/README.md)). So the model holds an array `x` of shape (seq, hidden): one row for each token,
# 96 numbers wide in `micro-llama`, 192 in `story`. From here on, every layer reads these rows and *adds* something to
# them. The rows that are added to are called the residual stream.
#
# Nothing in a layer reads the stream as it is. It is brought to a common size first, by RMSNorm: before attention
# (`attn_norm`), before the feed-forward part (`ffn_norm`), and once after the last layer (`final_norm`). `story` has
# 5 layers, so the function that you write here runs 11 times for every token.
#
# ## Idea
#
# A sum grows. Here is how large a typical element of a row is on its way through `story`, for the first and the last
# word of a sentence. Typical means root mean square: square all elements, take the mean, take the root.

# %%
import inspect

import numpy as np

import llorch


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x**2, axis=-1))


story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
trace: dict[str, np.ndarray] = {}
story.forward(ids, trace=trace)
for stage in ("embed", "l0.block_out", "l2.block_out", "l4.block_out"):
    size = rms(trace[stage])
    print(f"{stage:13} Once {size[1]:6.2f}    fox {size[-1]:6.2f}")

# %% [markdown]
# In five layers the rows grow from 0.15 to 45 and from 0.13 to 109, and the two words do not grow at the same pace. A
# matrix that was trained for numbers around 1 cannot do much with either end. So every row is divided by its root
# mean square. The direction stays, and the length becomes the same everywhere. Then each element is multiplied by a
# learned number, the *gain*. The gain lets the model say that element 17 counts for more than element 18.
#
# RMSNorm does no more than this. No token looks at another one here, and nothing is subtracted.
#
# ## The maths
#
# For one row $x$ of $n$ numbers, with gain $w$:
#
# ```math
# y = \frac{x}{\sqrt{\frac{1}{n} \sum_{i=1}^{n} x_i^2 + \epsilon}} \odot w
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $x$ | (seq, hidden) | the stream, one row a token |
# | $w$ | (hidden,) | the gain, one for all rows, as stored in the file |
# | $\epsilon$ | a number | 1e-5 (Llama) or 1e-6 (Qwen); keeps a row of zeros from being divided by 0 |
# | $y$ | (seq, hidden) | input of the layer |
#
# By hand: $x = (3, 4)$ has the mean square 12.5 and the root 3.536. Divided by it, $x$ is $(0.849, 1.131)$; with the
# gain $(2, 10)$, it becomes $(1.697, 11.314)$.
#
# The older LayerNorm subtracts the mean of the row first. The authors of RMSNorm left that out, measured the same
# quality, and saved time. Llama and Qwen both took it over.
#
# ## The picture
#
# ![Root mean square of ten tokens before and after each of the 11 norms of story](fig/rows.svg)
#
# Every line is a token of the sentence above, on a logarithmic scale: grey before, blue after the division. Whatever
# the input, the output has size 1. The first layer alone makes rows 50 to 190 times larger.
#
# ## Exercise
#
# Write `rms_norm` in `l01_rms_norm.py` (`llorch learn init DIR` puts it there):
#
# ```python
# def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
# ```
#
# ```
# llorch learn check 01
# llorch learn hint 01          # a direction; once more for the formula, once more for the code
# ```
#
# To see the check work, break it: forget the gain, take `np.mean(x * x)` over the whole array, add 1 to the weight
# (Gemma's files need that, these do not). The check names each of them. You are done when the check passes, which
# prints one line:

# %%
from llorch.apps.learn.lessons import PARTS

print(check_functions("01", rms_norm=PARTS["rms_norm"].reference))

# %% [markdown]
# "Worst" is the comparison that came nearest to its tolerance, next to the engine's error there.
#
# ## Run it
#
# Here is the example from above, and a row a thousand times as large:

# %%
from llorch.ops.rms_norm import rms_norm

x, gain = np.array([[3.0, 4.0]], np.float32), np.array([2.0, 10.0], np.float32)
print(rms_norm(x, gain, eps=1e-5))
print(rms_norm(1000 * x, gain, eps=1e-5))

# %% [markdown]
# The length is gone, the direction stays. Next, the first norm of `micro-llama` on real rows, those of its
# embeddings:

# %%
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

micro = llorch.load("micro-llama")
golden = read(goldens_folder() / "micro-llama")
rows = golden.engine_outputs["llamacpp"].traces["near"]["embed"]
weight = micro.weights["layers.0.attn_norm"]
y = rms_norm(rows, weight, eps=micro.config.rms_norm_eps)
print("rows     ", rows.shape, "rms", rms(rows)[:4].round(4))
print("divided  ", y.shape, "rms", rms(y / weight)[:4].round(4))
print("with gain", y.shape, "rms", rms(y)[:4].round(4))

# %% [markdown]
# The second line is not quite 1. These rows are small: their mean square is around 4e-4, so an $\epsilon$ of 1e-5
# changes the result by 1 %. Keep that in mind for what comes next.
#
# ## The mistake
#
# The mistake that survives longest adds $\epsilon$ after the root. It reads well, and on the rows of a large model it
# is invisible.

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["01"])["rms_norm"]["norm-eps-outside-root"]
print(inspect.getsource(wrong))
for name, size in (("layer 4 of story", 100.0), ("unit rows", 1.0), ("embeddings", 0.02)):
    scaled = (rows / rms(rows)[:, None] * size).astype(np.float32)
    right = rms_norm(scaled, weight, eps=1e-5)
    error = np.linalg.norm(wrong(scaled, weight, 1e-5) - right) / np.linalg.norm(right)
    print(f"{name:16}  rms {size:6}   off by ~{error:.0e}")

# %% [markdown]
# Rows of 100 hide it below rounding. Rows of size 1, which most tests use, give 5e-6: less than the usual tolerances
# of 1e-5 or 1e-4, which are chosen by feeling. The embeddings of `micro-llama` were made small on purpose, and there
# the same line is off by a hundredth. The check of this lesson runs your function inside the forward pass of four
# such models, in place of llorch's function. It compares the result with llama.cpp and transformers:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("01", rms_norm=wrong))

# %% [markdown]
# How to read it: the verdict is FAIL. The others are PASS, BORROWED (not written yet, so llorch's function is used)
# and NOT RUN. The pattern says that whole rows are off by a factor, and each row by another one: a divisor is wrong.
# The diagnosis names a known mistake. This mistake, injected into llorch's code, makes *the same wrong numbers*, so
# it is the cause and no guess. Then comes the place of the first wrong number: the `attn_norm` of layer 0, the only
# norm whose input is the bare embeddings. The later ones read rows of 1 and more, and hide most of the mistake.
#
# ![Error of the result against the size of the row, for two mistakes with eps](fig/eps.svg)
#
# The plot shows the effect of $\epsilon$: the smaller a row, the larger the effect. Below the dashed line, rounding
# hides it. The ticks at the bottom are the rows that the norms of three models read: the leftmost, the embeddings of
# `micro-llama`, are why this mistake cannot hide here.

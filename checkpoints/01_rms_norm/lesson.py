# %% [markdown]
# # 01 rms_norm
#
# 20 minutes, one function of two lines.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# A text is a list of token ids, and each id has picked its row of numbers from a table in the model's file, the
# *embedding*. So the model holds an array `x` of shape (seq, hidden), one row for each token: 192 numbers in `story`, a
# small model that writes stories and comes with llorch. Each layer reads these rows through the norm that you write
# here, and *adds* something to them; the rows are called the residual stream.
#
# ## Idea
#
# A sum grows. This is the length of a row on its way through the five layers of `story`, for two words:

# %%
import numpy as np

import llorch

story = llorch.load("story")
trace: dict[str, np.ndarray] = {}
story.forward(story.tokenizer.encode("Once upon a time there was a little fox"), trace=trace)
for stage in ("embed", "l0.block_out", "l2.block_out", "l4.block_out"):
    once, fox = np.linalg.norm(trace[stage][1]), np.linalg.norm(trace[stage][-1])
    print(f"{stage:13} Once {once:6.1f}    fox {fox:6.1f}")

# %% [markdown]
# Both words start near 2. One ends at 600, the other at 1,500. A matrix that was trained for numbers around 1 cannot do
# much with either. So every row is divided by the size of its typical element, the *root mean square*: square all
# elements, take the mean, take the root. The direction stays, and the length becomes the same everywhere. Then each
# element is multiplied by a learned number, the *gain*. The gain lets the model say that element 17 counts for more
# than element 18.
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
# | $x$, $y$ | (seq, hidden) | the stream, one row a token; the input of the layer |
# | $w$ | (hidden,) | the gain, one for all rows |
# | $\epsilon$ | a number | 1e-5 (Llama) or 1e-6 (Qwen); keeps a row of zeros from being divided by 0 |
#
# By hand: $x = (3, 4)$ has the mean square 12.5 and the root 3.536. Divided by it, $x$ is $(0.849, 1.131)$. With the
# gain $(2, 10)$, it becomes $(1.697, 11.314)$.
#
# ## The picture
#
# ![Root mean square of ten tokens before and after each of the 11 norms of story](fig/rows.svg)
#
# Every line is a token of the sentence above, on a logarithmic scale: grey before, blue after the division. Whatever
# the input, the output has size 1. `story` has two norms in each layer and one after the last, so your function runs 11
# times in a pass.
#
# ## Exercise
#
# Write `rms_norm` in `l01_rms_norm.py` (`llorch learn init my_llama` makes the folder):
#
# ```python
# def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
# ```
#
# ```
# llorch learn check 01
# llorch learn hint 01          # a direction; again for the formula, again for the code
# ```
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: rms_norm`, a wrong
# function `FAIL`, the right one `PASS` after 384 comparisons in 4 models.
#
# If you use an AI assistant, let it explain the idea or your verdict, not write the function.
#
# ## Run it
#
# The cells of a page run one after the other, like those of a notebook. To run them with your function, copy them into
# a Python file in your folder and take the import of the comment:

# %%
from llorch.ops.rms_norm import rms_norm  # yours: from l01_rms_norm import rms_norm

x, gain = np.array([[3.0, 4.0]], np.float32), np.array([2.0, 10.0], np.float32)
print(rms_norm(x, gain, eps=1e-5).round(3))
print(rms_norm(1000 * x, gain, eps=1e-5).round(3))

# %% [markdown]
# A row a thousand times as long gives the same result. The whole model runs with your function, too:
#
# ```
# llorch run story "Once upon a time there was a little fox" --impl .
# ```
#
# ## A mistake to plant
#
# Break your function once it passes: add $\epsilon$ after the root. It reads well, and on the long rows of `story` it
# is invisible. The check runs it inside the forward pass of four models:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["01"])["rms_norm"]["norm-eps-outside-root"]
print(check_functions("01", rms_norm=wrong))

# %% [markdown]
# How to read it:
#
# - The first line is the verdict. The second is the first wrong number of the run: here the norm of layer 0, which
#   reads the bare embeddings.
# - *How much* compares the error with the tolerance, the largest error that rounding explains. It is derived, never
#   chosen.
# - *Pattern* says that whole rows are off by a factor, and each row by another one: a divisor is wrong.
# - *Diagnosis* names a known mistake. This mistake, put into llorch's code, makes *the same wrong numbers*, so it is
#   the cause and no guess. *Not the cause* lists mistakes that make similar numbers.
#
# ![Error of the result against the size of the row, for two mistakes with eps](fig/eps.svg)
#
# The smaller a row, the larger the effect of $\epsilon$. Below the dashed line, rounding hides it. The ticks at the
# bottom are the rows that the norms of three models read. The leftmost, the embeddings of `micro-llama`, were made
# small on purpose: this mistake cannot hide there.
#
# ## Both engines
#
# - llama.cpp and transformers read the same rows and use the same formula. Still, 175 of 1,152 numbers of this norm
#   differ, by 7e-07 at most. Neither is wrong: a float32 number has 24 bits, and both are off by about half a bit.
# - llama.cpp sums the squares in float64. transformers does everything in float32.
# - The tolerance of this norm is 4.8e-07. The mistake above is 20,000 times beyond it.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

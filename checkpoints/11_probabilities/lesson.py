# %% [markdown]
# # 11 probabilities
#
# 30 minutes, five small functions and a chain of them.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# There is one row of logits ([09](../09_selected_logits/README.md)). Taking its largest entry
# ([10](../10_argmax/README.md)) always writes the same text. To get different texts, a program draws a token at random.
# This lesson makes the distribution that it draws from.
#
# ## Idea
#
# The softmax of the logits is the model's distribution. Programs change it before they draw. They make repeated tokens
# less likely, and the distribution flatter or sharper. They also remove the long tail, where a thousand unlikely tokens
# are likely together.

# %%
import numpy as np

import llorch
from llorch.ops.sampling import softmax

story = llorch.load("story")
text = "Once upon a time there was a little boy. One day, there was a little"
ids = story.tokenizer.encode(text)
row = story.forward(ids, last_only=True)[-1].astype(np.float64)
order = np.argsort(-row)
for i in order[:6]:
    word = story.tokenizer.decode([int(i)])
    print(f"{word!r:10} logit {row[i]:6.2f}   {softmax(row)[i]:.3f}")
print(f"{row.size - 6} others together   {softmax(row)[order[6:]].sum():.3f}")

# %% [markdown]
# ## The maths
#
# ```math
# z \to \text{penalty} \to \text{temperature} \to \text{top-}k \to \text{top-}p \to \text{min-}p \to \mathrm{softmax}
# ```
#
# | step | formula | neutral |
# | --- | --- | --- |
# | penalty $r$ | $z_i / r$ if $z_i > 0$, else $z_i \cdot r$, for every $i$ seen so far | 1 |
# | temperature $T$ | $z / T$ | 1 |
# | top-k | the $k$ largest stay | 0 |
# | top-p | the fewest likeliest tokens stay whose probabilities sum to at least $p$ | 1 |
# | min-p | tokens with $p_i \ge m \cdot \max_j p_j$ stay, that is $z_i \ge \max_j z_j + \log m$ | 0 |
# | softmax | $p_i = e^{z_i - \max z} / \sum_j e^{z_j - \max z}$ | |
#
# A removed token gets the logit $-\infty$. Then every later step handles it correctly: $e^{-\infty} = 0$.
#
# By hand: logits $(2, 1, 0)$ have the probabilities $(0.665, 0.245, 0.090)$. With top-p at 0.8 the first is not enough.
# The second brings the sum to 0.910 and *stays*. The third is removed. The rest is made to sum to one again:
# $(0.731, 0.269, 0)$.
#
# ## The picture
#
# ![Probabilities of the likeliest tokens after every step of the chain](fig/filters.svg)
#
# The picture shows the row from above in each step of the chain. Outlines are the step before. The penalty lowers
# ` boy`, which was said already, and ` girl` gains. A temperature below 1 sharpens. The filters remove tokens, and
# every cut makes the rest likelier, because the sum has to be one.
#
# ## Exercise
#
# Write six functions in `l11_probabilities.py`, from the bottom up:
#
# ```python
# def softmax(logits): ...
# def penalise(logits, history, penalty): ...
# def keep_top_k(logits, k): ...
# def keep_top_p(logits, p): ...
# def keep_min_p(logits, min_p): ...
# def distribution(logits, history, penalty, temperature, top_k, top_p, min_p): ...
# ```
#
# ```
# llorch learn check 11
# llorch learn hint 11
# ```
#
# The check judges each function alone first, in llorch's chain. Neutral settings occur, too: `k` may be 0 and `p` may
# be 1.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first wrong
# probability and the settings that are still right ([below](#a-mistake-to-plant)). Green is one line with `PASS`
# ([below](#run-it)), and `llorch learn list` shows `PASS` next to 11.
#
# ## Run it
#
# The example from above, a penalty on the tokens 0 and 2, then the row of `story` through each filter alone:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

# yours: from l11_probabilities import keep_min_p, keep_top_k, keep_top_p, penalise, softmax
from llorch.ops.sampling import keep_min_p, keep_top_k, keep_top_p, penalise

z = np.array([2.0, 1.0, 0.0])
print(softmax(z).round(3), "->", softmax(keep_top_p(z, p=0.8)).round(3))
print(penalise(z - 1, np.array([0, 2, 2]), penalty=1.4).round(3))
for name, filtered in (
    ("top-k 12", keep_top_k(row, k=12)),
    ("top-p 0.8", keep_top_p(row, p=0.8)),
    ("min-p 0.1", keep_min_p(row, min_p=0.1)),
):
    n_left, best = np.isfinite(filtered).sum(), softmax(filtered).max()
    print(f"{name:10} keeps {n_left:3} of {row.size}, the best has {best:.3f}")
functions = {part.name: part.reference for part in BY_NUMBER["11"].parts}
print(str(check_functions("11", **functions)).splitlines()[0])

# %% [markdown]
# ## A mistake to plant
#
# Many samplers have this mistake: the penalty divides every logit of a seen token. For $z = 3$ and $r = 1.4$ that gives
# 2.14, which is less likely. For $z = -3$ it gives -2.14, which is *likelier*, so the model repeats itself.

# %%
wrong = typed_mistakes(BY_NUMBER["11"])["penalise"]["penalty-divides-negative-logits"]
print(check_functions("11", penalise=wrong))

# %% [markdown]
# A comparison of texts could not decide. Two right samplers with different random numbers write different texts, and
# this mistake writes good texts, too. So llorch compares distributions, never draws.
#
# ## Both engines
#
# - The order above is the order of transformers. llama.cpp's samplers can be chained in any order, and other orders
#   give other distributions.
# - top-k: among tokens equal to the k-th, llama.cpp keeps exactly k. transformers and llorch keep all of them.
# - top-p: llama.cpp and llorch add up from the likeliest token. transformers adds up from the unlikeliest one. If
#   rounding decides about a token at the edge, the check says so, and that it is *not your bug*.
# - Both divide a positive logit of a seen token by the penalty and multiply a negative one. A token counts once.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.

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
# ([10](../10_argmax/README.md)) always writes the same text. To get different texts, a program draws a token at
# random. This lesson makes the distribution that it draws from.
#
# ## Idea
#
# The softmax of the logits is the model's distribution. Programs change it before they draw. They make repeated
# tokens less likely and the distribution flatter or sharper. They also remove the long tail, where a thousand
# unlikely tokens are likely together.

# %%
import inspect

import numpy as np

import llorch
from llorch.ops.sampling import keep_min_p, keep_top_k, keep_top_p, penalise, softmax

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little boy. One day, there was a little")
row = story.forward(ids, last_only=True)[-1].astype(np.float64)
order = np.argsort(-row)
for i in order[:6]:
    print(f"{story.tokenizer.token_bytes(int(i)).decode()!r:10} logit {row[i]:6.2f}   {softmax(row)[i]:.3f}")
print(f"{row.size - 6} others together   {softmax(row)[order[6:]].sum():.3f}")

# %% [markdown]
#
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
# A token that is removed gets the logit $-\infty$. Then every later step handles it correctly: $e^{-\infty} = 0$.
#
# By hand: logits $(2, 1, 0)$ have the probabilities $(0.665, 0.245, 0.090)$. With top-p at 0.8 the first is not
# enough. The second brings the sum to 0.910 and *stays*. The third is removed. The rest is made to sum to one again:
# $(0.731, 0.269, 0)$.
#
# ## The picture
#
# ![Probabilities of the likeliest tokens after every step of the chain](fig/filters.svg)
#
# The picture shows the row from above in each step of the chain. Outlines are the step before. The penalty lowers
# ` boy`, which was said already, and ` girl` gains. A temperature below 1 sharpens. The filters remove tokens, and
# every cut makes the rest likelier, since the sum has to be one.
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
# Each is judged alone first, in llorch's chain. Neutral settings occur, too: `k` may be 0 and `p` may be 1.
#
# ## Run it

# %%
z = np.array([2.0, 1.0, 0.0])
print(softmax(z).round(3), "->", softmax(keep_top_p(z, p=0.8)).round(3))
z = penalise(row, ids, penalty=1.1) / 0.8
for name, filtered in (
    ("top-k 12", keep_top_k(z, k=12)),
    ("top-p 0.8", keep_top_p(z, p=0.8)),
    ("min-p 0.1", keep_min_p(z, min_p=0.1)),
):
    print(f"{name:10} keeps {np.isfinite(filtered).sum():3} of {z.size}, the best has {softmax(filtered).max():.3f}")

# %% [markdown]
#
# ## The mistake
#
# Many samplers have this mistake: the penalty divides every logit of a seen token. For $z = 3$ and $r = 1.4$ it gives
# 2.14, which is less likely. For $z = -3$ it gives -2.14, which is *likelier*, so the model repeats itself.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["11"])
wrong = typed["penalise"]["penalty-divides-negative-logits"]
print(inspect.getsource(wrong))
print(check_functions("11", penalise=wrong))

# %% [markdown]
# Which settings show a mistake? Each of these fails under the right name. The numbers are the failed rows, among 60.

# %%
for part, name in (
    ("penalise", "penalty-per-occurrence"),
    ("keep_top_k", "top-k-one-more"),
    ("keep_top_p", "top-p-drops-crossing-token"),
    ("keep_min_p", "min-p-absolute"),
    ("distribution", "temperature-after-filters"),
    ("distribution", "probabilities-not-renormalised"),
):
    report = check_functions("11", **{part: typed[part][name]})
    failed_parts = sorted({comparison.stage_ref.part for comparison in report.wrong})
    print(f"{name:31} {len(report.wrong):2}   {', '.join(failed_parts)}")

# %% [markdown]
# A comparison of texts could not decide. Two right samplers with different random numbers write different texts, and
# most of these mistakes write good texts. So llorch compares distributions, never draws.

# %% [markdown]
# # 04 attention_scores
#
# 35 minutes, two functions of four and two lines.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# Every token has a query and a key for each head, turned by its position ([01b](../01b_rope/README.md)), and the keys
# of all tokens so far lie in the cache ([03](../03_kv_cache/README.md)). Attention is the only part of
# the model where a token looks at another one.
#
# ## Idea
#
# A query asks, a key answers. The answer is one number, their dot product: large when both point the same way. So a
# token that sees 10 keys (its own among them) gets 10 *scores*. The softmax turns them into 10 shares that sum to one,
# and in the next lesson the token takes that share of each value. Three details make up the lesson:
#
# - **Scale.** The dot product of two rows of $d$ independent numbers of size 1 has a typical size of $\sqrt{d}$: 5.7
#   for heads of width 32. Divided by $\sqrt{d}$ it has size 1 whatever the width, and the softmax stays soft.
# - **Mask.** A model that predicts the next word must not see it. Keys after the query get the score $-\infty$, and
#   $e^{-\infty}$ is a share of exactly 0.
# - **Groups.** `story` has 8 query heads and 4 key heads: heads 0 and 1 read key head 0, heads 2 and 3 key head 1, and
#   so on. This makes the cache half as large.
#
# The result can be read like a sentence. Here is the last word in three heads of `story`:

# %%
import numpy as np

import llorch

story, trace = llorch.load("story"), {}
story.forward(story.tokenizer.encode("Once upon a time there was a little fox"), trace=trace)
words = ["(start)", "Once", "upon", "a", "time", "there", "was", "a", "little", "fox"]
for layer, head in ((1, 1), (2, 2), (0, 2)):
    shares = trace[f"l{layer}.attn_probs"][head, -1]
    best = ", ".join(f"{words[c]} {shares[c]:.3f}" for c in np.argsort(-shares)[:3])
    print(f"layer {layer} head {head}, fox: {best}")

# %% [markdown]
# For the first of these heads *fox* is about *little*, which gets 99.5 %. The second looks at the start token, as a
# head does that finds nothing. The third hardly chooses.
#
# ## The maths
#
# For head $a$, query $t$, key $c$:
#
# ```math
# \begin{aligned}
# s_{a,t,c} &= \begin{cases}
#   q_{t,a} \cdot k_{c,\lfloor a/g \rfloor} / \sqrt{d} & \text{key } c \text{ is not after query } t \\
#   -\infty & \text{else}
# \end{cases} \\
# p_{a,t,c} &= \frac{e^{s_{a,t,c} - \max_c s_{a,t,c}}}{\sum_c e^{s_{a,t,c} - \max_c s_{a,t,c}}}
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $q$ | (seq, heads, head_dim) | rotated queries of the new tokens |
# | $k$ | (kv_heads, ctx, head_dim) | rotated keys of all tokens, the cached ones first |
# | $d$, $g$ | numbers | `head_dim`; query heads that share a key head |
# | $s$, $p$ | (heads, seq, ctx) | scores, shares |
#
# By hand, with $d = 4$: a query meets three keys with the dot products 2, 6 and -4. Halved: 1, 3, -2. Their
# exponentials are 2.72, 20.1 and 0.14, the sum is 22.9, the shares 0.118, 0.876, 0.006.
#
# The maximum is subtracted because $e^{89}$ is infinite in float32, and infinity divided by infinity is not a number.
# Subtracting the same $m$ above and below changes nothing else.
#
# Which keys come *after* the query? With `seq` new tokens after `ctx - seq` cached ones, query $t$ stands at place $t +
# ctx - seq$ of the context. A whole prompt has `ctx == seq`, and the mask is the well-known triangle. One new token has
# no mask at all: it is the newest, so it sees everything.
#
# ## The picture
#
# ![One head of story: scaled products, scores with the mask, shares with the sum of each row](fig/heads.svg)
#
# Layer 1, head 1 again, all ten words. Left: the scaled products of every query with every key, the future included.
# Middle: the mask has removed the upper right. Right: the shares, with their sums at the margin.
#
# ## Exercise
#
# Write both functions in `l04_attention_scores.py`:
#
# ```python
# def attention_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
# def attention_probs(scores: np.ndarray) -> np.ndarray:
# ```
#
# ```
# llorch learn check 04
# llorch learn hint 04
# ```
#
# Each is judged with right input, so begin with either.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: attention_scores,
# attention_probs`. A wrong function says `FAIL`, and two right ones say `PASS` after 320 comparisons in 4 models.
#
# ## Run it
#
# Two new tokens after three cached ones, two heads that share one key head, all numbers 1. Then the softmax, with a
# second row that would overflow:

# %%
from llorch.ops.attention import attention_probs, attention_scores

# yours: from l04_attention_scores import attention_probs, attention_scores
print(attention_scores(np.ones((2, 2, 4), np.float32), np.ones((1, 5, 4), np.float32)))
print(attention_probs(np.array([[[1, 3, -2], [300, 299, -np.inf]]], np.float32)).round(3))

# %% [markdown]
# ## A mistake to plant
#
# Let query $t$ see the keys up to $t$, whatever is in the cache. This mask is right for every prompt and wrong for
# every token after it: each token that is generated sees the very first key and nothing else. `story` then writes the
# second text. The third is for comparison: the scores are not divided by $\sqrt{d}$.

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["04"])["attention_scores"]


def continued(**functions) -> str:
    with Implementation("this page", functions).installed():
        tokens = story.generate("Once upon a time there was a little fox", max_tokens=17)
        return "".join(token.text for token in tokens)


print("right     ", continued())
print("mask wrong", continued(attention_scores=wrong["mask-ignores-cache"]))
print("not scaled", continued(attention_scores=wrong["scores-not-scaled"]))

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("04", attention_scores=wrong["mask-ignores-cache"]))

# %% [markdown]
# The third text reads as well as the first, although every score in it is 5.7 times too large. Text shows some mistakes
# and hides others. Numbers hide none.
#
# The verdict says where: not in the prompt as one piece, which was right, but after 1 cached token. There each of the
# 11 new queries misses one key in each of 6 heads, 66 in all.
#
# ## Both engines
#
# - Both hide the same keys. All other differences are rounding, and no row of shares sums to exactly one in float32.
# - transformers adds the lowest finite float32 where it hides a key. llama.cpp adds -inf.
# - llama.cpp applies scale and mask inside its softmax, so it has no array of scores. llorch makes it from the
#   products.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

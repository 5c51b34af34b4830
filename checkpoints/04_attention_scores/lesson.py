# %% [markdown]
# # 04 attention_scores
#
# 35 minutes, two functions of four and two lines.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# Every token has a query and a key for each head, turned by its position ([01b](../01b_rope/README.md)), and the keys
# of all tokens so far lie in the cache ([03](../03_kv_cache/README.md)). Up to here no token has looked at another
# one. Attention is the only part of the model where it happens.
#
# ## Idea
#
# A query asks, a key answers. The answer is one number, their dot product: large when both point the same way. So a
# token that sees 10 keys (its own among them) gets 10 *scores*. The softmax turns them into 10 shares that sum to
# one, and in the next lesson the token takes that share of each value.
#
# Three details make up the lesson.
#
# - **Scale.** The dot product of two rows of $d$ independent numbers of size 1 has a typical size of $\sqrt{d}$: 5.7
#   for heads of width 32. Divided by $\sqrt{d}$ it has size 1 whatever the width, and the softmax stays soft.
# - **Mask.** A model that predicts the next word must not see it. Keys after the query get the score $-\infty$, and
#   $e^{-\infty}$ is a share of exactly 0.
# - **Groups.** `story` has 8 query heads and 4 key heads: heads 0 and 1 read key head 0, heads 2 and 3 key head 1,
#   ... This makes the cache half as large.
#
# The result can be read like a sentence. Here is the last word in layer 1 and layer 0 of `story`:

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
words = ["(start)", "Once", "upon", "a", "time", "there", "was", "a", "little", "fox"]
trace: dict[str, np.ndarray] = {}
story.forward(ids, trace=trace)


def says(layer: int, head: int, query: int) -> str:
    shares = trace[f"l{layer}.attn_probs"][head, query]
    best = np.argsort(-shares)[:3]
    return ", ".join(f"{words[c]} {shares[c]:.3f}" for c in best)


print("layer 1 head 1, fox:", says(1, 1, 9))
print("layer 2 head 2, fox:", says(2, 2, 9))
print("layer 0 head 2, fox:", says(0, 2, 9))

# %% [markdown]
# For the first of these heads *fox* is about *little*, which gets 99.5 % among ten keys. The second looks at the
# start token. A head does this when it finds nothing, since the shares must go somewhere. The third, in the first
# layer, hardly chooses at all.
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
# The maximum is subtracted for one reason: $e^{89}$ is infinite in float32, and infinity divided by infinity is not a
# number. Subtracting the same $m$ above and below divides both by $e^m$ and changes nothing else.
#
# Which keys come *after* the query? With `seq` new tokens after `ctx - seq` cached ones, query $t$ stands at place
# $t + ctx - seq$ of the context. A whole prompt has `ctx == seq`, and the mask is the well-known triangle. One new
# token after 11 others has no mask at all: it is the newest, so it sees everything.
#
# ## The picture
#
# ![One head of story: scaled products, scores with the mask, shares with the sum of each row](fig/heads.svg)
#
# Layer 1, head 1 again, all ten words. Left: the scaled products of every query with every key, the future included.
# Middle: the mask has removed the upper right. Right: the shares, with their sums at the margin. Most rows have one
# strong entry: *fox* looks at *little*, *little* at *a*, *time* at *upon*. The first words look at the start; the
# very first row has no choice, since its only key gets everything.
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
# llorch learn hint 04          # a direction; once more for the formula, once more for the code
# ```
#
# Each is judged with right input, so begin with either. Break it afterwards: use `np.tile` instead of `np.repeat`, or
# -10 instead of $-\infty$ (the difference is small, and the check finds it). Or use `axis=1` in the softmax: the
# columns sum to one, and the picture looks just as plausible.
#
# ## Run it
#
# The example from above, with a second row that would overflow:

# %%
from llorch.ops.attention import attention_probs, attention_scores

print(attention_probs(np.array([[[1, 3, -2], [300, 299, -np.inf]]], np.float32)).round(3))

# %% [markdown]
# Next, the scale in `micro-llama` (heads of width 32), from the numbers that llama.cpp stored. How large is the
# largest share of a row on average, with the scale and without?

# %%
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
q, k = llamacpp["l0.q_rope"], llamacpp["l0.k_cache"]
scores = attention_scores(q, k)
print("queries", q.shape, " keys", k.shape, " scores", scores.shape)
for name, factor in (("scaled", 1.0), ("not scaled", np.sqrt(32))):
    largest = attention_probs((scores * factor).astype(np.float32)).max(axis=-1)[:, 1:].mean()
    print(f"{name:10}  mean largest share {largest:.2f}")

# %% [markdown]
# Without the division nearly every query picks one key and ignores the rest.
#
# ## The mistake
#
# This mask is right for every prompt and wrong for every token after it. It lets query $t$ see the keys up to $t$:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["04"])["attention_scores"]["mask-ignores-cache"]
print(inspect.getsource(wrong))
for cached in (0, 5, 11):
    n_keys = [np.isfinite(function(q[cached:], k)[0]).sum(axis=-1) for function in (attention_scores, wrong)]
    print(f"{cached:2} cached: the last query sees {n_keys[0][-1]:2} keys, with the mistake {n_keys[1][-1]:2}")

# %% [markdown]
# A test that runs the whole prompt at once has 0 cached tokens and passes. In generation, where one token comes at a
# time, each token sees the very first key and nothing else. `story` then writes the second text. The third is for
# comparison: it lacks the scale.

# %%
from llorch.apps.learn.choice import Implementation

BEGINNING = "Once upon a time there was a little fox"


def continued(**parts) -> str:
    with Implementation("this page", parts).installed():
        return "".join(token.text for token in story.generate(BEGINNING, max_tokens=17))


print("right     ", continued())
print("mask wrong", continued(attention_scores=wrong))
unscaled = typed_mistakes(BY_NUMBER["04"])["attention_scores"]["scores-not-scaled"]
print("not scaled", continued(attention_scores=unscaled))

# %% [markdown]
# The first word of the second line is right: it came out of the prompt. The third line reads as well as the first
# one, although every score in it is 5.7 times too large. Text shows some mistakes and hides others. Numbers hide
# none. The check runs every prompt a second time, cut in two, and looks at the second part:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("04", attention_scores=wrong))

# %% [markdown]
# The first line says where: not in the prompt as one piece, which was right, but after 1 cached token. There each of
# the 11 new queries misses one key in each of 6 heads, 66 in all. The known mistake, injected into llorch's code,
# gives the same array. This is why the diagnosis names it.

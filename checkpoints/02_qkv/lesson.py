# %% [markdown]
# # 02 qkv
#
# 35 minutes, two functions.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# Every row of the residual stream has been normalised ([01](../01_rms_norm/README.md)), and attention begins. It needs
# three things of every token: a *query* (what am I looking for?), a *key* (what can I be found by?) and a *value* (what
# do I hand over when I am found?). Queries and keys then go through RoPE ([01b](../01b_rope/README.md)).
#
# ## Idea
#
# A linear projection is a list of questions. Each row of the matrix is as wide as the token's row, and the dot product
# of the two is one number: how much of that row's direction is in the token. `micro-llama` asks 192 such questions for
# the query, and 64 each for key and value.
#
# The results are cut into *heads*, stretches of 32 numbers that belong together: 6 query heads, 2 key heads and 2 value
# heads. Each query head looks at the context by itself. There are fewer keys than queries, which is called
# grouped-query attention: query heads 0, 1, 2 share key head 0, and 3, 4, 5 share key head 1. Keys and values have to
# be remembered ([03](../03_kv_cache/README.md)), and this keeps a third of them.
#
# Two families add something. Qwen2 adds a bias to all three results. Qwen3 normalises every query head and every key
# head by itself, with your `rms_norm` and one gain for all heads.
#
# ## The maths
#
# ```math
# \begin{aligned}
# q &= h W_q^\top + b_q, \qquad k = h W_k^\top + b_k, \qquad v = h W_v^\top + b_v \\
# \hat q_{t,a} &= \mathrm{rmsnorm}(q_{t,a}) \odot w_q, \qquad \hat k_{t,b} = \mathrm{rmsnorm}(k_{t,b}) \odot w_k
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $h$ | (seq, hidden) | normalised rows |
# | $W_q$ | (heads * head_dim, hidden) | `q_proj`, one row for each output; $W_k$, $W_v$ with kv_heads |
# | $q_{t,a}$, $k_{t,b}$ | (head_dim,) | query head $a$ and key head $b$ of token $t$ |
# | $w_q$, $w_k$ | (head_dim,) | gains of the head norms, if the family has them |
#
# The heads times their size need not be the width of the stream: `micro-qwen3` is 64 wide and has 15 heads of 32
# numbers, so its `q_proj` is (480, 64).
#
# ## The picture
#
# ![The rows of q_proj, k_proj and v_proj in blocks, one for each head; lines join what goes together](fig/heads.svg)
#
# The three matrices of layer 0 of `micro-llama`, drawn to scale. They are 96 numbers wide, and a head is a block of 32
# neighbouring rows. Lines lead from each query head to the key head that it shares, and on to the value head.
#
# ## Exercise
#
# Write two functions in `l02_qkv.py`. The second calls the first, and `rms_norm` of lesson 01.
#
# ```python
# def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray: ...
# def qkv(h, q_proj, k_proj, v_proj, q_bias, k_bias, v_bias, q_norm, k_norm, head_dim, eps): ...
# ```
#
# ```
# llorch learn check 02
# llorch learn hint 02
# ```
#
# Your `linear` computes all seven matrix products of every layer, and the logits.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: linear, qkv`. A
# wrong function says `FAIL`, even while the other is missing. Two right ones say `PASS` after 1,664 comparisons in 4
# models.
#
# ## Run it

# %%
import numpy as np

import llorch
from llorch.apps.learn.lessons import PARTS

qkv = PARTS["qkv"].reference  # yours: from l02_qkv import qkv
micro, trace = llorch.load("micro-llama"), {}
micro.forward(micro.tokenizer.encode("Once upon a time"), trace=trace)
h, w = trace["l0.attn_norm"], micro.weights.layer(0)
nothing = dict.fromkeys(("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"))  # micro-llama has none
weights = {name: w[name] for name in ("q_proj", "k_proj", "v_proj")}
q, k, v = qkv(h, **weights, **nothing, head_dim=32, eps=1e-5)
print("rows", h.shape, " queries", q.shape, " keys", k.shape, " values", v.shape)
print(f"token 3, head 2, number 0: {q[3, 2, 0]:.4f}")
print(f"token 3 times row 64:      {np.dot(h[3], w['q_proj'][64]):.4f}")

# %% [markdown]
# Number 0 of head 2 is the dot product with row 64 of the matrix, since head 2 begins there.
#
# ## A mistake to plant
#
# A reshape cannot fail because its axes are in the wrong order. Cut the result of a projection into (head_dim, heads)
# instead of (heads, head_dim), and exchange the two axes afterwards. The shape is right. Sum, mean and length of a
# token's queries are right. Only two of its 192 numbers are in their place:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["02"])["qkv"]["qkv-heads-interleaved"]
print(check_functions("02", qkv=wrong))

# %% [markdown]
# The arithmetic is right and an axis is wrong: the same numbers stand in another order.
#
# Two more mistakes are quiet. A matrix that is not transposed raises an error in NumPy only if it is not square. The
# query matrices of Llama 2 and 3 are square, and one of llorch's four micro models has a square one. A forgotten bias
# passes in three of four models.
#
# ## Both engines
#
# - llama.cpp and transformers compute the same sums and add in another order. One number of `v_proj`, added in float32
#   in three orders, gives -0.206602573, -0.206602693 and -0.206602633. Processors add 4 to 16 numbers at a time, so one
#   engine gives other last digits on another machine.
# - GGUF files of the Llama family hold the rows of q and k in another order than Hugging Face. llorch restores the
#   order when it reads them.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

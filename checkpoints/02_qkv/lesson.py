# %% [markdown]
# # 02 qkv
#
# 35 minutes, two functions.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# Every row of the residual stream has been normalised ([01](../01_rms_norm/README.md)). Now attention begins. It
# needs three things of every token: a *query* (what am I looking for?), a *key* (what can I be found by?) and a
# *value* (what do I hand over when I am found?). All three are made from the same normalised row with three matrices:
# `q_proj`, `k_proj`, `v_proj`.
#
# ## Idea
#
# A linear projection is a list of questions. Each row of the matrix is as wide as the token's row, and the dot
# product of the two is one number: how much of that row's direction is in the token. `micro-llama` asks 192 such
# questions for the query, and 64 each for key and value.
#
# The results are cut into *heads*, stretches of 32 numbers that belong together: 6 query heads, 2 key heads and 2
# value heads. Each query head looks at the context by itself. There are fewer keys than queries, which is called
# grouped-query attention: query heads 0, 1, 2 share key head 0, and 3, 4, 5 share key head 1. It costs little
# quality. Only keys and values have to be remembered ([03](../03_kv_cache/README.md)), and this keeps a third of
# them.
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
# $h$ is `attn_norm`, $a$ counts query heads and $b$ key heads. The family decides whether there are biases and head
# norms. The shapes of the built-in models:

# %%
import numpy as np

import llorch

for name in ("micro-llama", "micro-qwen2", "micro-qwen3", "story"):
    model = llorch.load(name)
    c, w = model.config, model.weights.layer(0)
    heads = f"{c.n_heads:2} heads of {c.head_dim} over {c.n_kv_heads}"
    print(f"{name:12} q_proj {w['q_proj'].shape!s:10} k_proj, v_proj {w['k_proj'].shape!s:10} {heads}")

# %% [markdown]
# Matrices are stored (out, in), one row per output, so a product is `x @ weight.T`. The heads times their size need
# not be the width of the stream: 15 heads of 32 numbers are 480, and `micro-qwen3` is 64 wide.
#
# ## The picture
#
# ![The rows of q_proj, k_proj and v_proj in blocks, one for each head; lines join what goes together](fig/heads.svg)
#
# The three matrices of layer 0 of `micro-llama`, drawn to scale. They are 96 numbers wide, and a head is a block of
# 32 neighbouring rows. Lines lead from each query head to the key head that it shares, and on to the value head.
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
# Your `linear` is used for all seven matrices of every layer, and for the logits. Break it on purpose: leave the bias
# out (three of four models still pass), or normalise all heads of a token together (again three of four).
#
# ## Run it

# %%
from llorch.judging.goldens.forward import read
from llorch.ops.linear import linear
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
reference = golden.reference.engine_output.traces["near"]
w = llorch.load("micro-llama").weights.layer(0)
h = reference["l0.attn_norm"].astype(np.float32)
q = linear(h, w["q_proj"])
print("rows", h.shape, "-> queries", q.shape, "-> heads", q.reshape(len(h), -1, 32).shape)
print("token 3, head 2:", q.reshape(len(h), -1, 32)[3, 2, :4].round(3), "...")
print("by hand:        ", np.array([h[3] @ w["q_proj"][2 * 32 + i] for i in range(4)]).round(3), "...")

# %% [markdown]
# Number 0 of head 2 is the dot product with row 64 of the matrix. Forget the `.T` and NumPy complains, because 96
# does not fit 192. A square matrix raises no error:

# %%
square = llorch.load("micro-qwen2").weights.layer(0)["q_proj"]
x = np.ones((1, 96), np.float32)
print(square.shape, "right", (x @ square.T)[0, :3].round(3), " turned over", (x @ square)[0, :3].round(3))

# %% [markdown]
# The numbers are wrong, without an error. The query matrices of Llama 2 and 3 are square. Only one of llorch's four
# micro models has a square one.
#
# ## The mistake
#
# A reshape cannot fail because its axes are in the wrong order. This one cuts the result of a projection into
# (head_dim, heads) instead of (heads, head_dim), and transposes it afterwards, so that the shape is right:

# %%
import inspect

from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["02"])["qkv"]["qkv-heads-interleaved"]
print(inspect.getsource(wrong))
nothing = dict.fromkeys(("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"))
weights = {name: w[name] for name in ("q_proj", "k_proj", "v_proj")}
bad, *_ = wrong(h, **weights, **nothing, head_dim=32, eps=1e-5)
good = q.reshape(len(h), -1, 32)
print("shape", bad.shape == good.shape)
print("sum of a token's queries", np.allclose(bad.sum((1, 2)), good.sum((1, 2)), atol=1e-4))
print("their length            ", np.allclose(np.linalg.norm(bad, axis=(1, 2)), np.linalg.norm(good, axis=(1, 2))))
print("numbers in their place  ", f"{np.mean(np.isclose(bad, good)):.0%}")

# %% [markdown]
# Shape, sum, mean and norm are the same, and a quick look prints no more. Only two of 192 numbers stay in place, the
# first and the last. The check compares every number in its place:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("02", qkv=wrong))

# %% [markdown]
# `linear` is BORROWED while you have only written `qkv`, and the other way round. The check still finds a wrong
# function. "First wrong number" does not depend on chance: it is the earliest stage and layer, then the first place
# in it.

# %% [markdown]
# # 05b delta_net
#
# 60 minutes, four functions of two to eight lines. Optional: no other lesson needs it. In Qwen3-Next and Qwen3.5, three
# of four layers are delta nets.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# A delta net takes the place of attention, lessons [02](../02_qkv/README.md) to [05](../05_attention_output/README.md).
# Its input is the normalised stream, and its output is added to the stream.
#
# ## Idea
#
# Attention keeps every key and every value. Its cache grows with the text, and each new token reads all of it. A delta
# net keeps one matrix per head, from the first token to the millionth.
#
# Think of the matrix $S$ as a notebook with keys as headings. Asked with a key, it answers $S^\top k$. A new token
# arrives with a key and a value. *Linear attention* would write the value on top of the old entry, which blurs the
# page. The *delta rule* first looks up the entry at this key and writes only the difference. Afterwards the answer is
# the new value.
#
# Two numbers per token and head control it, both from 0 to 1. $\beta$ is the part of the difference that is written.
# $e^g$ is the part of the whole notebook that is kept before the writing. These are the sizes in `micro-qwen3.5`:

# %%
import numpy as np

import llorch

model, trace = llorch.load("micro-qwen3.5"), {}
model.forward(model.tokenizer.encode("Once upon a time there was a little fox"), trace=trace)
print("state of a layer", trace["l0.delta_state"].shape, "after any number of tokens")
fractions = np.exp(trace["l0.log_decay"].astype(np.float64))
for head in range(6):
    print(f"head {head}: a token leaves {fractions[:, head].min():.3f} to {fractions[:, head].max():.3f} of the state")

# %% [markdown]
# Before the rule, a convolution mixes each channel with its last three values, as a cheap sense of order: no RoPE is
# used here. Queries and keys are brought to length 1, so that reading at a key returns exactly the value written there.
#
# ## The maths
#
# ```math
# \begin{aligned}
# c_t &= \mathrm{silu}\Big(\sum_{j=0}^{3} \kappa_j \odot x_{t-3+j}\Big), \qquad
# q, k = \frac{c^{(q)}}{\lVert c^{(q)} \rVert}, \frac{c^{(k)}}{\lVert c^{(k)} \rVert}, \qquad v = c^{(v)} \\
# g_t &= -e^{A}\,\mathrm{softplus}(a_t + b), \qquad \beta_t = \sigma(\ldots) \\
# S &\leftarrow e^{g_t} S, \qquad \delta_t = \beta_t\,(v_t - S^\top k_t), \qquad S \leftarrow S + k_t\,\delta_t^\top \\
# o_t &= S^\top q_t / \sqrt{d_k}
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $x$ | (seq, channels) | queries, keys and values side by side |
# | $\kappa$ | (channels, 4) | a kernel per channel, `kernel` |
# | $q$, $k$ | (seq, k_heads, key_dim) | `q_l2`, `k_l2`: `l2_norm` adds 1e-6 to the sum of squares |
# | $v$ | (seq, v_heads, value_dim) | value head $h$ uses key head $h // (v/k)$ |
# | $g$, $\beta$ | (seq, v_heads) | `log_decay`, with `decay` for $-e^A$ and `dt_bias` for $b$; `beta` |
# | $S$ | (v_heads, key_dim, value_dim) | `state` |
# | $o$ | (seq, v_heads, value_dim) | the result, then a norm, a gate, a projection |
#
# By hand, with one head, $k = (1, 0)$, $\beta = 1$, $g = 0$: the value $(3, 4)$ becomes the first row of an empty $S$.
# A second token with the same key and the value $(5, 4)$ writes the difference $(2, 0)$. The row is then $(5, 4)$.
# Linear attention would make it $(8, 8)$.
#
# ## The picture
#
# ![How much of each token's writing is left at the end, for every head](fig/left.svg)
#
# The picture shows how much of a token is left after all later tokens, by decay alone. Some heads forget within a token
# or two. Head 0 remembers the whole prompt.
#
# ## Exercise
#
# Write four functions in `l05b_delta_net.py`:
#
# ```python
# def short_conv(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
# def l2_norm(x: np.ndarray) -> np.ndarray:
# def log_decay(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
# def delta_rule(q, k, v, beta, g, state) -> tuple[np.ndarray, np.ndarray]:
# ```
#
# ```
# llorch learn check 05b
# llorch learn hint 05b
# ```
#
# The check uses models that are not in the wheel. It needs a clone of the repository.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: short_conv,
# l2_norm, log_decay, delta_rule`. Each right function takes a name off the list, a wrong one says `FAIL`, and four
# right ones say `PASS` after 288 comparisons in 3 models.
#
# ## Run it
#
# The example from above, and then the same two tokens in two passes. The state is all that the second pass needs:

# %%
from llorch.apps.learn.lessons import PARTS

delta_rule = PARTS["delta_rule"].reference  # yours: from l05b_delta_net import delta_rule
k = np.array([[[1.0, 0]], [[1, 0]]])  # (seq, k_heads, key_dim)
v = np.array([[[3.0, 4]], [[5, 4]]])  # (seq, v_heads, value_dim)
beta, g, empty = np.ones((2, 1)), np.zeros((2, 1)), np.zeros((1, 2, 2))
_, state = delta_rule(k, k, v, beta, g, empty)
print("state", state.tolist())
_, between = delta_rule(k[:1], k[:1], v[:1], beta[:1], g[:1], empty)
_, end = delta_rule(k[1:], k[1:], v[1:], beta[1:], g[1:], between)
print("between the passes", between.tolist(), " at the end", end.tolist())

# %% [markdown]
# ## A mistake to plant
#
# The state fades *before* the look-up. Look up the old state instead, and let it fade afterwards. The order looks just
# as good:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["05b"])["delta_rule"]["delta-correction-before-decay"]
print(check_functions("05b", delta_rule=wrong))

# %% [markdown]
# The first number is off by 4e-06, and the whole state by 15 %: the error depends on how fast a head forgets.
#
# ## Both engines
#
# - llama.cpp and transformers agree with float64 to 3e-07 in every step of this layer.
# - The 1e-6 in the lengths comes from transformers. llama.cpp uses `rms_norm_eps` instead. Published models have 1e-6
#   there too.
# - llama.cpp keeps the state transposed, and Qwen3.5's GGUF files hold the value heads in another order. llorch undoes
#   both where it reads them.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

# %% [markdown]
# # 05b delta_net
#
# 60 minutes, four functions of two to eight lines. It is optional: no later lesson needs it. Llama, Qwen2 and Qwen3
# have attention in every layer. In Qwen3-Next and Qwen3.5, three of four layers are delta nets, the subject of this
# lesson.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# A delta net takes the place of attention, lessons [02](../02_qkv/README.md) to
# [05](../05_attention_output/README.md). Its input is the normalised stream. Its output is added to the stream.
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
import inspect

import numpy as np

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

model, golden = llorch.load("micro-qwen3.5"), read(goldens_folder() / "micro-qwen3.5")
net, ids = model.config.delta_net, golden.cases["near"].ids
trace: dict[str, np.ndarray] = {}
model.forward(ids, trace=trace)
first = next(i for i in range(model.config.n_layers) if model.config.layer(i).mixer == "delta_net")
state, cached = trace[f"l{first}.delta_state"], 2 * model.config.kv_width * len(ids)
print("state of a layer", state.shape, "=", state.size, "numbers, after any number of tokens")
print(f"keys and values of an attention layer after {len(ids)} tokens: {cached} numbers, and growing")
fractions = np.exp(trace[f"l{first}.log_decay"].astype(np.float64))
for head in range(net.n_value_heads):
    print(f"head {head}: a token leaves {fractions[:, head].min():.3f} to {fractions[:, head].max():.3f} of the state")

# %% [markdown]
# Before the rule, a convolution mixes each channel with its last three values, as a cheap sense of order: no RoPE is
# used here. Queries and keys are brought to length 1, so that reading at a key returns exactly the value written
# there.
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
# | $x$ | (seq, conv_width) | `qkv_in`: queries, keys and values side by side |
# | $\kappa$ | (conv_width, 4) | a kernel per channel |
# | $q$, $k$ | (seq, k_heads, key_dim) | `q_l2`, `k_l2` |
# | $v$ | (seq, v_heads, value_dim) | the rest of `conv_out`; value head $h$ uses key head $h // (v/k)$ |
# | $g$, $\beta$ | (seq, v_heads) | `log_decay`, `beta` |
# | $S$ | (v_heads, key_dim, value_dim) | `delta_state` |
# | $o$ | (seq, v_heads, value_dim) | `delta_out`, then a norm, a gate, a projection |
#
# By hand, with one head, $k = (1, 0)$, $\beta = 1$, $g = 0$: the value $(3, 4)$ becomes the first row of an empty
# $S$. A second token with the same key and the value $(5, 4)$ writes the difference $(2, 0)$. The row is then
# $(5, 4)$. Linear attention would make it $(8, 8)$.
#
# ## The picture
#
# ![How much of each token's writing is left at the end, for every head](fig/left.svg)
#
# The picture shows how much of a token is left after all later tokens, by decay alone. Some heads forget within a
# token or two. Head 0 remembers the whole prompt.
#
# ## Exercise
#
# Write the four functions in `l05b_delta_net.py`:
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
# llorch learn hint 05b         # a direction; once more for the formula, once more for the code
# ```
#
# ## Run it
#
# A prompt in two parts gives the same state as in one. This makes chunks and caches possible:

# %%
from llorch.ops.delta_rule import delta_rule, delta_rule_in_chunks

rng = np.random.default_rng(0)
q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, 100, 2, 8)))
v, beta, g = rng.normal(size=(100, 4, 6)), rng.uniform(size=(100, 4)), -rng.exponential(size=(100, 4))
empty = np.zeros((4, 8, 6))
out, state = delta_rule(q, k, v, beta, g, empty)
a, between = delta_rule(q[:37], k[:37], v[:37], beta[:37], g[:37], empty)
b, end = delta_rule(q[37:], k[37:], v[37:], beta[37:], g[37:], between)
chunks, in_chunks = delta_rule_in_chunks(q, k, v, beta, g, empty)
for name, actual, expected in (("two parts", end, state), ("chunks of 64", in_chunks, state), ("outputs", chunks, out)):
    print(f"{name}, within 1e-14:", bool(np.abs(actual - expected).max() < 1e-14))

# %% [markdown]
#
# ## The mistake
#
# Where does the decay go? The state fades *before* the lookup. The other order looks just as good:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["05b"])["delta_rule"]["delta-correction-before-decay"]
print(inspect.getsource(wrong))

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("05b", delta_rule=wrong))

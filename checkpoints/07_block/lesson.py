# %% [markdown]
# # 07 block
#
# 30 minutes, one function of ten lines, each a call of a function that exists.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# All pieces of a layer are ready. Now you put them together, and the result is the model: `story` is an embedding, this
# block five times with different weights, and a last product. If you skipped lessons (the 90-minute route does), their
# imports give llorch's functions, and a table below says what these do.
#
# ## Idea
#
# A block has two halves of the same form. Each takes a copy of the stream, normalises it, computes with the copy, and
# *adds* the result to the stream. The first half is attention, in which tokens see each other. The second is the
# feed-forward part, in which each token is alone.
#
# ![The stream goes straight through the block; two branches read a normalised copy and add to it](fig/wiring.svg)
#
# The stream itself goes straight through: a block can only add. This is one main reason why deep models can be trained:
# the way from the last layer to the first is a sum, and a gradient passes a sum unchanged.
#
# ## The maths
#
# ```math
# \begin{aligned}
# r &= x + \mathrm{attention}(\mathrm{rmsnorm}(x) \odot w_1) \\
# y &= r + \mathrm{ffn}(\mathrm{rmsnorm}(r) \odot w_2)
# \end{aligned}
# ```
#
# $x$, $r$ and $y$ are the stream before, between and after the halves, (seq, hidden). $w_1$ and $w_2$ are two gains,
# `attn_norm` and `ffn_norm`. Inside attention the order is fixed too: project, rotate queries and keys but not values,
# append to the cache, score, make shares, mix, project back. The cache holds *rotated* keys, so that no key is turned
# twice.
#
# | function | lesson | result |
# | --- | --- | --- |
# | `rms_norm(x, weight, eps)` | [01](../01_rms_norm/README.md) | every row at size 1, times the gain |
# | `qkv(h, ...)` | [02](../02_qkv/README.md) | q, k, v: (seq, heads or kv_heads, head_dim) |
# | `rope(x, cos, sin)` | [01b](../01b_rope/README.md) | each head turned by its position |
# | `append(past_k, past_v, k, v)` | [03](../03_kv_cache/README.md) | two caches, (kv_heads, ctx, head_dim) |
# | `attention_scores(q, k)` | [04](../04_attention_scores/README.md) | (heads, seq, ctx), the future hidden |
# | `attention_probs(scores)` | 04 | shares that sum to one |
# | `attention_context(probs, v)` | [05](../05_attention_output/README.md) | values mixed, heads joined |
# | `attention_output(context, o_proj, o_bias)` | 05 | back at (seq, hidden) |
# | `feed_forward(h, gate_proj, up_proj, down_proj)` | [06](../06_swiglu/README.md) | (seq, hidden) |
#
# After `h`, `qkv` takes q_proj, k_proj, v_proj, q_bias, k_bias, v_bias, q_norm, k_norm, head_dim and eps. A weight that
# a model does not have is None: `w.get("q_bias")`.
#
# ## The picture
#
# ![Size of the stream of one token after each addition of story's five blocks](fig/stream.svg)
#
# The picture follows *fox* through `story`. Each bar begins at the size of the stream before the addition and ends at
# the size after it, as root mean square on a logarithmic scale. The first feed-forward part makes the row 19 times as
# large, the last one almost 4 times. Sizes of rows do not add up, because the directions differ: in layer 2 the
# feed-forward part adds 0.93 to a row of 17.54 and gets 17.93.
#
# ## Exercise
#
# Write `block` in `l07_block.py`. The imports at its top are there already:
#
# ```python
# def block(x, w, cos, sin, past_k, past_v, head_dim, eps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
# ```
#
# ```
# llorch learn check 07
# llorch learn check 07 --chain
# llorch learn hint 07
# ```
#
# The first command runs all layers with your block. Your `rms_norm`, `rope` and so on run inside, because your file
# imports them. A mistake in one of them makes 07 fail, and the verdict names that mistake. The second command runs
# everything that you have written on its own results, from the embedding on. The first lesson that differs is the one
# to repair.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: block`, a wrong
# function `FAIL`, the right one `PASS` after 480 comparisons in 4 models.
#
# Then let your block write a story:
#
# ```
# llorch run story "Once upon a time there was a little fox" --impl .
# ```
#
# ## Run it
#
# Six tokens in one pass, on layer 0 of `micro-llama`. Then four tokens, and two more after the cache of the four:

# %%
import numpy as np

import llorch
from llorch.apps.learn.lessons import PARTS
from llorch.ops.rope import rope_tables

block = PARTS["block"].reference  # yours: from l07_block import block
micro, trace = llorch.load("micro-llama"), {}
micro.forward(micro.tokenizer.encode("Once upon a time")[:6], trace=trace)
x, layer = trace["embed"], {"w": micro.weights.layer(0), "head_dim": 32, "eps": 1e-5}
cos, sin = rope_tables(np.arange(6), head_dim=32, theta=1e4, scaling=None)
nothing = np.zeros((2, 0, 32), np.float32)
y, k, v = block(x=x, cos=cos, sin=sin, past_k=nothing, past_v=nothing, **layer)
print("stream", y.shape, " keys", k.shape, " as in the model:", np.allclose(y, trace["l0.block_out"], atol=1e-5))
first, k, v = block(x=x[:4], cos=cos[:4], sin=sin[:4], past_k=nothing, past_v=nothing, **layer)
second, k, v = block(x=x[4:], cos=cos[4:], sin=sin[4:], past_k=k, past_v=v, **layer)
print("in two passes, the same rows:", np.allclose(np.concatenate([first, second]), y, atol=1e-5))

# %% [markdown]
# ## A mistake to plant
#
# Add the result of attention to the normalised rows instead of the stream. It is one letter, shapes fit, and every part
# in it is right. Two more mistakes are of this kind: the second norm with the gain of the first, and queries and keys
# that are never rotated. `story` then writes:

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

story, wrong = llorch.load("story"), typed_mistakes(BY_NUMBER["07"])["block"]


def continued(**functions) -> str:
    with Implementation("this page", functions).installed():
        tokens = story.generate("Once upon a time there was a little fox", max_tokens=12)
        return "".join(token.text for token in tokens)


print("right            ", continued())
print("normalised rows  ", continued(block=wrong["attention-residual-from-normed"]))
print("gain of the other", continued(block=wrong["norm-gain-of-other-norm"]))
print("never rotated    ", continued(block=wrong["rope-missing"]))

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("07", block=wrong["attention-residual-from-normed"]))

# %% [markdown]
# The last text is a sentence. A model without positions still knows which words go together.
#
# From outside, a block shows only three things: its two caches and its output. So the diagnosis injects the known
# mistakes of all lessons up to here and looks for one that makes the same three arrays. You can search in the same way.
# The first wrong number is in the output of layer 0, so both caches of layer 0 were right. Then the first norm, the
# keys with their rotation and the values are right, too. Caches hold no queries: the mistake is in the queries or after
# the caches.
#
# ## Both engines
#
# - Both add the same two float32 numbers and get the same result. `block_out` carries the rounding of everything before
#   it.
# - In `story`, each engine's error against float64 hardly grows over five layers: in transformers from 3.5e-07 to
#   3.7e-07. Each addition brings new rounding and dilutes the one before.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

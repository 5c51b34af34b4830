# %% [markdown]
# # 05 attention_output
#
# 20 minutes, two functions of four and two lines.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# [04](../04_attention_scores/README.md) gave every token, in every head, a share for each token before it. The values
# lie in the cache next to the keys ([03](../03_kv_cache/README.md)) and are never rotated. Now the shares are applied
# to the values.
#
# ## Idea
#
# Each head takes its shares of the values: a weighted mean of rows, nothing else. If a head gives nearly all to one
# token, the result is nearly that token's value. In `story`, layer 1, head 1, *fox* gives *little* 99.5 %:

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
trace: dict[str, np.ndarray] = {}
story.forward(ids, trace=trace)
shares = trace["l1.attn_probs"][1, -1]
values = trace["l1.v_cache"][1 // 2]  # two query heads share a value head
mixed = shares @ values
print("shares", shares.shape, " values", values.shape, " mixed", mixed.shape)
print(f"from the value of 'little': {np.linalg.norm(mixed - values[8]) / np.linalg.norm(values[8]):.1%}")

# %% [markdown]
# So *fox* now carries something of *little*. Attention is the only path from token to token.
#
# The 8 heads give 8 such rows of 32 numbers. They are laid one after the other, 256 numbers. A matrix brings them
# back to the width of the stream, 192, and the result is added to the stream. This matrix decides *where in the
# stream* a head writes. Since it is linear, the sum can be taken apart again, head by head. The picture below does
# so.
#
# ## The maths
#
# ```math
# \begin{aligned}
# m_{t,a} &= \sum_c p_{a,t,c}\, v_{c,\lfloor a/g \rfloor} \\
# o_t &= [\,m_{t,0};\; m_{t,1};\; \ldots\,]\, W_o^\top, \qquad r_t = x_t + o_t
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $p$ | (heads, seq, ctx) | shares |
# | $v$ | (kv_heads, ctx, head_dim) | values of all tokens; $g$ query heads share one |
# | $m$ | (seq, heads, head_dim), joined (seq, q_width) | `attn_context` |
# | $W_o$ | (hidden, q_width) | `o_proj`, one row for each output |
# | $o$ | (seq, hidden) | `attn_out` |
# | $r$ | (seq, hidden) | `attn_residual`: the stream with attention added |
#
# The last sum belongs to the block. You write it in [07](../07_block/README.md).
#
# By hand: two keys have the values (2, 0) and (0, 4) and the shares 0.75 and 0.25. The mix is (1.5, 1). A second head
# with the values (8, 8) and (0, 0) and the same shares gives (6, 6). Joined, the token's row is (1.5, 1, 6, 6).
#
# ## The picture
#
# ![The contribution of each head of layer 4 to the stream of one token, and its part along the sum](fig/heads.svg)
#
# The picture shows the contribution of each head of `story`'s last layer for *fox*. The whole bar is the length of a
# head's contribution $m_a W_{o,a}^\top$. The solid part of the bar is the component along the sum of all heads. The
# word next to a bar is the one with the largest share in that head. The lengths add up to 445, but the sum of the
# eight contributions is only 206 long: heads push in different directions and partly undo each other. Head 7, which
# looks at *there*, contributes most. Two thirds of head 3 go sideways.
#
# ## Exercise
#
# Write both functions in `l05_attention_output.py`:
#
# ```python
# def attention_context(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
# def attention_output(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
# ```
#
# ```
# llorch learn check 05
# llorch learn hint 05          # a direction; once more for the formula, once more for the code
# ```
#
# To see the check fail, tile the values instead of repeating them, or join as (head_dim, heads). Then try a
# transposed `o_proj`: `context @ o_proj` raises an error in `micro-llama`. In `micro-qwen2`, where it is 96 by 96, it
# would not.
#
# ## Run it
#
# Here is the example from above, with two heads and one token:

# %%
from llorch.ops.attention import attention_context

probs = np.array([[[0.75, 0.25]], [[0.75, 0.25]]], np.float32)  # (heads, seq, ctx)
v = np.array([[[2, 0], [0, 4]], [[8, 8], [0, 0]]], np.float32)  # (kv_heads, ctx, head_dim)
print(attention_context(probs, v))

# %% [markdown]
# Next comes layer 0 of `micro-llama`, from the tensors that llama.cpp stored. The joined heads are 192 wide, the
# stream 96. In a test model whose widths all differ, a transposed matrix raises an error.

# %%
from llorch.judging.goldens.forward import read
from llorch.ops.linear import linear
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
o_proj = llorch.load("micro-llama").weights["layers.0.o_proj"]
probs, v = llamacpp["l0.attn_probs"], llamacpp["l0.v_cache"]
context = attention_context(probs, v)
out = linear(context, o_proj)
print("shares", probs.shape, " values", v.shape, " joined", context.shape, " out", out.shape)
print("llama.cpp's output, within 1e-5:", bool(np.abs(out - llamacpp["l0.attn_out"]).max() < 1e-5))

# %% [markdown]
#
# ## The mistake
#
# `probs @ v` has the shape (heads, seq, head_dim), and the result must be (seq, heads * head_dim). A reshape alone
# makes the right shape:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["05"])["attention_context"]["heads-joined-without-transpose"]
print(inspect.getsource(wrong))
for n in (1, 2, 12):
    right, actual = (function(probs[:, -n:], v) for function in (attention_context, wrong))
    print(f"{n:2} tokens at once: {np.mean(np.isclose(right, actual, atol=1e-5)):.0%} of the numbers right")

# %% [markdown]
# A reshape never moves a number in memory. Row 0 is filled with the first *tokens* of head 0 instead of the heads of
# token 0. With one token or one head, there is nothing to confuse. So neither a test with a single head nor a test
# that gives one token at a time sees the mistake. In the mistake of 04, the prompt was right and the later steps were
# wrong. Here the prompt is wrong, and every later step is right. But those steps read a cache that was filled
# wrongly.

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("05", attention_context=wrong))

# %% [markdown]
# The pattern line is worth a look: *the same numbers in another order*. It says that the arithmetic is right and an
# axis is wrong.

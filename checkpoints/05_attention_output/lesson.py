# %% [markdown]
# # 05 attention_output
#
# 20 minutes, two functions of four and two lines.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# [04](../04_attention_scores/README.md) gave every token, in every head, a share for each token before it. The values
# lie in the cache next to the keys ([03](../03_kv_cache/README.md)) and are never rotated. Now each head takes its
# shares of the values, and the heads are joined.
#
# ## Idea
#
# Each head takes a weighted mean of the values, nothing else. If a head gives nearly all to one token, the result is
# nearly that token's value. In `story`, layer 1, head 1, *fox* gives *little* 99.5 %:

# %%
import numpy as np

import llorch

story, trace = llorch.load("story"), {}
story.forward(story.tokenizer.encode("Once upon a time there was a little fox"), trace=trace)
mixed = trace["l1.attn_context"][-1, 32:64]  # of fox, numbers of head 1
little = trace["l1.v_cache"][0, 8]  # value of the token before fox; heads 0 and 1 share value head 0
print(f"distance from the value of 'little': {np.linalg.norm(mixed - little) / np.linalg.norm(little):.1%}")

# %% [markdown]
# So *fox* now carries something of *little*. Attention is the only path from token to token.
#
# The 8 heads give 8 such rows of 32 numbers. They are laid one after the other, 256 numbers. A matrix brings them back
# to the width of the stream, 192, and the result is added to the stream. This matrix decides *where in the stream* a
# head writes. Since it is linear, the sum can be taken apart again, head by head. The picture below does so.
#
# ## The maths
#
# ```math
# \begin{aligned}
# m_{t,a} &= \sum_c p_{a,t,c}\, v_{c,\lfloor a/g \rfloor} \\
# o_t &= [\,m_{t,0};\; m_{t,1};\; \ldots\,]\, W_o^\top
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $p$ | (heads, seq, ctx) | shares |
# | $v$ | (kv_heads, ctx, head_dim) | values of all tokens; $g$ query heads share one |
# | $m$ | (seq, heads, head_dim) | joined to (seq, heads * head_dim): `attn_context` |
# | $W_o$ | (hidden, heads * head_dim) | `o_proj`, one row for each output |
# | $o$ | (seq, hidden) | `attn_out`; [07](../07_block/README.md) adds it to the stream |
#
# By hand: two keys have the values (2, 0) and (0, 4) and the shares 0.75 and 0.25. The mix is (1.5, 1). A second head
# with the values (8, 8) and (0, 0) and the same shares gives (6, 6). Joined, the token's row is (1.5, 1, 6, 6).
#
# ## The picture
#
# ![The contribution of each head of layer 4 to the stream of one token, and its part along the sum](fig/heads.svg)
#
# The picture shows the contribution of each head of `story`'s last layer for *fox*. The whole bar is the length of a
# head's contribution. The solid part is the component along the sum of all heads. The word at a bar is the one with the
# largest share in that head. The lengths add up to 445, but the sum of the eight contributions is only 206 long: heads
# push in different directions and partly undo each other. Head 7, which looks at *there*, contributes most.
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
# llorch learn hint 05
# ```
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: attention_context,
# attention_output`. A wrong function says `FAIL`, and two right ones say `PASS` after 320 comparisons in 4 models.
#
# ## Run it
#
# Here is the example from above, with two heads and one token. Then the two functions run on layer 0 of `micro-llama`.
# The joined heads are 192 wide, the stream 96:

# %%
from llorch.apps.learn.lessons import PARTS

attention_context, attention_output = (PARTS[name].reference for name in ("attention_context", "attention_output"))
# yours: from l05_attention_output import attention_context, attention_output
probs = np.array([[[0.75, 0.25]], [[0.75, 0.25]]], np.float32)  # (heads, seq, ctx)
v = np.array([[[2, 0], [0, 4]], [[8, 8], [0, 0]]], np.float32)  # (kv_heads, ctx, head_dim)
print(attention_context(probs, v))

micro, trace = llorch.load("micro-llama"), {}
micro.forward(micro.tokenizer.encode("Once upon a time"), trace=trace)
context = attention_context(trace["l0.attn_probs"], trace["l0.v_cache"])
out = attention_output(context, micro.weights["layers.0.o_proj"], None)
print("joined", context.shape, " out", out.shape)
print("as in the model:", np.allclose(out, trace["l0.attn_out"], atol=1e-5))

# %% [markdown]
# ## A mistake to plant
#
# Shares times values is ordered (heads, seq, head_dim), and the result must be (seq, heads * head_dim). Reach that
# shape by a reshape alone:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["05"])["attention_context"]["heads-joined-without-transpose"]
probs, v = trace["l0.attn_probs"], trace["l0.v_cache"]
for n in (1, 2, 12):
    right, actual = (function(probs[:, -n:], v) for function in (attention_context, wrong))
    print(f"{n:2} tokens at once: {np.mean(np.isclose(right, actual, atol=1e-5)):.0%} of the numbers right")

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("05", attention_context=wrong))

# %% [markdown]
# A reshape never moves a number in memory. Row 0 is filled with the first *tokens* of head 0 instead of the heads of
# token 0. With one token or one head, there is nothing to confuse. So neither a test with a single head nor a test that
# gives one token at a time sees the mistake. With the mistake of 04, the prompt was right and the later steps were
# wrong. Here the prompt is wrong, and every later step is right. But those steps read a cache that was filled wrongly.
#
# The arithmetic is right and an axis is wrong: the same numbers stand in another order.
#
# ## Both engines
#
# - Each engine sums a product over 192 numbers in its own order, so nearly every number differs in its last bits: the
#   error is 1e-07 in llama.cpp and 2e-07 in transformers.
# - In the last layer, llama.cpp keeps only the rows of tokens whose logits are requested, from the addition on.
# - transformers has no module for the addition that follows. llorch reads the sum as the input of the next norm.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

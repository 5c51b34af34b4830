# %% [markdown]
# # 07 block
#
# 30 minutes, one function of ten lines, each a call of a function that exists.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# All pieces of a layer are ready. Now you put them together, and the result is the model: `story` is an embedding,
# this block five times with different weights, and a last product.
#
# On the fast track (00, 01, 01b, 07, 12), you have not written some of the pieces. This does not matter: an import
# from a lesson that you skipped gives llorch's function. The list below is all you need to know about them. `seq`
# counts the new tokens, `ctx` all tokens so far. There are fewer key and value heads (`kv_heads`) than query heads
# (`heads`).
#
# - `rms_norm(x, weight, eps)` ([01](../01_rms_norm/README.md)) brings every row to size 1 and multiplies by a gain.
#   It keeps the shape.
# - `qkv(h, q_proj, k_proj, v_proj, q_bias, k_bias, v_bias, q_norm, k_norm, head_dim, eps)`
#   ([02](../02_qkv/README.md)): three products that give each token a query, a key and a value for every head, each
#   (seq, heads or kv_heads, head_dim). A weight that a model does not have is None: `w.get("q_bias")`.
# - `rope(x, cos, sin)` ([01b](../01b_rope/README.md)) turns each head by the token's position and keeps the shape.
# - `append(past_k, past_v, k, v)` ([03](../03_kv_cache/README.md)) lays new keys and values after those of the tokens
#   before: two arrays (kv_heads, ctx, head_dim).
# - `attention_scores(q, k)` and `attention_probs(scores)` ([04](../04_attention_scores/README.md)) compare every query
#   with every key, hide the future, and make shares that sum to one: (heads, seq, ctx).
# - `attention_context(probs, v)` ([05](../05_attention_output/README.md)) takes that share of each value and joins the
#   heads: (seq, heads * head_dim).
# - `attention_output(context, o_proj, o_bias)` (also 05) brings them back to the width of the stream: (seq, hidden).
# - `feed_forward(h, gate_proj, up_proj, down_proj)` ([06](../06_swiglu/README.md)): widens, gates and narrows every
#   token alone: (seq, hidden).
#
# ## Idea
#
# A block has two halves of the same form. Each takes a copy of the stream, normalises it, computes with the copy, and
# *adds* the result to the stream. The first half is attention, in which tokens see each other. The second is the
# feed-forward part, in which each token is alone.
#
# ![The stream goes straight through the block; two branches read a normalised copy and add to it](fig/wiring.svg)
#
# The stream itself goes straight through. No norm and no matrix changes it: a block can only add. This is one main
# reason why deep models can be trained: the way from the last layer to the first is a sum, and a gradient passes a
# sum unchanged. It is also why the norm stands *in the branch*. Older models had it in the stream, after each sum.
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
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $x$ | (seq, hidden) | the stream in front of the block |
# | $w_1$, $w_2$ | (hidden,) | `attn_norm`, `ffn_norm`: two gains, one for each norm |
# | $r$ | (seq, hidden) | `attn_residual`, the stream between the halves |
# | $y$ | (seq, hidden) | `block_out`, the next block's $x$ |
#
# Inside attention the order is fixed too: project, (in Qwen3: normalise the heads), rotate queries and keys but not
# values, append to the cache, score, soften, mix, project back. The cache holds *rotated* keys, so that no key is
# turned twice.
#
# ## The picture
#
# ![Size of the stream of one token after each addition of story's five blocks](fig/stream.svg)
#
# The picture follows *fox* through `story`. Each bar begins at the size of the stream before the addition and ends at
# the size after it, as root mean square on a logarithmic scale. The first feed-forward part makes the row 19 times as
# large, the last one almost 4 times. No addition between them makes it larger by much more than a third.

# %%
import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
trace: dict[str, np.ndarray] = {}
story.forward(ids, trace=trace)


def rms(name: str) -> float:
    return float(np.sqrt(np.mean(trace[name][-1] ** 2)))


print(f"embedding {rms('embed'):.2f}")
for layer in range(5):
    names = ("attn_out", "attn_residual", "ffn_out", "block_out")
    a, r, f, y = (rms(f"l{layer}.{name}") for name in names)
    print(f"layer {layer}: attention adds {a:5.2f} -> {r:5.2f}, feed-forward adds {f:5.2f} -> {y:6.2f}")

# %% [markdown]
# In layer 2 the feed-forward part adds 0.93 to a row of 17.54 and gets 17.93. Sizes of rows do not add up, because
# the directions differ.
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
# llorch learn hint 07          # a direction; once more for the formula, once more for the code
# ```
#
# The first command feeds your block the embeddings and runs all layers with it. It runs your `rms_norm`, `rope` and
# so on inside, because your file imports them. A mistake in one of them makes 07 fail, and the verdict names that
# mistake.
#
# The second is the first *chained* check. Everything that you have written runs on its own results, from the
# embedding on. The first lesson that differs is the one to repair, and later lessons are not judged. The check names
# the functions that it borrows because you have not written them.
#
# Then let your block write a story:
#
# ```
# llorch run story "Once upon a time there was a little fox" --impl .
# ```
#
# ## Run it
#
# Here is the function with your signature, on layer 0 of `micro-llama`, from the embeddings that llama.cpp stored:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, PARTS
from llorch.judging.goldens.forward import read
from llorch.ops.rope import rope_tables
from llorch.runtime.builtin import goldens_folder

block = PARTS["block"].reference
micro = llorch.load("micro-llama")
config, w = micro.config, micro.weights.layer(0)
golden = read(goldens_folder() / "micro-llama")
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
x = llamacpp["embed"]
cos, sin = rope_tables(np.arange(len(x)), head_dim=config.head_dim, theta=config.rope_theta, scaling=None)
nothing = np.zeros((config.n_kv_heads, 0, config.head_dim), np.float32)
layer_arguments = {"w": w, "head_dim": config.head_dim, "eps": config.rms_norm_eps}
y, k, v = block(x=x, cos=cos, sin=sin, past_k=nothing, past_v=nothing, **layer_arguments)
print("stream", x.shape, "->", y.shape, " keys", nothing.shape, "->", k.shape)
print("llama.cpp's block_out, within 1e-5:", bool(np.abs(y - llamacpp["l0.block_out"]).max() < 1e-5))

# %% [markdown]
# These were twelve tokens at once. Next, seven tokens, and then five more after the cache of the seven:

# %%
first, k7, v7 = block(x=x[:7], cos=cos[:7], sin=sin[:7], past_k=nothing, past_v=nothing, **layer_arguments)
second, k12, v12 = block(x=x[7:], cos=cos[7:], sin=sin[7:], past_k=k7, past_v=v7, **layer_arguments)
print("caches", k7.shape, "then", k12.shape)
print("the same rows, within 1e-5:", bool(np.abs(np.concatenate([first, second]) - y).max() < 1e-5))

# %% [markdown]
#
# ## The mistake
#
# The mistake is one letter. The name `h` holds the normalised rows, and the addition takes it instead of `x`:

# %%
from llorch.apps.learn.lessons import typed_mistakes

typed = typed_mistakes(BY_NUMBER["07"])["block"]
wrong = typed["attention-residual-from-normed"]
print(wrong.__doc__)

# %% [markdown]
# Shapes fit, sizes look plausible, and every part in it is right. Two more mistakes are of this kind: the second norm
# with the gain of the first, and a missing line (queries and keys are never rotated). `story` then writes:

# %%
from llorch.apps.learn.choice import Implementation


def continued(**parts) -> str:
    with Implementation("this page", parts).installed():
        return "".join(token.text for token in story.generate("Once upon a time there was a little fox", max_tokens=12))


print("right           ", continued())
print("h for x         ", continued(block=wrong))
print("gain of the other", continued(block=typed["norm-gain-of-other-norm"]))
print("never rotated   ", continued(block=typed["rope-missing"]))

# %% [markdown]
# The last one writes a sentence. A model without positions still knows which words go together. This is the check's
# verdict on the first mistake:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("07", block=wrong))

# %% [markdown]
# From outside, a block shows only three things: its two caches and its output. Every line inside can be wrong. So the
# diagnosis injects the known mistakes of all lessons up to here and looks for one that makes the same three arrays.
# (`mistakes.py` in this folder holds 26 that a block can make.) Both caches of layer 0 were right, so the first norm,
# the projections and the rotation are right, and the mistake comes after them. You can search by hand in the same
# way.

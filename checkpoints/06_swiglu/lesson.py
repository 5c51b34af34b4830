# %% [markdown]
# # 06 swiglu
#
# 25 minutes, two functions of a line or two.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# Attention has added its result to the stream ([05](../05_attention_output/README.md)), and the second norm of the
# layer has brought the rows to size 1 ([01](../01_rms_norm/README.md)). Now comes the other half of every layer, the
# feed-forward part. It handles each token alone, so the order of the tokens does not matter.
#
# ## Idea
#
# The feed-forward part widens, gates and narrows. Two matrices make two wide rows of the token: `story` goes from 192
# to 448. One of them, `up`, holds values. The other, `gate`, says how much of each value passes. A third matrix brings
# the product back to 192.
#
# The gate is a curve called SiLU, $z \cdot \sigma(z)$: a ramp with a soft corner. Far below zero it is almost 0, far
# above zero it is almost $z$. In between it dips to -0.28, at $z = -1.28$.
#
# Each of the 448 inner channels can be read as a question ("is this about an animal?") and an answer. The answer is
# added to the stream if the question is answered with yes. Most are answered with no:

# %%
import numpy as np

import llorch

story, trace = llorch.load("story"), {}
story.forward(story.tokenizer.encode("Once upon a time there was a little fox"), trace=trace)
for layer in range(5):
    gate, inner = trace[f"l{layer}.ffn_gate"], trace[f"l{layer}.ffn_act"][-1]
    ten = np.sort(inner**2)[-10:].sum() / (inner**2).sum()
    print(f"layer {layer}: {np.mean(gate < 0):.0%} of the gates below zero, ten channels of fox hold {ten:.0%}")

# %% [markdown]
# The second number is the share of the squared length of the inner row, for the last word. In most layers ten of 448
# channels do nearly all of the work.
#
# Most of the weights of a layer sit in these three matrices: 258,048 in a layer of `story`, against 147,456 in
# attention.
#
# ## The maths
#
# ```math
# \begin{aligned}
# g &= h W_\mathrm{gate}^\top, \qquad u = h W_\mathrm{up}^\top \\
# a &= \frac{g}{1 + e^{-g}} \odot u, \qquad y = a\, W_\mathrm{down}^\top
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $h$ | (seq, hidden) | `ffn_norm`, the normalised stream |
# | $W_\mathrm{gate}, W_\mathrm{up}$ | (inter, hidden) | one row for each inner channel |
# | $g$, $u$, $a$ | (seq, inter) | gate, up, gated product |
# | $W_\mathrm{down}$ | (hidden, inter) | one row for each number of the stream |
# | $y$ | (seq, hidden) | output, added to the stream in [07](../07_block/README.md) |
#
# By hand: a gate of 2 has $2 / (1 + e^{-2}) = 1.762$, a gate of -3 has -0.142. With up = (5, 5) the inner row is (8.81,
# -0.71).
#
# None of the three matrices has a bias. $e^{-g}$ overflows below $g = -88$. Then $g / \infty$ is 0, which is the right
# limit.
#
# ## The picture
#
# ![SiLU, GELU and ReLU over the histogram of all gates of story](fig/curves.svg)
#
# The grey area shows the 22,400 gates of the ten words above. Two thirds of them are below zero. SiLU and GELU look
# like one curve at first sight and are 0.19 apart at $z = -2$, where many gates are.
#
# ## Exercise
#
# Write both functions in `l06_swiglu.py`:
#
# ```python
# def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
# def feed_forward(h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
# ```
#
# ```
# llorch learn check 06
# llorch learn hint 06
# ```
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: swiglu,
# feed_forward`. A wrong function says `FAIL`, and two right ones say `PASS` after 320 comparisons in 4 models.
#
# ## Run it

# %%
from llorch.apps.learn.lessons import PARTS

swiglu, feed_forward = PARTS["swiglu"].reference, PARTS["feed_forward"].reference
# yours: from l06_swiglu import feed_forward, swiglu
print(swiglu(np.array([[2, -3, -100]], np.float32), np.array([[5, 5, 5]], np.float32)).round(3))

micro, trace = llorch.load("micro-llama"), {}
micro.forward(micro.tokenizer.encode("Once upon a time"), trace=trace)
h, w = trace["l0.ffn_norm"], micro.weights.layer(0)
out = feed_forward(h, w["gate_proj"], w["up_proj"], w["down_proj"])
print("h", h.shape, " out", out.shape, " as in the model:", np.allclose(out, trace["l0.ffn_out"], atol=1e-5))

# %% [markdown]
# ## A mistake to plant
#
# Use another curve in place of SiLU: GELU, in the approximation with tanh that GPT-2 has. A port that starts from GPT-2
# may keep it. The third text is for comparison: its curve is ReLU, which is 0 below zero.

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["06"])["swiglu"]


def continued(**functions) -> str:
    with Implementation("this page", functions).installed():
        tokens = story.generate("Once upon a time there was a little fox", max_tokens=20)
        return "".join(token.text for token in tokens)


print("right", continued())
print("GELU ", continued(swiglu=wrong["swiglu-gelu-tanh"]))
print("ReLU ", continued(swiglu=wrong["swiglu-relu"]))

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("06", swiglu=wrong["swiglu-gelu-tanh"]))

# %% [markdown]
# Three curves give one text: every activation of the model is wrong, and 20 tokens in a row are the same. A reader of
# the text would call this port right. The numbers are off by 19 %. *Not the cause* shows that llorch tells close
# mistakes apart: the exact GELU explains a little less of the error than its approximation does.
#
# Another mistake: exchange gate and up in `feed_forward`. No error is raised, and the story ends in *the the the the*.
#
# ## Both engines
#
# - llama.cpp and transformers use different exponentials in float32 and add in another order. Gate and up differ from
#   float64 by 1e-07 in llama.cpp and by 3e-07 in transformers.
# - The product of gate and up carries the errors of both, so its error is larger: 2e-07 and 4e-07.
# - llama.cpp computes SiLU and the product in one step, so llorch compares the product and not the curve alone.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

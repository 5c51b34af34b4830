# %% [markdown]
# # 06 swiglu
#
# 25 minutes, two functions of a line or two.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# Attention has added its result to the stream ([05](../05_attention_output/README.md)), and the second norm of the
# layer has brought the rows to size 1 ([01](../01_rms_norm/README.md)). Now comes the other half of every layer, the
# feed-forward part. It handles each token alone, so the order of the tokens does not matter.
#
# ## Idea
#
# The feed-forward part widens, gates and narrows. Two matrices make two wide rows of the token: `story` goes from 192
# to 448. One of them, `up`, holds values. The other, `gate`, says how much of each value passes. A third matrix
# brings the product back to 192.
#
# The gate is a curve called SiLU, $z \cdot \sigma(z)$: a ramp with a soft corner. Far below zero it is almost 0, far
# above zero it is almost $z$. In between it dips to -0.28, at $z = -1.28$.
#
# Each of the 448 inner channels can be read as a question ("is this about an animal?") and an answer. The answer is
# added to the stream if the question is answered with yes. Most are answered with no:

# %%
import inspect

import numpy as np

import llorch

story = llorch.load("story")
ids = story.tokenizer.encode("Once upon a time there was a little fox")
trace: dict[str, np.ndarray] = {}
story.forward(ids, trace=trace)
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
# By hand: a gate of 2 has $2 / (1 + e^{-2}) = 1.762$, a gate of -3 has -0.142. With up = (5, 5) the inner row is
# (8.81, -0.71).
#
# None of the three matrices has a bias. $e^{-g}$ overflows below $g = -88$. Then $g / \infty$ is 0, which is the
# right limit.
#
# ## The picture
#
# ![SiLU, GELU and ReLU over the histogram of all gates of story](fig/curves.svg)
#
# The grey area shows the 22,400 gates of the ten words above. Two thirds of them are below zero. Apart from softmax
# and norms, these curves are the only part of the model that is not linear. SiLU and GELU look like one curve at
# first sight and are 0.19 apart at $z = -2$, where many gates are.
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
# llorch learn hint 06          # a direction; once more for the formula, once more for the code
# ```
#
# Then exchange gate and up in `feed_forward`. Both have the same shape, no error is raised, and the story ends in
# *the the the the*. The verdict names two mistakes, because SiLU on up and exchanged matrices make the same numbers.
#
# ## Run it

# %%
from llorch.ops.swiglu import swiglu

gate, up = np.array([[2, -3, -100]], np.float32), np.array([[5, 5, 5]], np.float32)
print(swiglu(gate, up).round(3))

# %% [markdown]
# Here is layer 0 of `micro-llama`, from the normalised rows that llama.cpp stored:

# %%
from llorch.judging.goldens.forward import read
from llorch.ops.linear import linear
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
w = llorch.load("micro-llama").weights.layer(0)
h = llamacpp["l0.ffn_norm"]
gate, up = linear(h, w["gate_proj"]), linear(h, w["up_proj"])
out = linear(swiglu(gate, up), w["down_proj"])
print("h", h.shape, " gate and up", gate.shape, " out", out.shape)
print("llama.cpp's output, within 1e-5:", bool(np.abs(out - llamacpp["l0.ffn_out"]).max() < 1e-5))

# %% [markdown]
#
# ## The mistake
#
# A port that starts from GPT-2 may keep its curve, GELU:

# %%
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["06"])["swiglu"]
wrong = typed["swiglu-gelu-tanh"]
print(inspect.getsource(wrong))


def continued(**parts) -> str:
    with Implementation("this page", parts).installed():
        return "".join(token.text for token in story.generate("Once upon a time there was a little fox", max_tokens=20))


print("right", continued())
print("GELU ", continued(swiglu=wrong))
print("ReLU ", continued(swiglu=typed["swiglu-relu"]))

# %% [markdown]
# Three curves give one text: every activation of the model is wrong, and 20 tokens in a row are the same. A reader of
# the text would call this port right. The numbers show the mistake:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("06", swiglu=wrong))

# %% [markdown]
# An error of 0.19, where 4.8e-07 is allowed. *Not the cause* shows that the library tells close mistakes apart: the
# exact GELU explains 99.88 % of the error, its tanh approximation all of it.

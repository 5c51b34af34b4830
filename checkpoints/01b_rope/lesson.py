# %% [markdown]
# # 01b rope
#
# 45 minutes, four short functions. Nobody gets the last one right at first sight.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# Attention is where tokens look at each other. Every token asks with a *query* and answers with a *key*. The dot
# product of one token's query and another token's key says how much the first looks at the second. Lesson
# [02](../02_qkv/README.md) shows how queries and keys are made. Here they are given, as arrays of shape (seq, heads,
# head_dim): each token has some heads, and each head is a vector. `micro-llama` has 6 query heads and 2 key heads of
# 32 numbers.
#
# A dot product knows nothing of word order. It could not tell "the fox saw the girl" from "the girl saw the fox".
# RoPE puts the position into queries and keys (`q_rope`, `k_rope`) before they meet. Values, the third thing that a
# token brings, are not touched.
#
# ## Idea
#
# Take the 32 numbers of a head as 16 pairs, and each pair as the hand of a clock. A token at position $p$ turns every
# hand by $p$ ticks. The 16 clocks run at different speeds. The first turns by one radian a tick and comes round after
# 6 tokens. The last needs 35,000 tokens.
#
# When two hands are turned and then compared, only the *difference* of their angles matters. So the score of a query
# and a key depends on the distance of the two tokens, and not on their place in the text.

# %%
import numpy as np

import llorch
from llorch.judging.goldens.forward import read
from llorch.ops.rope import rope, rope_tables
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
micro, trace = llorch.load("micro-llama"), {}
micro.forward(list(golden.cases["near"].ids), trace=trace)
q = trace["l0.q_proj"].reshape(12, 6, 32)
k = trace["l0.k_proj"].reshape(12, 2, 32)


def turned(head: np.ndarray, position: int) -> np.ndarray:
    cos, sin = rope_tables(np.array([position]), head_dim=32, theta=1e4, scaling=None)
    return rope(head[None, None, :], cos, sin)[0, 0]


for at_q, at_k in ((5, 2), (105, 102), (4005, 4002), (5, 4), (5, 0)):
    score = turned(q[5, 0], at_q) @ turned(k[2, 0], at_k)
    print(f"query at {at_q:4}  key at {at_k:4}  distance {at_q - at_k}  score {score:+.3f}")

# %% [markdown]
# Query and key are the same each time. At distance 3 the score is the same at every position. At another distance it
# differs.
#
# ## The maths
#
# ```math
# \begin{aligned}
# \alpha_{p,j} &= p \, \theta^{-2j/d}, \qquad j = 0 \ldots d/2 - 1 \\
# y_j &= x_j \cos \alpha_{p,j} - x_{j+d/2} \sin \alpha_{p,j} \\
# y_{j+d/2} &= x_{j+d/2} \cos \alpha_{p,j} + x_j \sin \alpha_{p,j}
# \end{aligned}
# ```
#
# $d$ is `head_dim`, $\theta$ is `rope_theta`, $p$ the absolute position. Scaling for longer contexts changes the
# frequencies $\theta^{-2j/d}$; YaRN multiplies cosine and sine by a constant as well.
#
# | symbol | shape | your function |
# | --- | --- | --- |
# | $\theta^{-2j/d}$ | (half,) | `frequencies`: radians per position, one for each pair |
# | the same, divided | (half,) | `scale_frequencies`: Llama 3 slows its long waves down |
# | $\cos \alpha, \sin \alpha$ | (seq, half) | `rope_tables`: one row a token, the same for all heads and layers |
# | $y$ | (seq, heads, head_dim) | `rope`: two multiplications and a sum for each number |
#
# The last two lines of the formula are a rotation of the point $(x_j, x_{j+d/2})$. Look at the indices: number $j$ is
# paired with number $j + d/2$, so 0 with 16, 1 with 17, and *not* with its neighbour.
#
# The scaling in one example. `micro-llama3` divides its 16 frequencies by

# %%
scaling = llorch.load("micro-llama3").config.rope_scaling
print(np.round(scaling.factors, 2))

# %% [markdown]
# Fast pairs stay as they are: they tell neighbours apart. Slow pairs are slowed down 8 times, so that a context 8
# times as long turns them no further than training did. One pair lies between the two.
#
# ## The picture
#
# ![Hands of four pairs at eight positions](fig/clocks.svg)
#
# The picture shows four of the 16 pairs of `micro-llama` at positions 0 to 7. At position 0 no hand has moved: RoPE
# does nothing to the first token, even if it is wrong.
#
# ## Exercise
#
# Four functions in `l01b_rope.py`. You can check each one while the others are missing: llorch's functions fill in.
#
# ```python
# def frequencies(head_dim: int, theta: float) -> np.ndarray: ...
# def scale_frequencies(inv_freq: np.ndarray, factors: np.ndarray) -> np.ndarray: ...
# def rope_tables(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
# def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray: ...
# ```
#
# ```
# llorch learn check 01b
# llorch learn hint 01b
# ```
#
# Your functions run in four models: bases 1e4, 5e5 and 1e6, heads of 16 and of 32 numbers, from position 0 and from
# position 4000, and in passes that go on after a cache. Break it on purpose: use `positions + 1` (the scores stay the
# same to the last digit, see above; the check still finds it), or start counting at 0 in every pass.
#
# ## Run it
#
# A rotation moves a hand and keeps its length. So there are two cheap checks. Here they are on the real queries of 12
# tokens:

# %%
cos, sin = rope_tables(np.arange(12), head_dim=32, theta=1e4, scaling=None)
y = rope(q, cos, sin)
print("position 0 unchanged:", np.array_equal(y[0], q[0]))
length_ratios = np.linalg.norm(y, axis=-1) / np.linalg.norm(q, axis=-1)
print("lengths kept:        ", bool(np.all(np.abs(length_ratios - 1) < 1e-6)))

# %% [markdown]
# A right RoPE passes both. The most common wrong one passes both, too.
#
# ## The mistake
#
# The paper pairs neighbours, (0, 1), (2, 3) and so on, and so does llama.cpp for the Llama family, after it has put
# the rows into another order. The weights as llorch reads them pair the first half with the second half:

# %%
import inspect

from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["01b"])["rope"]["rope-interleaved-pairs"]
print(inspect.getsource(wrong))
bad = wrong(q, cos, sin)
print("position 0 unchanged:", np.array_equal(bad[0], q[0]))
length_ratios = np.linalg.norm(bad, axis=-1) / np.linalg.norm(q, axis=-1)
print("lengths kept:        ", bool(np.all(np.abs(length_ratios - 1) < 1e-6)))
print("right numbers:       ", f"{np.mean(np.isclose(bad, y, rtol=1e-5)):.0%}, which is token 0 of 12")

# %% [markdown]
# It is easy to miss. One port of Qwen2 was reviewed five times with this in it: the angles were right, and position 0
# was. In [llama2.c](https://github.com/karpathy/llama2.c/pull/286) the text stayed readable for some 20 tokens. A
# comparison with two engines, number by number, finds it:

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("01b", rope=wrong))

# %% [markdown]
# Read the pattern first: *token 0 right, all others wrong*. Such a mistake depends on the position. "Still right"
# says that the lengths are right, so it is some rotation. The diagnosis is tested, not guessed: the known mistake,
# injected into llorch's code, makes the same wrong numbers.
#
# ![Where the wrong pairing is wrong: positions by numbers of a head](fig/wrong_pairs.svg)
#
# The picture shows the error of each number of head 0 of the queries, by position. The first line has no error. The
# last numbers have almost none, because their hands are slow with either partner.

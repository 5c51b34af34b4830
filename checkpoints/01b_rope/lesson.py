# %% [markdown]
# # 01b rope
#
# 45 minutes, four short functions. Nobody gets the last one right at first sight. (On the 90-minute route, write only
# `rope`.)
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# In attention, tokens look at each other: each token asks with a *query* and answers with a *key*, and the dot product
# of a query and a key says how much the first token looks at the second. Both are arrays of shape (seq, heads,
# head_dim): each token has some heads, and each head is a vector. [02](../02_qkv/README.md) makes them, and RoPE comes
# first because it needs nothing but their shape.
#
# ## Idea
#
# A dot product knows nothing of word order. It could not tell "the fox saw the girl" from "the girl saw the fox". So
# RoPE puts the position into queries and keys before they meet.
#
# Take the 32 numbers of a head as 16 pairs, and each pair as the hand of a clock. A token at position $p$ turns every
# hand by $p$ ticks. The 16 clocks run at different speeds. The first turns by one radian a tick and comes round after 6
# tokens. The last needs 35,000 tokens.
#
# When two hands are turned and then compared, only the *difference* of their angles matters. So the score of a query
# and a key depends on the distance of the two tokens, and not on their place in the text:

# %%
import numpy as np

import llorch
from llorch.apps.learn.lessons import PARTS

frequencies, rope_tables, rope = (PARTS[name].reference for name in ("frequencies", "rope_tables", "rope"))
# later yours: from l01b_rope import frequencies, rope, rope_tables
micro, trace = llorch.load("micro-llama"), {}
micro.forward(micro.tokenizer.encode("Once upon a time"), trace=trace)
query, key = trace["l0.q_proj"][5, :32], trace["l0.k_proj"][2, :32]  # head 0 of two tokens


def turned(head: np.ndarray, position: int) -> np.ndarray:
    cos, sin = rope_tables(np.array([position]), frequencies(32, 1e4))
    return rope(head[None, None, :], cos, sin)[0, 0]


for query_at, key_at in ((5, 2), (105, 102), (4005, 4002), (5, 4), (5, 0)):
    score = turned(query, query_at) @ turned(key, key_at)
    print(f"query at {query_at:4}  key at {key_at:4}  distance {query_at - key_at}  score {score:+.3f}")

# %% [markdown]
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
# $d$ is `head_dim`, $\theta$ is `rope_theta`, $p$ the absolute position.
#
# | symbol | shape | your function |
# | --- | --- | --- |
# | $\theta^{-2j/d}$ | (half,) | `frequencies`: radians per position, one for each pair |
# | the same, divided | (half,) | `scale_frequencies`: only in models with a longer context |
# | $\cos \alpha, \sin \alpha$ | (seq, half) | `rope_tables`: one row a token, the same for all heads and layers |
# | $y$ | (seq, heads, head_dim) | `rope`: two multiplications and a sum for each number |
#
# The last two lines of the formula are a rotation of the point $(x_j, x_{j+d/2})$. Look at the indices: number $j$ is
# paired with number $j + d/2$, so 0 with 16, 1 with 17, and *not* with its neighbour.
#
# An example of scaling: `micro-llama3` divides its 16 frequencies by 1 (eight times), 2.69, and 8 (seven times). Fast
# pairs stay as they are: they tell neighbours apart. Slow pairs are slowed down, so that a context 8 times as long
# turns them no further than training did.
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
# Write four functions in `l01b_rope.py`. You can check each one while the others are missing: llorch's functions fill
# in.
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
# The check runs heads of 16 and of 32 numbers, bases from 1e4 to 1e6, positions from 0 and from 4000, and passes that
# continue a cache.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: frequencies,
# scale_frequencies, rope_tables, rope`. With `rope` alone the list is one name shorter. A wrong function says `FAIL`,
# and four right ones say `PASS` after 1,280 comparisons in 4 models.
#
# ## Run it
#
# A rotation moves a hand and keeps its length. So there are two cheap checks. Take the first cell of this page with it,
# and import your functions there:


# %%
def check_cheaply(turn) -> None:
    q = np.random.default_rng(0).normal(size=(12, 6, 32)).astype(np.float32)
    cos, sin = rope_tables(np.arange(12), frequencies(32, 1e4))
    y = turn(q, cos, sin)
    print("position 0 unchanged:", np.array_equal(y[0], q[0]))
    print("lengths kept:        ", np.allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(q, axis=-1)))


check_cheaply(rope)

# %% [markdown]
# ## A mistake to plant
#
# Turn neighbours as pairs, (0, 1), (2, 3) and so on. The paper does it, and so do many ports. It passes both cheap
# checks:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["01b"])["rope"]["rope-interleaved-pairs"]
check_cheaply(wrong)

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("01b", rope=wrong))

# %% [markdown]
# Read the pattern first: *token 0 right, all others wrong*. Such a mistake depends on the position. *Still right* says
# that the lengths are right, so it is some rotation.
#
# ![Where the wrong pairing is wrong: positions by numbers of a head](fig/wrong_pairs.svg)
#
# The picture shows the error of each number of one head, by position. The last numbers are nearly right, because their
# hands are slow with either partner. One port of Qwen2 was reviewed five times with this mistake in it. In
# [llama2.c](https://github.com/karpathy/llama2.c/pull/286) the text stayed readable for some 20 tokens.
#
# ## Both engines
#
# - transformers always pairs $(j, j + d/2)$. llama.cpp pairs neighbours for the Llama family, whose GGUF files hold the
#   rows of q and k in an order that fits, and $(j, j + d/2)$ for Qwen. Both get the same scores.
# - Both keep angles in float32, where the neighbours of 4000 are 2.4e-04 apart. So near position 4000 the fast pairs of
#   both engines are off by up to 7e-05. Your angles are float64.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

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
# ## The reference
#
# <!-- source: llorch.ops.rope.frequencies -->
#
# <!-- source: llorch.ops.rope.rope -->
#
# The tables are made once a pass, in float64, and all layers use them:
#
# <!-- source: llorch.ops.rope.rope_tables -->
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
# ## Where the engines differ
#
# Near the beginning the engines agree up to rounding. From position 4000 on they do not, and the pairs show why:

# %%
pairs = (0, 1, 2, 4, 8, 15)
print("error by pair " + "".join(f"{j:>9}" for j in pairs))
for case in ("near", "far"):
    reference = golden.reference.engine_output.traces[case]["l0.q_rope"].reshape(-1, 2, 16)  # two halves of every head
    for name in ("llamacpp", "transformers"):
        actual = golden.engine_outputs[name].traces[case]["l0.q_rope"].reshape(-1, 2, 16)
        error = np.sqrt(((actual - reference) ** 2).sum((0, 1)) / (reference**2).sum((0, 1)))
        print(f"{case:4} {name:12}" + "".join(f"  {error[j]:.0e}" for j in pairs))

# %% [markdown]
# Both engines keep angles in float32, where the neighbours of 4000 are 2.4e-4 apart: an angle there can be wrong by
# 1e-4 and the cosine with it. Slow pairs have small angles and lose little. Pair 0 loses nothing at all: its
# frequency is exactly 1, so its angle is a whole number. Therefore `rope_tables` returns float64, and the tolerance
# is 4.9e-04 for `far` and 1.0e-06 for `near`.
#
# - **Pairs.** transformers always pairs `(j, j + d/2)`. llama.cpp pairs `(2j, 2j + 1)` for the Llama family, whose
#   GGUF files have their q and k rows reordered to fit, and `(j, j + d/2)` for Qwen2 and Qwen3, whose rows are left
#   alone. Traces are in the order of transformers. llorch restores this order for the Llama family on `q_proj`,
#   `k_proj`, `q_rope`, `k_rope` and `k_cache`. Scores and all later stages do not depend on the order.
# - **Angles.** llama.cpp multiplies a float32 angle from pair to pair by a constant. transformers multiplies the
#   position by a float32 frequency. From 2048 to 4096 neighbouring float32 numbers are 2.4e-4 apart, so fast pairs
#   can be off by some 1e-4, and the `far` lines show it. llorch's angles are float64, and the rotated numbers are
#   rounded once.
# - **llama3 scaling.** A GGUF file holds one divisor per frequency (`rope_freqs.weight`), which llama.cpp reads.
#   transformers computes the divisors from `config.json`. For a GGUF file, llorch tells it the published factor that
#   gives the divisors of the file. If no such factor exists, llorch divides the frequencies by the divisors of the
#   file.
# - **Names.** `Qcur-{i}` stands for up to four nodes of llama.cpp: the product, the sum with the bias, a reshape, the
#   rotated heads. The stage is the one with operation ROPE.
#
# Further reading:
#
# - Su and others, [RoFormer: Enhanced Transformer with Rotary Position Embedding](https://arxiv.org/abs/2104.09864),
#   2021: section 3.4.2 has the formula with neighbours as pairs.
# - `rotate_half` and `apply_rotary_pos_emb` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py)):
#   the same rotation with halves as pairs.
# - Peng and others, [YaRN](https://arxiv.org/abs/2309.00071), 2023: what scaling the frequencies does to a model.
# - [llama.cpp 22611](https://github.com/ggml-org/llama.cpp/pull/22611): rows not reordered on one path of a
#   converter; perplexity 4419 instead of 44.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# `near` starts at position 0, where RoPE does nothing, so most mistakes show only from the second token on. `far`
# starts at position 4000, or as late as the context of the model allows. There the frequency scaling and the
# precision of the angles show. `micro-llama3` has llama3 scaling. No built-in model has linear or YaRN scaling:
# [`tests/judging/test_rope_against_transformers.py`](../../tests/judging/test_rope_against_transformers.py) compares
# their frequencies and tables with those of transformers.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../README.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_01b                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

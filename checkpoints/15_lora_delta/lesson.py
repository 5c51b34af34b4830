# %% [markdown]
# # 15 lora_delta
#
# 25 minutes, two short functions. Training begins here: with what is to be trained.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# The forward pass stands: ids in, logits out, and every matrix in it is frozen. Now `story` shall learn to talk like a
# pirate. One could train all of its numbers. LoRA trains 7 % as many, in a file of its own, and leaves the model as
# it is: beside a matrix stands a narrow detour, and only the detour learns.
#
# ## Idea
#
# The matrices of `story` are between 128 x 192 and 448 x 192 large. The detour goes through a waist: down to $r$
# numbers per token, up again, and what comes out is added to what the matrix made. $r$ is the *rank*; 8 is usual.

# %%
import inspect

import numpy as np

import llorch
from llorch.lora.config import LoraConfig

story = llorch.load("story")
targets = LoraConfig(r=8).targets(story.config)
frozen = sum(t.n_out * t.n_in for t in targets.values())
trained = sum(8 * (t.n_out + t.n_in) for t in targets.values())
print(f"{len(targets)} matrices, {frozen:,} frozen numbers; {trained:,} trained: {100 * trained / frozen:.1f} %")

# %% [markdown]
# For a model of 7 billion numbers the same rank is 0.3 %. That is what makes fine-tuning fit on one card: a trained
# number costs four (itself, its gradient, two moments of Adam), a frozen one costs one, and may even be quantised.
#
# Why would so narrow a detour do? Because what a task changes in a matrix seems to be of low rank: the authors found 1
# to 8 enough where 12,288 was possible. It is an observation, not a theorem.
#
# ## The maths
#
# ```math
# \begin{aligned}
# y &= W x + s\,B\,A\,x, \qquad A \in \mathbb{R}^{r \times \mathrm{in}},\; B \in \mathbb{R}^{\mathrm{out} \times r} \\
# s &= \frac{\alpha}{r} \quad\text{or, rank-stabilised,}\quad \frac{\alpha}{\sqrt{r}}
# \end{aligned}
# ```
#
# | symbol | shape | what it is |
# | --- | --- | --- |
# | $x$ | (seq, in) | what goes into the matrix |
# | $W$ | (out, in) | frozen |
# | $A$ | (r, in) | the way down: random when training starts |
# | $B$ | (out, r) | the way up: zero when training starts, so that the model begins as it was |
# | $s$ | a number | the scale; $\alpha$ is chosen once, so that $r$ can be changed without a new learning rate |
#
# An adapter may give some matrices a rank or an $\alpha$ of their own (`rank_pattern`, `alpha_pattern`). Then $s$
# differs from matrix to matrix, and who reads the configuration carelessly is wrong in some of them only.
#
# ## The picture
#
# ![Singular values of a matrix and of what its adapter adds](fig/rank.svg)
#
# Singular values say how strongly a matrix acts along each of its directions. $W$ (grey, the `q_proj` of layer 0 in
# `micro-llama`) acts along all 96. What the adapter adds acts along 2 of them, and along no other. All that training
# can ever do is to turn and stretch these two.
#
# ## The reference
#
# <!-- source: llorch.ops.lora.lora_delta -->
#
# <!-- source: llorch.lora.config.LoraConfig.scaling_of -->
#
# ## Run it
#
# The adapter of the goldens, beside four of the seven matrices of layer 0. Ranks and alphas are all different, on
# purpose:

# %%
from llorch.ops.lora import lora_delta
from llorch.verify.training.claims import stored
from llorch.verify.training.places import INPUT_OF, at

weights, golden = stored("micro-llama")
adapter = golden.adapter_for(weights.config)
for name in ("q_proj", "k_proj", "v_proj", "down_proj"):
    full, target = f"layers.0.{name}", adapter.targets[f"layers.0.{name}"]
    x, lora = golden.shown(at(INPUT_OF[name], 0)), adapter.tensors[full]
    delta = lora_delta(x, lora.lora_A, lora.lora_B, scaling=adapter.scaling(full))
    off = np.abs(delta - golden.shown(at("lora_delta", 0, name))).max()
    alpha, r = adapter.config.alpha_of(target), adapter.config.rank_of(target)
    print(f"{name:9} {x.shape} -> {delta.shape}   s = {alpha} / {r} = {alpha / r:.3f}   from PEFT ~{off:.0e}")

# %% [markdown]
# The detour never makes $BA$. For 2 rows of the batch, 17 tokens in all, the two products cost 17 * 2 * (96 + 192) =
# 9,792 multiplications; making $BA$ costs 36,864 before the first token is looked at, and the result is as large as
# $W$.
#
# ## The mistake
#
# The first mistake is made by whoever tests: an adapter fresh from initialisation has $B = 0$. Whatever is wrong,
# the product is 0, and every engine agrees.

# %%
from llorch.learn.lessons import BY_NUMBER
from llorch.learn.materials import typed_mistakes

lora, s = adapter.tensors["layers.0.q_proj"], adapter.scaling("layers.0.q_proj")
x = golden.shown(at("attn_norm", 0))
for name, wrong in typed_mistakes(BY_NUMBER["15"])["lora_delta"].items():
    off = [np.abs(wrong(x, lora.lora_A, B, s) - lora_delta(x, lora.lora_A, B, scaling=s)).max()
           for B in (0 * lora.lora_B, lora.lora_B)]  # fmt: skip
    if "dropout" not in name:
        print(f"{name:20} B = 0: {off[0]:.1f}   B of the golden: {off[1]:.2f}")

# %% [markdown]
# So in the goldens neither factor is zero. Here is one of them put into the running model, in the place of ours. $A$
# has shape (r, in) in PEFT and (in, r) in MLX; somebody met the shape error and reached for `reshape`:

# %%
from llorch.learn.check import check_functions

wrong = typed_mistakes(BY_NUMBER["15"])["lora_delta"]["lora-a-transposed"]
print(inspect.getsource(wrong))
print(check_functions("15", lora_delta=wrong))

# %% [markdown]
# It runs, it trains, its loss goes down: training simply learns in the wrong order of numbers. It falls apart on the
# day the adapter is loaded somewhere else.
#
# ## Exercise
#
# Write both functions in `l15_lora_delta.py`:
#
# ```python
# def lora_scaling(r, lora_alpha, own_r, own_alpha, use_rslora) -> float:
# def lora_delta(x, lora_A, lora_B, scaling) -> np.ndarray:
# ```
#
# ```
# llorch learn check 15
# llorch learn hint 15
# llorch learn check 15 --chain      # with all that you have written so far, logits too
# ```
#
# The quick check feeds every matrix PEFT's own input, with $\alpha / r$ and rank-stabilised. To see it work, leave
# `own_alpha` out: vLLM's loader overlooks it too, and serves such an adapter with the wrong strength, without a word.
#
# ## Where the engines differ
#
# Three products, and nobody says where the scale belongs. How far each is from PEFT in float64, at `v_proj` of layer 0:

# %%
lora, s = adapter.tensors["layers.0.v_proj"], adapter.scaling("layers.0.v_proj")
place = at("lora_delta", 0, "v_proj")
truth, f32 = golden.truth("isolated", place), np.float32(s)
orders = {
    "after both (PEFT)": golden.shown(place),
    "between them (our torch path)": (x @ lora.lora_A.T * f32) @ lora.lora_B.T,
    "in float64, rounded once (ours)": lora_delta(x, lora.lora_A, lora.lora_B, scaling=s),
}
for name, got in orders.items():
    print(f"{name:33} ~{np.linalg.norm(got - truth) / np.linalg.norm(truth):.0e}")

# %% [markdown]
# - PEFT multiplies after `lora_B`, we after both products, torch of ours between them: three orders of the same
#   factors, all right; the limit is 7.9e-07.
# - Adapters stay float32 on a bfloat16 base in PEFT and here; the sum is rounded to the dtype of the base. How far both
#   are off then, at this checkpoint and the next, is on page [17](../17_gradients/README.md#in-bfloat16).
# - PEFT adds nothing to what a merged layer makes, and says nothing of it.
#
# Further reading:
#
# - Hu et al., [LoRA: Low-Rank Adaptation of Large Language Models](https://arxiv.org/abs/2106.09685), 2021: section 4.1
#   is this page, section 7 asks how low the rank may be.
# - Kalajdzievski, [A Rank Stabilization Scaling Factor](https://arxiv.org/abs/2312.03732), 2023: why the root of $r$.
# - `LoraLayer` and `Linear.forward` in PEFT
#   ([layer.py](https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py)).
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## What is compared
#
# Ranks are 2, 3 or 4 and alphas 1.4 to 6, by patterns, so that no two kinds of matrix share a scale; `v_proj` of
# layer 1 has a rank of its own. The batch has two rows of different lengths. Isolated, each matrix gets PEFT's own
# input. The case `rslora` is the same adapter with `use_rslora`. `adapted_logits` is the forward pass with all deltas
# in it.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../README.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# Each is a function of ours, replaced in the running code by `pytest -k teeth`, which wants this checkpoint red
# first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_15                   # the comparison, and every mistake of this page planted
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# ```

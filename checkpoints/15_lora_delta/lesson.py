# %% [markdown]
# # 15 lora_delta
#
# 25 minutes, two short functions. Training begins here, with the numbers that are trained.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# The forward pass is complete: ids in, logits out, and every matrix in it is frozen. Now `story` will learn to talk
# like a pirate. You could train all of its numbers. LoRA trains a separate set of numbers, 7 % as many, stores them
# in a separate file, and does not change the model. Each matrix gets a narrow detour, and only the detour learns.
#
# ## Idea
#
# The matrices of `story` are between 128 x 192 and 448 x 192 large. The detour is narrow in the middle: it goes down
# to $r$ numbers per token and up again. Its output is added to the output of the matrix. $r$ is the *rank*; 8 is
# usual.

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
# In a model of 7 billion numbers, an adapter of the same rank has 0.3 % as many. This lets fine-tuning fit on one
# GPU. Each trained number needs the memory of four numbers (itself, its gradient, two moments of Adam). A frozen
# number needs the memory of one, and may even be quantised.
#
# Why is so narrow a detour enough? A task seems to change a matrix by a low rank: the authors found that 1 to 8 was
# enough, out of a possible 12,288. This is an observation, not a theorem.
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
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $x$ | (seq, in) | input of the matrix |
# | $W$ | (out, in) | frozen |
# | $A$ | (r, in) | the way down: random when training starts |
# | $B$ | (out, r) | the way up: zero when training starts, so that the model begins as it was |
# | $s$ | a number | the scale; $\alpha$ is chosen once, so that $r$ can be changed without a new learning rate |
#
# An adapter may give some matrices another rank or another $\alpha$ (`rank_pattern`, `alpha_pattern`). Then $s$
# differs from matrix to matrix, and a loader that ignores these settings is wrong in only some matrices.
#
# ## The picture
#
# ![Singular values of a matrix and of its adapter](fig/rank.svg)
#
# Singular values say how strongly a matrix acts along each of its directions. $W$ (grey, the `q_proj` of layer 0 in
# `micro-llama`) acts along all 96. The adapter acts along only 2 of them. Training can only turn and stretch these
# two.
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
# The quick check gives every matrix PEFT's input, with $\alpha / r$ and rank-stabilised. To see the check fail, leave
# `own_alpha` out. vLLM's loader ignores it too, and serves such an adapter with the wrong strength, without a
# warning.
#
# ## Run it
#
# This is the adapter of the goldens, for four of the seven matrices of layer 0. Ranks and alphas are all different,
# on purpose:

# %%
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import INPUT_OF, at
from llorch.ops.lora import lora_delta

weights, golden = stored("micro-llama")
adapter = golden.adapter_for(weights.config)
for name in ("q_proj", "k_proj", "v_proj", "down_proj"):
    full, target = f"layers.0.{name}", adapter.targets[f"layers.0.{name}"]
    x, lora = golden.shown(at(INPUT_OF[name], 0)), adapter.tensors[full]
    delta = lora_delta(x, lora.lora_A, lora.lora_B, scaling=adapter.scaling(full))
    difference = np.abs(delta - golden.shown(at("lora_delta", 0, name))).max()
    alpha, r = adapter.config.alpha_of(target), adapter.config.rank_of(target)
    print(f"{name:9} {x.shape} -> {delta.shape}   s = {alpha} / {r} = {alpha / r:.3f}   from PEFT ~{difference:.0e}")

# %% [markdown]
# The detour never makes $BA$. For 2 rows of the batch, 17 tokens in all, the two products cost 17 * 2 * (96 + 192) =
# 9,792 multiplications. $BA$ alone costs 36,864, before the first token, and is as large as $W$.
#
# ## The mistake
#
# The first mistake is one of testing: a newly initialised adapter has $B = 0$. Then the product is 0, right or wrong,
# and every engine agrees.

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

lora, s = adapter.tensors["layers.0.q_proj"], adapter.scaling("layers.0.q_proj")
x = golden.shown(at("attn_norm", 0))
for name, wrong in typed_mistakes(BY_NUMBER["15"])["lora_delta"].items():
    differences = [np.abs(wrong(x, lora.lora_A, B, s) - lora_delta(x, lora.lora_A, B, scaling=s)).max()
                   for B in (0 * lora.lora_B, lora.lora_B)]  # fmt: skip
    if "dropout" not in name:
        print(f"{name:20} B = 0: {differences[0]:.1f}   B of the golden: {differences[1]:.2f}")

# %% [markdown]
# So in the goldens neither factor is zero. The second mistake is one of a port. The code below runs it in the model,
# in place of llorch's function. $A$ has shape (r, in) in PEFT and (in, r) in MLX. A port met the shape error and used
# `reshape`:

# %%
from llorch.apps.learn.check import check_functions

wrong = typed_mistakes(BY_NUMBER["15"])["lora_delta"]["lora-a-transposed"]
print(inspect.getsource(wrong))
print(check_functions("15", lora_delta=wrong))

# %% [markdown]
# It runs, it trains, and its loss goes down, since training adapts to the wrong order of numbers. It fails when
# another program loads the adapter.

# %% [markdown]
# # 06b experts
#
# 35 minutes, four functions of one to six lines. It is optional: no later lesson needs it. Dense models have no
# experts.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# A mixture of experts takes the place of the feed-forward part of [06](../06_swiglu/README.md). It has many small
# feed-forward parts, the experts, and gives each token to a few of them.
#
# ## Idea
#
# Three quarters of a dense model's weights lie in its feed-forward parts, and every token is multiplied by all of
# them. A mixture stores many experts and uses few for each token: Qwen3-30B-A3B has 128 experts in each layer and
# gives a token to 8. The whole model has to be in memory, but a token reads a tenth of it.
#
# Who decides? A *router*: one matrix with a row for each expert. Its product with the token, through a softmax, is a
# probability for each expert. The k largest win, and their outputs are added by weight. The other experts are not
# computed at all. `micro-qwen3-moe` does it on a small scale:

# %%
import inspect

import numpy as np

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

model, golden = llorch.load("micro-qwen3-moe"), read(goldens_folder() / "micro-qwen3-moe")
config, ids = model.config, golden.cases["near"].ids
trace: dict[str, np.ndarray] = {}
model.forward(ids, trace=trace)
print(f"{config.experts.n_experts} experts, {config.experts.n_experts_per_token} for each token, {len(ids)} tokens")
for layer in range(config.n_layers):
    used = np.bincount(trace[f"l{layer}.topk_ids"].ravel(), minlength=config.experts.n_experts)
    print(f"layer {layer}: tokens that each expert was given", used)

# %% [markdown]
# Some models add a *shared* expert that every token gets. In Qwen's models, a sigmoid says how much of it is added.
#
# ## The maths
#
# ```math
# \begin{aligned}
# p &= \mathrm{softmax}(h W_r^\top), \qquad e_1 \ldots e_k = \text{the experts with the largest } p \\
# w_j &= p_{e_j} \quad\text{or}\quad \frac{p_{e_j}}{\sum_i p_{e_i}} \\
# y &= \sum_j w_j\, \mathrm{FFN}_{e_j}(h) + \sigma(h \cdot u)\, \mathrm{FFN}_\mathrm{shared}(h)
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $h$ | (seq, hidden) | `ffn_norm` |
# | $W_r$ | (experts, hidden) | the router |
# | $p$ | (seq, experts) | `router_probs`, over *all* experts |
# | $e$, $w$ | (seq, topk) | `topk_ids`, `topk_weights` |
# | $\mathrm{FFN}_e$ | (seq, topk, hidden) | `expert_out`, the part of lesson 06 with the matrices of expert $e$ |
# | $u$ | (hidden) | the shared expert's gate, if there is one |
#
# The setting `norm_topk_prob` says whether the weights are divided by their sum. It is the trap of this lesson.
#
# ## The picture
#
# ![The experts of each token of a prompt, with their weights](fig/chosen.svg)
#
# The picture has one column for each of the first 24 tokens and one row for each expert. A darker cell is a larger
# weight. No expert is idle. All weights are near a third, because the router of so small a model was trained for only
# a minute.
#
# ## Exercise
#
# Write the four functions in `l06b_experts.py`:
#
# ```python
# def top_k(scores: np.ndarray, k: int) -> np.ndarray:
# def topk_weights(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
# def expert_outputs(h, ids, gate_proj, up_proj, down_proj) -> np.ndarray:
# def mixed(outs, weights, shared, gate) -> np.ndarray:
# ```
#
# ```
# llorch learn check 06b
# llorch learn hint 06b         # a direction; once more for the formula, once more for the code
# ```
#
# ## Run it
#
# The choice is not continuous: a change of one bit in a logit can swap two experts. So llorch judges it as a *set*.
# If two sets differ, llorch looks at the last expert that was chosen and the first that was not. Rounding decided
# only if their logits are very close:

# %%
layer = "l0."
reference = golden.reference.engine_output.traces["near"]
margins = np.sort(reference[layer + "router_logits"], axis=-1)[:, ::-1]
k = config.experts.n_experts_per_token
gaps = margins[:, k - 1] - margins[:, k]
llamacpp = golden.engine_outputs["llamacpp"].traces["near"]
same = [set(a) == set(b) for a, b in zip(trace[layer + "topk_ids"], llamacpp[layer + "topk_ids"], strict=True)]
print(f"the same experts as in llama.cpp: {sum(same)} of {len(same)} tokens")
print(f"the closest decision in layer 0: {gaps.min():.4f} between two logits of size {np.abs(margins).mean():.1f}")

# %% [markdown]
#
# ## The mistake
#
# Qwen3-MoE divides by the sum of the chosen probabilities, Qwen2-MoE does not. A port from one to the other can make
# this mistake:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["06b"])["topk_weights"]["topk-weights-not-normalised"]
print(inspect.getsource(wrong))

# %%
from llorch.apps.learn.check import check_functions

print(check_functions("06b", topk_weights=wrong))

# %% [markdown]
# llama.cpp hard-codes this setting by architecture: true for qwen3moe, false for qwen2moe, whatever the file says. A
# model whose `config.json` says otherwise gives other numbers there, without a warning. llorch follows the
# configuration and refuses to write such a model as GGUF.

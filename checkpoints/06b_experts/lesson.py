# %% [markdown]
# # 06b experts
#
# 35 minutes, four functions of one to six lines. Optional: no other lesson needs it. Dense models have no experts.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# A mixture of experts takes the place of the feed-forward part of [06](../06_swiglu/README.md). It has many small
# feed-forward parts, the experts, and gives each token to a few of them.
#
# ## Idea
#
# Three quarters of a dense model's weights lie in its feed-forward parts, and every token is multiplied by all of them.
# A mixture stores many experts and uses few for each token: Qwen3-30B-A3B has 128 experts in each layer and gives a
# token to 8. The whole model has to be in memory, but a token reads a tenth of it.
#
# Who decides? A *router*: one matrix with a row for each expert. Its product with the token, through a softmax, is a
# probability for each expert. The k largest win, and their outputs are added by weight. The other experts are not
# computed at all. `micro-qwen3-moe` does it on a small scale:

# %%
import numpy as np

import llorch

model, trace = llorch.load("micro-qwen3-moe"), {}
ids = model.tokenizer.encode("Once upon a time there was a little fox")
model.forward(ids, trace=trace)
experts = model.config.experts
print(f"{experts.n_experts} experts, {experts.n_experts_per_token} for each token, {len(ids)} tokens")
for layer in range(2):
    used = np.bincount(trace[f"l{layer}.topk_ids"].ravel(), minlength=experts.n_experts)
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
# weight. No expert is idle. All weights are near a third, because the router of so small a model was trained for only a
# minute.
#
# ## Exercise
#
# Write four functions in `l06b_experts.py`:
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
# llorch learn hint 06b
# ```
#
# The check uses models that are not in the wheel. It needs a clone of the repository.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: top_k,
# topk_weights, expert_outputs, mixed`. Each right function takes a name off the list, a wrong one says `FAIL`, and four
# right ones say `PASS` after 512 comparisons in 4 models.
#
# ## Run it
#
# Two tokens choose two of three experts:

# %%
from llorch.apps.learn.lessons import PARTS

top_k, topk_weights, mixed = (PARTS[name].reference for name in ("top_k", "topk_weights", "mixed"))
# yours: from l06b_experts import mixed, top_k, topk_weights
probs = np.array([[0.25, 0.125, 0.625], [0.25, 0.5, 0.25]], np.float32)
ids = top_k(probs, 2)
print("ids       ", ids.tolist())
print("weights   ", topk_weights(probs, ids, False).tolist())
print("normalised", topk_weights(probs, ids, True).astype(float).round(3).tolist())
outs = np.array([[[8, 0], [0, 8]], [[8, 0], [0, 8]]], np.float32)  # (seq, k, hidden)
print("mixed     ", mixed(outs, topk_weights(probs, ids, False), None, None).tolist())

# %% [markdown]
# In the second token, experts 0 and 2 have equal probabilities. The lower id wins.
#
# ## A mistake to plant
#
# Leave the division out: use the chosen probabilities as they are, whatever `normalised` says. Qwen3-MoE divides,
# Qwen2-MoE does not. A port from one to the other can make this mistake:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["06b"])["topk_weights"]["topk-weights-not-normalised"]
print(check_functions("06b", topk_weights=wrong))

# %% [markdown]
# *Still right* says that all of `micro-qwen2-moe` passes: a test with one model would not have seen it.
#
# ## Both engines
#
# - llama.cpp fixes the setting by architecture: it divides in qwen3moe and does not in qwen2moe, whatever the file
#   says. transformers follows `config.json`. llorch does too, and refuses to write a GGUF file that llama.cpp would
#   read differently.
# - The choice is not continuous: one bit in a logit can swap two experts. llorch compares the chosen *sets*. If two
#   sets differ, it accepts them only if the two logits at the border are as close as rounding can bring them.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.

# %% [markdown]
# # 06b experts
#
# 35 minutes, four functions of one to six lines. A side road: no later lesson needs it. Dense models have no experts.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's boxes lit](fig/where.svg)
#
# At the place of the feed-forward part of [06](../06_swiglu/README.md). A mixture of experts has many small ones there,
# and a token is given to a few of them.
#
# ## Idea
#
# Three quarters of a dense model's weights lie in its feed-forward parts, and every token pays for all of them. A
# mixture keeps many and uses few: Qwen3-30B-A3B has 128 experts in each layer and gives a token to 8. It has to be held
# in memory whole, but a token reads a tenth of it.
#
# Who decides? A *router*: one matrix with a row for each expert. Its product with the token, through a softmax, is a
# probability for each. The largest k win, their outputs are added by weight, and the others are not computed at all.
# `micro-qwen3-moe` does it on a small scale:

# %%
import inspect

import numpy as np

import llorch
from llorch.builtin import goldens_folder
from llorch.verify.goldens import read

model, golden = llorch.load("micro-qwen3-moe"), read(goldens_folder() / "micro-qwen3-moe")
config, ids = model.config, golden.cases["near"].ids
trace: dict[str, np.ndarray] = {}
model.forward(ids, trace=trace)
print(f"{config.experts.n_experts} experts, {config.experts.n_experts_per_token} for each token, {len(ids)} tokens")
for layer in range(config.n_layers):
    used = np.bincount(trace[f"l{layer}.topk_ids"].ravel(), minlength=config.experts.n_experts)
    print(f"layer {layer}: tokens that each expert was given", used)

# %% [markdown]
# Some models add one more that every token gets, the *shared* expert; in Qwen's a sigmoid says how much of it.
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
# | symbol | shape | what it is |
# | --- | --- | --- |
# | $h$ | (seq, hidden) | `ffn_norm` |
# | $W_r$ | (experts, hidden) | the router |
# | $p$ | (seq, experts) | `router_probs`, over *all* experts |
# | $e$, $w$ | (seq, topk) | `topk_ids`, `topk_weights` |
# | $\mathrm{FFN}_e$ | (seq, topk, hidden) | `expert_out`, the part of lesson 06 with the matrices of expert $e$ |
# | $u$ | (hidden) | the shared expert's gate, where there is one |
#
# Whether the weights are divided by their sum is a setting, `norm_topk_prob`, and it is the trap of this lesson.
#
# ## The picture
#
# ![Which experts the tokens of a prompt were given to, with their weights](fig/chosen.svg)
#
# One column for each of the first 24 tokens, one row for each expert; the darker, the larger the weight. No expert is
# idle. All weights are near a third: the router of so small a model, trained for a minute, has no strong opinion.
#
# ## The reference
#
# <!-- source: llorch.families.experts.experts -->
#
# <!-- source: llorch.ops.routing.linear_by_expert -->
#
# Rows are sorted by expert, so that each chosen matrix is read once, however many tokens it is for.
#
# ## Run it
#
# The choice is a step: a logit that moves by one bit can swap two experts. So it is judged as a *set*, and where it
# differs, the distance between the last that was in and the first that was out says whether rounding decided:

# %%
layer = "l0."
truth = golden.truth.evidence.traces["near"]
margins = np.sort(truth[layer + "router_logits"], axis=-1)[:, ::-1]
k = config.experts.n_experts_per_token
gaps = margins[:, k - 1] - margins[:, k]
theirs = golden.evidence["llamacpp"].traces["near"]
same = [set(a) == set(b) for a, b in zip(trace[layer + "topk_ids"], theirs[layer + "topk_ids"], strict=True)]
print(f"the same experts as in llama.cpp: {sum(same)} of {len(same)} tokens")
print(f"the closest decision in layer 0: {gaps.min():.4f} between two logits of size {np.abs(margins).mean():.1f}")

# %% [markdown]
# ## The mistake
#
# Qwen3-MoE divides by the sum of the chosen probabilities, Qwen2-MoE does not. Whoever ports one from the other:

# %%
from llorch.learn.lessons import BY_NUMBER
from llorch.learn.materials import typed_mistakes

wrong = typed_mistakes(BY_NUMBER["06b"])["topk_weights"]["topk-weights-not-normalised"]
print(inspect.getsource(wrong))

# %%
from llorch.learn.check import check_functions

print(check_functions("06b", topk_weights=wrong))

# %% [markdown]
# llama.cpp has this choice built in, by architecture: true for qwen3moe, false for qwen2moe, whatever the file says. A
# model whose `config.json` says otherwise computes something else there, and nothing is printed. llorch computes what
# the configuration says, and refuses to write such a model as GGUF.
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
# ## Where the engines differ
#
# - llama.cpp clamps the sum of the chosen probabilities at 6.1e-05 before it divides; softmax of the largest k cannot
#   come near that with the numbers of experts in use.
# - llama.cpp computes the gate of Qwen2-MoE's shared expert as $\mathrm{silu}(x) / x$, which is NaN at $x = 0$;
#   transformers takes the sigmoid.
# - transformers gives all tokens of an expert to one product and adds the results up in the order of the experts,
#   llama.cpp in the order of the ranks.
#
# Layer 0, each engine on its own way through the layer:

# %%
others = golden.evidence["transformers"].traces["near"]
for stage in ("router_logits", "router_probs", "topk_weights", "moe_out"):
    exact = truth[layer + stage]
    off = [np.linalg.norm(run[layer + stage] - exact) / np.linalg.norm(exact) for run in (theirs, others)]
    print(f"{stage:13} from float64: llama.cpp ~{off[0]:.0e}, transformers ~{off[1]:.0e}")

# %% [markdown]
# Further reading:
#
# - Shazeer and others, [Outrageously Large Neural Networks](https://arxiv.org/abs/1701.06538), 2017: the sparsely gated
#   mixture.
# - Fedus, Zoph and Shazeer, [Switch Transformers](https://arxiv.org/abs/2101.03961), 2021: one expert per token, and
#   how they are kept busy.
# - `Qwen3MoeSparseMoeBlock` in transformers
#   ([modeling_qwen3_moe.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen3_moe/modeling_qwen3_moe.py))
#   and `build_moe_ffn` in llama.cpp
#   ([llama-graph.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp)).
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## What is compared
#
# Every step from the router to the sum, in every layer that has experts. Behind the choice each engine's own experts
# are compared: a swap that rounding explains is a tie, and what follows is judged on the witness's choice.
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
# pytest -k checkpoint_06b                  # the comparison, and every mistake of this page planted
# llorch verify micro-qwen3-moe --detail
# ```

# %% [markdown]
# # 06b experts: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.model.blocks.experts.experts -->
#
# <!-- source: llorch.ops.routing.linear_by_expert -->
#
# Rows are sorted by expert, so that each chosen matrix is read once, for any number of tokens.
#
# ## Where the engines differ
#
# - llama.cpp clamps the sum of the chosen probabilities at 6.1e-05 before it divides. Models have so few experts that
#   the sum of the k largest probabilities is always far above this.
# - llama.cpp computes the gate of Qwen2-MoE's shared expert as $\mathrm{silu}(x) / x$, which is NaN at $x = 0$.
#   transformers takes the sigmoid.
# - transformers gives all tokens of an expert to one product and adds the results in the order of the experts.
#   llama.cpp adds them in the order of their probabilities, the largest first.
#
# This is layer 0, as each engine computed it:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-qwen3-moe")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
reference = golden.reference.engine_output.traces["near"]
for stage in ("router_logits", "router_probs", "topk_weights", "moe_out"):
    exact = reference[f"l0.{stage}"]
    errors = [np.linalg.norm(run[f"l0.{stage}"] - exact) / np.linalg.norm(exact) for run in (llamacpp, transformers)]
    print(f"{stage:13} from float64: llama.cpp ~{errors[0]:.0e}, transformers ~{errors[1]:.0e}")

# %% [markdown]
# The choice is not continuous: a change of one bit in a logit can swap two experts. So llorch judges it as a *set*. If
# two sets differ, llorch looks at the last expert that was chosen and the first that was not. Rounding decided only if
# their logits are very close:

# %%
same = [{*a} == {*b} for a, b in zip(llamacpp["l0.topk_ids"], transformers["l0.topk_ids"], strict=True)]
logits = np.sort(reference["l0.router_logits"], axis=-1)[:, ::-1]
gaps = logits[:, 2] - logits[:, 3]  # 3 experts a token
print(f"the same experts in both engines: {sum(same)} of {len(same)} tokens")
print(f"the closest decision: {gaps.min():.4f} between two logits of size {np.abs(logits).mean():.1f}")

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
# ## Compared values
#
# Every step from the router to the sum is compared, in every layer that has experts. After the choice, each engine's
# experts are compared. A swap that rounding explains is a tie, and the later stages are then judged with the
# reference engine's choice.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_06b                  # the comparison, and every mistake of this page, injected
# llorch verify micro-qwen3-moe --detail
# ```

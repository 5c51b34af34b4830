# %% [markdown]
# # 15 lora_delta: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.lora.lora_delta -->
#
# <!-- source: llorch.lora.config.LoraConfig.scaling_of -->
#
# ## Where the engines differ
#
# There are three factors, and the formula does not say when to multiply by the scale. Here is the distance of each
# engine from PEFT in float64, at `v_proj` of layer 0:

# %%
import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.ops.lora import lora_delta

weights, golden = stored("micro-llama")
adapter, x = golden.adapter_for(weights.config), golden.shown(at("attn_norm", 0))
lora, s = adapter.tensors["layers.0.v_proj"], adapter.scaling("layers.0.v_proj")
stage_ref = at("lora_delta", 0, "v_proj")
reference, f32 = golden.reference("isolated", stage_ref), np.float32(s)
orders = {
    "after both (PEFT)": golden.shown(stage_ref),
    "between them (llorch on torch)": (x @ lora.lora_A.T * f32) @ lora.lora_B.T,
    "in float64, rounded once (llorch)": lora_delta(x, lora.lora_A, lora.lora_B, scaling=s),
}
for name, actual in orders.items():
    print(f"{name:35} ~{np.linalg.norm(actual - reference) / np.linalg.norm(reference):.0e}")

# %% [markdown]
# - PEFT multiplies by the scale after `lora_B`, llorch's NumPy after both products, llorch's torch between them. All
#   three orders are right. The tolerance is 7.9e-07.
# - On a bfloat16 base, adapters stay float32 in PEFT and in llorch. The sum is rounded to the dtype of the base. For
#   the errors at this validation point and the next, see page [17](../17_gradients/PORTING.md#in-bfloat16).
# - PEFT adds nothing to the output of a merged layer, without a message.
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
# ## Compared values
#
# `rank_pattern` and `alpha_pattern` set ranks of 2, 3 or 4 and alphas of 1.4 to 6, so that no two kinds of matrix
# share a scale; `v_proj` of layer 1 has a different rank. The batch has two rows of different lengths. Isolated, each
# matrix gets PEFT's input. The case `rslora` is the same adapter with `use_rslora`. `adapted_logits` is the forward
# pass with all deltas in it.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# `pytest tests/faults` injects each mistake in turn: it replaces the right function of llorch by the wrong one. The
# test requires that this validation point fails first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_15                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# ```

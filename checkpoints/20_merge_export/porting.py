# %% [markdown]
# # 20 merge_export: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.lora.merge.merged_matrix -->
#
# <!-- source: llorch.files.tensor_names.interleave -->
#
# <!-- source: llorch.lora.gguf_format.common_alpha -->
#
# ## Where the engines differ
#
# All of them loaded llorch's files. This is the distance of each from PEFT in float64:

# %%
import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at

weights, golden = stored("micro-llama")
reference = golden.reference("chained", at("adapted_logits"))
for kind, engine in (("peft_folder", "PEFT"), ("merged_folder", "transformers"), ("lora_gguf", "llama.cpp")):
    error = np.linalg.norm(golden.shown(at("exported_logits", part=kind)) - reference) / np.linalg.norm(reference)
    print(f"{kind:14} in {engine:13} {error:.1e}")

# %% [markdown]
# Here is the effect of rows in another order on the logits: llorch's model with an adapter whose rows of q and k do not
# have the order of the base. Half of the adapter's effect goes wrong.

# %%
from dataclasses import replace

from llorch.files.tensor_names import interleave
from llorch.judging.runners.training_numpy import logits_of
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import LoraTensors
from llorch.lora.merge import MergedWeights

weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
documents = [ids for ids, _ in golden.batches[0].each_document()]
heads = {"q_proj": weights.config.n_heads, "k_proj": weights.config.n_kv_heads}
mixed = {
    name: LoraTensors(lora.lora_A, interleave(lora.lora_B, heads[name[-6:]])) if name[-6:] in heads else lora
    for name, lora in adapter.tensors.items()
}
base, adapted, merged, wrong = (
    logits_of(w, documents)
    for w in (
        weights,
        AdaptedWeights(weights, adapter),
        MergedWeights(weights, adapter),
        AdaptedWeights(weights, replace(adapter, tensors=mixed)),
    )
)
print(f"the adapter moves logits by up to {np.abs(adapted - base).max():.2f}")
print(f"merged against separate:  ~{np.abs(merged - adapted).max():.0e} apart")
print(f"rows in the other order:  {np.abs(wrong - adapted).max():.2f} apart")

# %% [markdown]
# - PEFT rounds the product before it adds it. llorch rounds once. Some elements differ by an ulp.
# - llama.cpp's converter writes only the adapter's alpha. With rank-stabilised LoRA or alpha patterns, its files give
#   another scale, without an error. llorch folds the scale into B.
# - llama.cpp applies an adapter in its graph, `scale * (B (A x))`, and never merges.
# - A tied base has no output matrix in GGUF, so the file cannot hold an adapter of it. Merge instead.
#
# Further reading:
#
# - `llama_adapter_lora_init_impl` in llama.cpp
#   ([llama-adapter.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp)), and
#   [convert_lora_to_gguf.py](https://github.com/ggml-org/llama.cpp/blob/master/convert_lora_to_gguf.py), whose
#   `LoraTorchTensor` reorders a product without making it.
# - PEFT, [merging](https://huggingface.co/docs/peft/developer_guides/lora#merge-lora-weights-into-the-base-model).
# - Dettmers et al., [QLoRA](https://arxiv.org/abs/2305.14314), 2023. It raises the question which base to merge into.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# $P$ is the order of rows of q and k in files of the llama family, and $s$ is folded into B if one alpha is not
# enough. `merged_weight` is one matrix after PEFT's `merge_and_unload`, and `merged_logits` is the whole model after
# it. For `exported_logits`, a reference engine loads the file that llorch wrote. Its logits are compared with
# llorch's, from the file read back. In adapter files every tensor must be equal, byte by byte. One comparison is with
# the file that PEFT saves for the same adapter. The other is with the GGUF file from which llama.cpp made the right
# logits.
#
# <!-- generated: distances -->
# <!-- end -->
#
# <!-- generated: equal -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# `pytest tests/faults` replaces one of llorch's functions by each mistake. The test requires that this validation
# point fails first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_20                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 20 merge_export
#
# 30 minutes, three functions. The last lesson: what you trained leaves the house.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# An adapter has been trained ([19](../19_training_curve/README.md)). It is worth what others can load. There are two
# ways to hand it on. Keep it apart: a small file beside the base, which may be switched and mixed. Or bake it in: a
# model like any other, that needs nobody to know of LoRA. Each of the two in the format of Hugging Face and in that of
# llama.cpp: four forms, and each is run by an engine that someone else wrote.
#
# ## Idea
#
# $W x + s B A x$ is $(W + s B A)\,x$. So add once, and the detour is gone:

# %%
import inspect

import numpy as np

from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.merge import MergedWeights
from llorch.verify.training.claims import stored
from llorch.verify.training.places import at
from llorch.verify.training.runner import logits_of

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
documents = [ids for ids, _ in golden.batches[0].each_document()]
base, beside, merged = (
    logits_of(w, documents) for w in (weights, AdaptedWeights(weights, adapter), MergedWeights(weights, adapter))
)
print(f"the adapter moves logits by up to {np.abs(beside - base).max():.2f}")
print(f"merged or beside: apart by ~{np.abs(merged - beside).max():.0e}")

# %% [markdown]
# ## The maths
#
# ```math
# W' = \mathrm{round}(W + s\,B\,A), \qquad \text{LoRA GGUF: } B' = s\,P B
# ```
#
# | symbol | what it is |
# | --- | --- |
# | $W'$ | the merged matrix, in the dtype of the file; this rounding is the price |
# | $P$ | the order of rows of q and k in files of the llama family; elsewhere nothing moves |
# | $s$ | is multiplied into $B$ where one $\alpha$ for all matrices cannot say it |
#
# Why is there a $P$? RoPE turns pairs of numbers ([01b](../01b_rope/README.md)). Hugging Face pairs $j$ with $j +
# \text{half}$, llama.cpp neighbours. Both do the same if the rows of q and k are laid out accordingly, so converters
# reorder the rows of these matrices, for Llama. What is added to a matrix must be reordered like it: rows of $B$, for
# they are the outputs; $A$ stays. A head of 4 has rows 0 1 2 3 in halves (0 1 | 2 3) and in pairs 0 2 1 3.
#
# And $\alpha$: llama.cpp computes $s = \alpha / r$ with one $\alpha$ from the file and the $r$ of each matrix. An
# adapter with `alpha_pattern`, or rank-stabilised with several ranks, cannot be said that way. Then no alpha is
# written, which means $s = 1$, and each $B$ is multiplied by its own scale before.
#
# ## The picture
#
# ![Error of logits after rounding, of the base and of the merged model, by dtype](fig/dtypes.svg)
#
# What is lost when weights are rounded: of the base alone (blue), and of the base with the adapter merged in
# (orange). In float32 nothing. In bfloat16 the logits of both are off by about a third of a percent: merging is
# hardly worse than the dtype. But an adapter *beside* a bfloat16 base would have stayed float32. The dashed line is
# what the adapter does.
#
# ## The reference
#
# <!-- source: llorch.lora.merge.merged_matrix -->
#
# <!-- source: llorch.files.names.interleave -->
#
# <!-- source: llorch.lora.gguf_format.common_alpha -->
#
# ## Run it
#
# One matrix, as PEFT merges it:

# %%
from llorch.verify.training.places import MERGED_AT
from llorch.verify.training.recipe import MERGED

ours, theirs = MergedWeights(weights, adapter).array(MERGED), golden.shown(MERGED_AT)
print(MERGED, ours.shape, f"moved by up to {np.abs(ours - weights.array(MERGED)).max():.3f}")
print(f"~{np.sum(ours != theirs)} of {ours.size} numbers are not PEFT's, by ~{np.abs(ours - theirs).max():.0e} at most")

# %% [markdown]
# An adapter file, written by us and read by the `gguf` package:

# %%
import tempfile
from pathlib import Path

from llorch.lora.gguf_format import write_lora_gguf
from llorch.verify.training.exports import gguf_table

with tempfile.TemporaryDirectory() as folder:
    write_lora_gguf(adapter, Path(folder) / "adapter.gguf", weights.config)
    table = gguf_table(Path(folder) / "adapter.gguf")
print(f"{len(table)} entries, equal to the file that llama.cpp loaded: {table == golden.files['lora_gguf']}")
for name in ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b", "adapter.lora.alpha"):
    print(f"{name:27} {table[name][:30]}")

# %% [markdown]
# ## The mistake
#
# Leave the rows of $B$ as they are. Shapes fit, the file loads, llama.cpp says nothing, the model talks. It is what one
# gets by converting an adapter with a loop over names. What it does to the logits: here is our model with an adapter
# whose rows of q and k are in the other order than those of the base.

# %%
from dataclasses import replace

from llorch.files.names import interleave
from llorch.lora.adapter import LoraTensors

heads = {"q_proj": weights.config.n_heads, "k_proj": weights.config.n_kv_heads}
mixed = {
    name: LoraTensors(lora.lora_A, interleave(lora.lora_B, heads[name[-6:]])) if name[-6:] in heads else lora
    for name, lora in adapter.tensors.items()
}
wrong = logits_of(AdaptedWeights(weights, replace(adapter, tensors=mixed)), documents)
print(f"rows as they should be: off by ~{np.abs(merged - beside).max():.0e}")
print(f"in the other order:     off by {np.abs(wrong - beside).max():.2f}")

# %% [markdown]
# Half of what the adapter does goes astray, and what comes out is fluent. Its name:

# %%
from llorch.learn.check import check_functions
from llorch.learn.lessons import BY_NUMBER
from llorch.learn.materials import typed_mistakes

typed = typed_mistakes(BY_NUMBER["20"])
print(inspect.getsource(typed["interleave"]["export-b-rows-not-permuted"]))
print(check_functions("20", interleave=typed["interleave"]["export-b-rows-not-permuted"]))

# %% [markdown]
# Merging has a mistake of its own that no formula shows: to do it twice, because the script was run again on its own
# result.

# %%
for name, function in typed["merged"].items():
    lora, s, w = adapter.tensors[MERGED], adapter.scaling(MERGED), weights.array(MERGED)
    off = np.abs(function(w, lora.lora_A, lora.lora_B, s) - theirs).max()
    print(f"{name:20} s = {s}   off by {off:.3f}")

# %% [markdown]
# Twice and without the scale are off by the same: $s$ is 0.5 in this matrix, and $2 s B A$ is $B A$. One matrix cannot
# tell them apart. The check looks at the logits of the merged model too, where the other matrices have other scales.
#
# ## Exercise
#
# Write three functions in `l20_merge_export.py`:
#
# ```python
# def merged(weight, lora_A, lora_B, scaling) -> np.ndarray:
# def interleave(rows, n_heads) -> np.ndarray:
# def gguf_alpha(lora_alpha, scalings, ranks) -> float:
# ```
#
# ```
# llorch learn check 20
# llorch learn hint 20
# llorch learn check 20 --chain      # all four files, written and read again
# ```
#
# Then there is nothing left to write. From a text to a token, from a token to a loss, and from the loss to a file that
# llama.cpp loads: every number of it was yours once, and beside that of two engines.
#
# ## Where the engines differ
#
# All of them loaded what we wrote. How far each is from PEFT in float64:

# %%
truth = golden.truth("chained", at("adapted_logits"))
for kind, who in (("peft_folder", "PEFT"), ("merged_folder", "transformers"), ("lora_gguf", "llama.cpp")):
    off = np.linalg.norm(golden.shown(at("exported_logits", part=kind)) - truth) / np.linalg.norm(truth)
    print(f"{kind:14} in {who:13} {off:.1e}")

# %% [markdown]
# - PEFT rounds the product before it adds it, we round once: an ulp in some elements.
# - llama.cpp's converter writes the adapter's alpha alone; with rank-stabilised LoRA or alpha patterns its files mean
#   another scale, without an error. Ours fold the scale into B.
# - llama.cpp applies an adapter in its graph, `scale * (B (A x))`, and never merges.
# - A tied base has no output matrix in GGUF, so an adapter of it cannot be said there: merge instead.
#
# Further reading:
#
# - `llama_adapter_lora_init_impl` in llama.cpp
#   ([llama-adapter.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp)), and
#   [convert_lora_to_gguf.py](https://github.com/ggml-org/llama.cpp/blob/master/convert_lora_to_gguf.py), whose
#   `LoraTorchTensor` reorders a product without making it.
# - PEFT, [merging](https://huggingface.co/docs/peft/developer_guides/lora#merge-lora-weights-into-the-base-model).
# - Dettmers et al., [QLoRA](https://arxiv.org/abs/2305.14314), 2023: and with it the question which base to merge into.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## What is compared
#
# $P$ is the order of rows of q and k in files of the llama family, and $s$ is folded into B where one alpha cannot
# say it. `merged_weight` is one matrix after PEFT's own `merge_and_unload`, `merged_logits` the whole model after it.
# `exported_logits` are those of what we wrote, in the engine that loads it, against ours of what we read back. Of
# adapter files every tensor must be equal, byte by byte: to the file that PEFT saves of the same adapter, and to the
# GGUF file from which llama.cpp made the right logits.
#
# <!-- generated: distances -->
# <!-- end -->
#
# <!-- generated: equal -->
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
# pytest -k checkpoint_20                   # the comparison, and every mistake of this page planted
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 20 merge_export
#
# 30 minutes, three functions. This is the last lesson: your adapter becomes a file for other programs.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# An adapter has been trained ([19](../19_training_curve/README.md)). It is useful only if other programs can load it.
# There are two ways to pass it on. You can keep it separate: a small file next to the base, which users may switch
# and mix. Or you can merge it: the result is a model like any other, and its user need not know of LoRA. Each way
# exists in the format of Hugging Face and in that of llama.cpp. This makes four forms, and a reference engine runs
# each of them.
#
# ## Idea
#
# $W x + s B A x$ is $(W + s B A)\,x$. So after one addition, the detour is gone:

# %%
import inspect

import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.judging.runners.training_numpy import logits_of
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.merge import MergedWeights

weights, golden = stored("micro-llama")
weights, adapter = weights.astype(np.float32, keep=True), golden.adapter_for(weights.config)
documents = [ids for ids, _ in golden.batches[0].each_document()]
base, adapted, merged = (
    logits_of(w, documents) for w in (weights, AdaptedWeights(weights, adapter), MergedWeights(weights, adapter))
)
print(f"the adapter moves logits by up to {np.abs(adapted - base).max():.2f}")
print(f"merged against separate: differ by ~{np.abs(merged - adapted).max():.0e}")

# %% [markdown]
#
# ## The maths
#
# ```math
# W' = \mathrm{round}(W + s\,B\,A), \qquad \text{LoRA GGUF: } B' = s\,P B
# ```
#
# | symbol | meaning |
# | --- | --- |
# | $W'$ | the merged matrix, in the dtype of the file; this rounding is the price |
# | $P$ | the order of rows of q and k in files of the llama family; elsewhere nothing moves |
# | $s$ | is multiplied into $B$ where one $\alpha$ for all matrices cannot say it |
#
# Why is there a $P$? RoPE turns pairs of numbers ([01b](../01b_rope/README.md)). Hugging Face pairs $j$ with
# $j + \text{half}$, llama.cpp pairs neighbours. Both give the same result if the rows of q and k have the fitting
# order. So converters reorder the rows of these matrices for Llama. The adapter must be reordered like its matrix.
# The rows of $B$ are the outputs, so they change, and $A$ stays. A head of 4 has the rows 0 1 2 3 in halves (0 1 | 2
# 3), and 0 2 1 3 in pairs.
#
# The scale needs care, too. llama.cpp computes $s = \alpha / r$ with one $\alpha$ from the file and the $r$ of each
# matrix. An adapter with `alpha_pattern`, or a rank-stabilised one with several ranks, does not fit this form. Then
# llorch writes no alpha, which means $s = 1$, and first multiplies each $B$ by its scale.
#
# ## The picture
#
# ![Error of logits after rounding, of the base and of the merged model, by dtype](fig/dtypes.svg)
#
# The picture shows the loss from rounding weights, for the base alone (blue) and for the base with the merged adapter
# (orange). In float32 there is no loss. In bfloat16 the logits of both are off by about a third of a percent, so
# merging is hardly worse than the dtype. But a *separate* adapter on a bfloat16 base would have stayed float32. The
# dashed line is the effect of the adapter.
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
# Then nothing is left to write. From a text to a token, from a token to a loss, and from the loss to a file that
# llama.cpp loads: you have computed every number, and two engines have checked it.
#
# ## Run it
#
# One matrix, as PEFT merges it:

# %%
from llorch.judging.expectations.training_refs import MERGED_REF
from llorch.judging.goldens.training_recipe import MERGED

actual, expected = MergedWeights(weights, adapter).array(MERGED), golden.shown(MERGED_REF)
print(MERGED, actual.shape, f"moved by up to {np.abs(actual - weights.array(MERGED)).max():.3f}")
print(
    f"~{np.sum(actual != expected)} of {actual.size} numbers are not PEFT's, "
    f"by ~{np.abs(actual - expected).max():.0e} at most"
)

# %% [markdown]
# An adapter file, written by llorch and read by the `gguf` package:

# %%
import tempfile
from pathlib import Path

from llorch.judging.expectations.adapter_files import gguf_table
from llorch.lora.gguf_format import write_lora_gguf

with tempfile.TemporaryDirectory() as folder:
    write_lora_gguf(adapter, Path(folder) / "adapter.gguf", weights.config)
    table = gguf_table(Path(folder) / "adapter.gguf")
print(f"{len(table)} entries, equal to the file that llama.cpp loaded: {table == golden.files['lora_gguf']}")
for name in ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b", "adapter.lora.alpha"):
    print(f"{name:27} {table[name][:30]}")

# %% [markdown]
#
# ## The mistake
#
# The mistake does not reorder the rows of $B$. Shapes fit, the file loads, llama.cpp prints no warning, and the
# model writes text. A conversion that only loops over names makes this mistake. Here is its effect on the logits:
# llorch's model with an adapter whose rows of q and k are in another order than those of the base.

# %%
from dataclasses import replace

from llorch.files.tensor_names import interleave
from llorch.lora.adapter import LoraTensors

heads = {"q_proj": weights.config.n_heads, "k_proj": weights.config.n_kv_heads}
mixed = {
    name: LoraTensors(lora.lora_A, interleave(lora.lora_B, heads[name[-6:]])) if name[-6:] in heads else lora
    for name, lora in adapter.tensors.items()
}
wrong = logits_of(AdaptedWeights(weights, replace(adapter, tensors=mixed)), documents)
print(f"rows as they should be: off by ~{np.abs(merged - adapted).max():.0e}")
print(f"in the other order:     off by {np.abs(wrong - adapted).max():.2f}")

# %% [markdown]
# Half of the adapter's effect goes wrong, and the text is still fluent. The check names the mistake:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["20"])
print(inspect.getsource(typed["interleave"]["export-b-rows-not-permuted"]))
print(check_functions("20", interleave=typed["interleave"]["export-b-rows-not-permuted"]))

# %% [markdown]
# Merging has another mistake, which no formula shows: a script that runs again on its result merges twice.

# %%
for name, function in typed["merged"].items():
    lora, s, w = adapter.tensors[MERGED], adapter.scaling(MERGED), weights.array(MERGED)
    difference = np.abs(function(w, lora.lora_A, lora.lora_B, s) - expected).max()
    print(f"{name:20} s = {s}   off by {difference:.3f}")

# %% [markdown]
# Merging twice and merging without the scale give the same error here: $s$ is 0.5 in this matrix, and $2 s B A$ is
# $B A$. One matrix cannot tell them apart. So the check also compares the logits of the merged model, where the other
# matrices have other scales.

# %% [markdown]
# # 06 swiglu: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.swiglu.swiglu -->
#
# <!-- source: llorch.model.forward.feed_forward -->
#
# `swiglu` computes in place because the inner rows are the largest arrays of the forward pass. The formula in one
# line is just as good.
#
# ## Where the engines differ
#
# This is layer 0 of `micro-llama`, as each engine computed it:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
reference = golden.reference.engine_output.traces["near"]
for stage in ("ffn_gate", "ffn_up", "ffn_act", "ffn_out"):
    a, b, exact = (run[f"l0.{stage}"] for run in (llamacpp, transformers, reference))
    errors = [np.linalg.norm(actual - exact) / np.linalg.norm(exact) for actual in (a, b)]
    print(f"{stage:8}  {np.sum(a != b):4} of {a.size} numbers differ, by {np.abs(a - b).max():.1e} at most")
    print(f"{'':8}  from float64: llama.cpp {errors[0]:.1e}, transformers {errors[1]:.1e}")

# %% [markdown]
# The product of gate and up adds the errors of both, so its error is larger than either.
#
# - llama.cpp computes silu and the product in one node, `ffn_swiglu-{i}`. It has no node for silu(gate), so there is
#   no such stage.
# - transformers multiplies inside `mlp`. The product is read as the input of `down_proj`.
# - llama.cpp first names the second addition of its Llama block `ffn_out` too, then `l_out`. In the graph that runs,
#   `ffn_out-{i}` is the down projection.
# - The engines use different float32 exponentials and orders of summation.
#
# Further reading:
#
# - Shazeer, [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202), 2020: the variants side by side, and
#   the most honest explanation in the field ("divine benevolence").
# - Elfwing and others, [Sigmoid-Weighted Linear Units](https://arxiv.org/abs/1702.03118), 2017, and Hendrycks and
#   Gimpel, [Gaussian Error Linear Units](https://arxiv.org/abs/1606.08415), 2016: the two curves.
# - Geva and others, [Transformer Feed-Forward Layers Are Key-Value Memories](https://arxiv.org/abs/2012.14913), 2020:
#   channels read as questions and answers.
# - `LlamaMLP` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py))
#   and `build_ffn` in llama.cpp
#   ([llama-graph.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp)).
# - [nntrainer 4194](https://github.com/nntrainer/nntrainer/pull/4194): gate and up exchanged.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# Gate, up, the gated product and the result are compared in every layer. $h$ is `ffn_norm`, checked in
# [01](../01_rms_norm/README.md).
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
# pytest -k checkpoint_06                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 05b delta_net: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.delta_rule.delta_rule -->
#
# <!-- source: llorch.model.blocks.delta_net.delta_net -->
#
# The definition works token by token. For a prompt, llorch uses `delta_rule_in_chunks`: 64 tokens at a time, whose
# corrections are the solution of one triangular system. Both compute the same function, and a learner's function
# replaces both:

# %%
import numpy as np

from llorch.ops.delta_rule import delta_rule, delta_rule_in_chunks

rng = np.random.default_rng(0)
q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, 100, 2, 8)))
v, beta, g = rng.normal(size=(100, 4, 6)), rng.uniform(size=(100, 4)), -rng.exponential(size=(100, 4))
inputs = q, k, v, beta, g, np.zeros((4, 8, 6))
for name, actual, expected in zip(("out", "state"), delta_rule_in_chunks(*inputs), delta_rule(*inputs), strict=True):
    print(f"{name} in chunks of 64, within 1e-14:", bool(np.abs(actual - expected).max() < 1e-14))

# %% [markdown]
# ## Where the engines differ
#
# - The 1e-6 of the lengths comes from transformers. llama.cpp uses `rms_norm_eps` instead ([llama.cpp
#   28068](https://github.com/ggml-org/llama.cpp/issues/28068)). Published models have 1e-6 there too.
# - llama.cpp keeps the state transposed, and in Qwen3.5's GGUF files the value heads lie in another order ([llama.cpp
#   19468](https://github.com/ggml-org/llama.cpp/pull/19468)). llorch undoes both where it reads them.
# - GGUF files hold $-e^{A}$, transformers $A$.
#
# This is layer 0, as each engine computed it:

# %%
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-qwen3.5")
llamacpp, transformers = (golden.engine_outputs[name].traces["near"] for name in ("llamacpp", "transformers"))
reference = golden.reference.engine_output.traces["near"]
for stage in ("conv_out", "q_l2", "log_decay", "delta_state", "delta_out"):
    exact = reference[f"l0.{stage}"]
    errors = [np.linalg.norm(run[f"l0.{stage}"] - exact) / np.linalg.norm(exact) for run in (llamacpp, transformers)]
    print(f"{stage:11} from float64: llama.cpp ~{errors[0]:.0e}, transformers ~{errors[1]:.0e}")

# %% [markdown]
# Further reading:
#
# - Yang, Kautz and Hatamizadeh, [Gated Delta Networks](https://arxiv.org/abs/2412.06464), 2024: this layer.
# - Yang and others, [Parallelizing Linear Transformers with the Delta Rule](https://arxiv.org/abs/2406.06484), 2024:
#   the chunks.
# - Schlag, Irie and Schmidhuber,
#   [Linear Transformers Are Secretly Fast Weight Programmers](https://arxiv.org/abs/2102.11174), 2021: the notebook.
# - `Qwen3NextGatedDeltaNet` in transformers
#   ([modeling_qwen3_next.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen3_next/modeling_qwen3_next.py)).
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# Every step from the projections to the output is compared, and the state after the last token. A second pass has to
# go on where the first one ended. `conv_state` and `delta_state` count as caches, [03](../03_kv_cache/README.md).
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
# pytest -k checkpoint_05b                  # the comparison, and every mistake of this page, injected
# llorch verify micro-qwen3.5 --detail
# ```

# %% [markdown]
# # 09 selected_logits: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# In [`forward`](../../llorch/model/forward.py) this is `x[-1:]` before the final norm: unused rows are not normalised
# and not multiplied by the largest matrix of the model. For a prompt of 500 tokens this saves 499 of 500 parts of the
# work of `lm_head`.
#
# <!-- source: llorch.model.forward.logits -->
#
# ## Where the engines differ

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import BUILTIN, goldens_folder

for name in BUILTIN:
    golden = read(goldens_folder() / name)
    a, b = (output.selected_logits for output in golden.engine_outputs.values())
    llamacpp = golden.engine_outputs["llamacpp"]
    same = np.array_equal(llamacpp.selected_logits, llamacpp.traces["near"]["logits"][-1])
    print(f"{name:13} apart by {np.abs(a - b).max():.0e}   llama.cpp's row of 08 is the same: {same}")

# %% [markdown]
# - llama.cpp drops the other rows in its last layer, before the first addition. From there on it multiplies matrices
#   with a single row, and its CPU backend uses another routine for one row than for several.
# - transformers runs all rows through the blocks and the final norm, and applies `lm_head` to the last one
#   (`logits_to_keep=1`).
# - llorch drops the other rows before the final norm.
#
# Further reading:
#
# - `logits_to_keep` in transformers'
#   [modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py).
# - Radford and others, [Language Models are Unsupervised Multitask
#   Learners](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf),
#   2019: one row a token, all of them trained at once.
#
# ## Stages
#
# - stage: `selected_logits`, of shape (vocab)
# - llorch's function: [`forward`](../../llorch/model/forward.py) with `last_only`
# - llama.cpp: `llama_get_logits_ith(-1)` of a batch that asks for its last token
# - transformers: `logits` with `logits_to_keep=1`
#
# ## Compared values
#
# The logits of each engine, asked for the last token only, are compared with llorch's forward pass with `last_only`.
# The float64 reference is transformers, asked in the same way. It is not the golden of [08](../08_logits/README.md)
# cut to one row.
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
# pytest -k checkpoint_09                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

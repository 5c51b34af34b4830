# %% [markdown]
# # 08 logits: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.model.forward.logits -->
#
# ## Where the engines differ
#
# The logits of `micro-llama` and `story`, at the end of each engine's full forward pass:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

for name in ("micro-llama", "story"):
    golden = read(goldens_folder() / name)
    a, b = (golden.engine_outputs[engine].traces["near"]["logits"] for engine in ("llamacpp", "transformers"))
    exact = golden.reference.engine_output.traces["near"]["logits"]
    errors = [np.linalg.norm(actual - exact) / np.linalg.norm(exact) for actual in (a, b)]
    best = np.sort(exact, axis=-1)
    print(f"{name}: {np.sum(a != b)} of {a.size} logits differ, by {np.abs(a - b).max():.1e} at most")
    print(f"  from float64: llama.cpp {errors[0]:.1e}, transformers {errors[1]:.1e}")
    print(f"  same first choice everywhere: {np.array_equal(a.argmax(-1), b.argmax(-1))}", end="; ")
    print(f"smallest lead of the best logit {(best[:, -1] - best[:, -2]).min():.3f}")

# %% [markdown]
# Nine of ten logits differ in their last bits, but the engines choose the same tokens. The distance between the two
# closest logits is about a thousand times the difference between the engines. In long texts, a closer pair comes
# sooner or later, and then two correct engines choose different tokens ([12](../12_generation/README.md)).
#
# - llama.cpp computes logits only for the requested tokens. llorch's goldens were made with all tokens requested.
# - A tied GGUF file has no `output.weight`, and llama.cpp takes `token_embd.weight`. In transformers `lm_head` then
#   shares the parameter of `embed_tokens`.
# - Both engines return logits of the whole vocabulary of the file. Nothing is padded or cut.
#
# Further reading:
#
# - Press and Wolf, [Using the Output Embedding to Improve Language Models](https://arxiv.org/abs/1608.05859), 2016: one
#   table for both ends.
# - nostalgebraist,
#   [interpreting GPT: the logit lens](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens),
#   2020; Belrose and others,
#   [Eliciting Latent Predictions with the Tuned Lens](https://arxiv.org/abs/2303.08112), 2023.
# - `LlamaForCausalLM` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py))
#   and the end of the graph in llama.cpp
#   ([llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/src/models/llama.cpp)), from `result_norm` to
#   `result_output`.
# - [vllm 46835](https://github.com/vllm-project/vllm/issues/46835): what gets lost when a head is taken for tied.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# The logits of all tokens of the input are compared, not only the last. The built-in models `micro-llama3`,
# `micro-qwen2` and `story` use the embedding table as output matrix (tied). `micro-llama` and `micro-qwen3` have a
# separate output matrix. `final_norm`, the input, is checked in [01](../01_rms_norm/README.md).
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
# pytest -k checkpoint_08                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

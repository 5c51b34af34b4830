# %% [markdown]
# # 01b rope: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.rope.frequencies -->
#
# <!-- source: llorch.ops.rope.rope -->
#
# The tables are made once a pass, in float64, and all layers use them:
#
# <!-- source: llorch.ops.rope.rope_tables -->
#
# ## Where the engines differ
#
# Near the beginning the engines agree up to rounding. From position 4000 on they do not, and the pairs show why:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "micro-llama")
pairs = (0, 1, 2, 4, 8, 15)
print("error by pair " + "".join(f"{j:>9}" for j in pairs))
for case in ("near", "far"):
    reference = golden.reference.engine_output.traces[case]["l0.q_rope"].reshape(-1, 2, 16)  # two halves of every head
    for name in ("llamacpp", "transformers"):
        actual = golden.engine_outputs[name].traces[case]["l0.q_rope"].reshape(-1, 2, 16)
        error = np.sqrt(((actual - reference) ** 2).sum((0, 1)) / (reference**2).sum((0, 1)))
        print(f"{case:4} {name:12}" + "".join(f"  {error[j]:.0e}" for j in pairs))

# %% [markdown]
# Both engines keep angles in float32, where the neighbours of 4000 are 2.4e-4 apart: an angle there can be wrong by
# 1e-4 and the cosine with it. Slow pairs have small angles and lose little. Pair 0 loses nothing at all: its
# frequency is exactly 1, so its angle is a whole number. Therefore `rope_tables` returns float64, and the tolerance
# is 4.9e-04 for `far` and 1.0e-06 for `near`.
#
# - **Pairs.** transformers always pairs `(j, j + d/2)`. llama.cpp pairs `(2j, 2j + 1)` for the Llama family, whose
#   GGUF files have their q and k rows reordered to fit, and `(j, j + d/2)` for Qwen2 and Qwen3, whose rows are left
#   alone. Traces are in the order of transformers. llorch restores this order for the Llama family on `q_proj`,
#   `k_proj`, `q_rope`, `k_rope` and `k_cache`. Scores and all later stages do not depend on the order.
# - **Angles.** llama.cpp multiplies a float32 angle from pair to pair by a constant. transformers multiplies the
#   position by a float32 frequency. From 2048 to 4096 neighbouring float32 numbers are 2.4e-4 apart, so fast pairs
#   can be off by some 1e-4, and the `far` lines show it. llorch's angles are float64, and the rotated numbers are
#   rounded once.
# - **llama3 scaling.** A GGUF file holds one divisor per frequency (`rope_freqs.weight`), which llama.cpp reads.
#   transformers computes the divisors from `config.json`. For a GGUF file, llorch tells it the published factor that
#   gives the divisors of the file. If no such factor exists, llorch divides the frequencies by the divisors of the
#   file.
# - **Names.** `Qcur-{i}` stands for up to four nodes of llama.cpp: the product, the sum with the bias, a reshape, the
#   rotated heads. The stage is the one with operation ROPE.
#
# Further reading:
#
# - Su and others, [RoFormer: Enhanced Transformer with Rotary Position Embedding](https://arxiv.org/abs/2104.09864),
#   2021: section 3.4.2 has the formula with neighbours as pairs.
# - `rotate_half` and `apply_rotary_pos_emb` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py)):
#   the same rotation with halves as pairs.
# - Peng and others, [YaRN](https://arxiv.org/abs/2309.00071), 2023: what scaling the frequencies does to a model.
# - [llama.cpp 22611](https://github.com/ggml-org/llama.cpp/pull/22611): rows not reordered on one path of a
#   converter; perplexity 4419 instead of 44.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# `near` starts at position 0, where RoPE does nothing, so most mistakes show only from the second token on. `far`
# starts at position 4000, or as late as the context of the model allows. There the frequency scaling and the
# precision of the angles show. `micro-llama3` has llama3 scaling. No built-in model has linear or YaRN scaling:
# [`tests/judging/test_rope_against_transformers.py`](../../tests/judging/test_rope_against_transformers.py) compares
# their frequencies and tables with those of transformers.
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
# pytest -k checkpoint_01b                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 11 probabilities: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.sampling.penalise -->
#
# <!-- source: llorch.ops.sampling.keep_top_k -->
#
# <!-- source: llorch.ops.sampling.keep_top_p -->
#
# <!-- source: llorch.ops.sampling.keep_min_p -->
#
# <!-- source: llorch.ops.sampling.softmax -->
#
# <!-- source: llorch.ops.sampling.probabilities -->
#
# The chain works in float64 and rounds once, at the end. A row is short, so this is cheap, and rounding cannot push a
# token over the edge of top-p.
#
# ## Where the engines differ

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "story")
for name, a in golden.engine_outputs["llamacpp"].probabilities.items():
    b, reference = (
        output.probabilities[name] for output in (golden.engine_outputs["transformers"], golden.reference.engine_output)
    )
    errors = [np.linalg.norm(probabilities - reference) / np.linalg.norm(reference) for probabilities in (a, b)]
    print(f"{name:12} keeps {(a > 0).sum():4} {(b > 0).sum():4}   from float64: {errors[0]:.0e} {errors[1]:.0e}")

# %% [markdown]
# llama.cpp stands first. Both engines keep the same tokens with every setting. This is not certain in general:
#
# - The order above is the order of transformers' processors. For the goldens, llama.cpp's chain is put together in
#   the same order. Its samplers can be chained in any order, and other orders give other distributions.
# - top-k: among tokens equal to the k-th, llama.cpp keeps exactly k. transformers and llorch keep all of them.
# - top-p: llama.cpp and llorch add up from the most likely token until the sum reaches p, and that token stays.
#   transformers adds up from the least likely token and removes tokens while the sum is at most 1 - p. Without
#   rounding and ties, both give the same set. Where a token lies so close to the edge that rounding decides, the
#   check says so, and that it is *not your bug*.
# - min-p: llama.cpp and llorch compare logits with the largest one plus log(min_p). transformers compares
#   probabilities.
# - All three divide a positive logit of a seen token by the penalty and multiply a negative one. A token counts once.
#
# Which settings show a mistake? Each of these fails under the right name. The numbers are the failed rows, among 60.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["11"])
for part, name in (
    ("penalise", "penalty-per-occurrence"),
    ("keep_top_k", "top-k-one-more"),
    ("keep_top_p", "top-p-drops-crossing-token"),
    ("keep_min_p", "min-p-absolute"),
    ("distribution", "temperature-after-filters"),
    ("distribution", "probabilities-not-renormalised"),
):
    report = check_functions("11", **{part: typed[part][name]})
    failed_parts = sorted({comparison.stage_ref.part for comparison in report.wrong})
    print(f"{name:31} {len(report.wrong):2}   {', '.join(failed_parts)}")

# %% [markdown]
# Further reading:
#
# - Holtzman and others, [The Curious Case of Neural Text Degeneration](https://arxiv.org/abs/1904.09751), 2019: top-p,
#   and why.
# - Keskar and others, [CTRL](https://arxiv.org/abs/1909.05858), 2019, section 4.1: the repetition penalty. The paper
#   divides, and does not mention negative logits.
# - Nguyen and others, [Turning Up the Heat: Min-p Sampling](https://arxiv.org/abs/2407.01082), 2024.
# - `logits_process.py` in transformers
#   ([source](https://github.com/huggingface/transformers/blob/main/src/transformers/generation/logits_process.py)) and
#   `llama-sampler.cpp` in llama.cpp ([source](https://github.com/ggml-org/llama.cpp/tree/master/src)).
#
# ## Stages
#
# - stage: `probabilities.<name>`, of shape (vocab)
# - llorch's function: [`probabilities`](../../llorch/ops/sampling.py)
# - llama.cpp: a `llama_sampler_chain` ended by `llama_sampler_init_dist`, read after `llama_sampler_apply`
# - transformers: a `LogitsProcessorList`, then softmax
#
# ## Compared values
#
# The sampler chain of every engine is compared with llorch's. Both get the same logits and the same tokens so far
# (for the penalty), so that an error comes from a filter. A removed token has probability 0 and is compared like any
# other. Engines sum up float32 probabilities for top-p. Such a sum can be off by `4 * 2^-24 * sqrt(2 / 3 * vocab)`.
# The verdict is TIE if two distributions differ only in tokens whose exact sum is closer to p than this, and llorch
# keeps the tokens of the exact sum. No other filter has such an edge.
#
# <!-- generated: settings -->
# <!-- end -->
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
# pytest -k checkpoint_11                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

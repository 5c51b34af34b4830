# %% [markdown]
# # 12 generation: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.model.generate.sample_ids -->
#
# The reference draws from a distribution. At temperature 0 the whole distribution is on one token, and drawing is
# `argmax`. `step` is the model with its cache. The cache gives the positions of the new tokens:
#
# <!-- source: llorch.model.cache.KVCache.next_positions -->
#
# ## Where the engines differ

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import BUILTIN, goldens_folder

for name in BUILTIN:
    golden = read(goldens_folder() / name)
    same = len({tuple(output.greedy.tolist()) for output in golden.engine_outputs.values()}) == 1
    steps = np.sort(golden.reference.step_logits, axis=1)
    gap = (steps[:, -1] - steps[:, -2]).min()
    print(f"{name:13} both engines the same: {same}   closest call {gap:.3f}")

# %% [markdown]
# *Closest call* is the smallest lead of the best token over the second in 24 steps, in the float64 reference.
# Rounding moves these logits by about 1e-5, so it decides no step here. On a larger model with a longer text it will
# decide one, and from there on two right engines write different texts. The check then says TIE with the gap, not
# FAIL, and continues after the engine's token. It says: *not your bug*.
#
# - llama.cpp runs its greedy sampler on `llama_decode`. transformers runs `generate` with `do_sample=False` and a
#   generation configuration without the model's settings.
# - After the prompt both engines compute one row at a time, so their logits can differ in rounding from those of a
#   single pass over the whole text.
# - The loop here does not decide where to stop: its caller stops at an end token. A model may have several of them
#   (Llama 3 has `<|end_of_text|>` and `<|eot_id|>`).
#
# In how many of the five models of the check does a mistake show? Each wrote 24 tokens:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

for name, function in typed_mistakes(BY_NUMBER["12"])["generate"].items():
    models = {comparison.model for comparison in check_functions("12", generate=function).wrong}
    print(f"{name:36} {len(models)} of {len(BUILTIN)}")

# %% [markdown]
# Text is weak evidence: some of these mistakes do not change the text of some model by a single token. Text does test
# the loop. (`generation-text-fed-again` ends in an error in the fifth model, whose context it fills.)
#
# Further reading:
#
# - [llama.cpp 2373](https://github.com/ggml-org/llama.cpp/issues/2373): a norm that nearly fits, found by perplexity
#   while the text was fine.
# - [transformers 43082](https://github.com/huggingface/transformers/issues/43082): wrong positions after a cache.
# - Holtzman and others, [The Curious Case of Neural Text Degeneration](https://arxiv.org/abs/1904.09751), 2019: why
#   the likeliest text is not a good text, and what to do about it ([11](../11_probabilities/README.md)).
#
# ## Stages
#
# | stage | shape | llorch's function | llama.cpp | transformers |
# | --- | --- | --- | --- | --- |
# | `generation` | (24) | [`sample_ids`](../../llorch/model/generate.py) | `llama_sampler_sample` loop | `generate` |
#
# Streaming text, stop strings, end tokens and characters split over tokens are tested in
# [`tests/model/test_generate.py`](../../tests/model/test_generate.py). No golden covers them.
#
# ## Compared values
#
# A greedy continuation of 24 tokens is compared, token for token, with the engine's loop and cache. End tokens do not
# stop it. A token may differ at a near-tie of the float64 reference (see [10](../10_argmax/PORTING.md)). Then llorch's
# text continues after the engine's token. The verdict is TIE if all differences are near-ties. No built-in model has
# one.
#
# Text is weak evidence, since many wrong forward passes still pick the same token. Therefore it comes last.
#
# <!-- generated: equal -->
# <!-- end -->
#
# ## Mistakes it catches
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_12                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

# %% [markdown]
# # 10 argmax: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.sampling.greedy -->
#
# NumPy promises the first of equals, so one call is enough.
#
# ## Where the engines differ
#
# Both engines make the same choice in every built-in model, by leads that are larger than rounding:

# %%
import numpy as np

from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import BUILTIN, goldens_folder

for name in BUILTIN:
    golden = read(goldens_folder() / name)
    chosen = {engine: int(output.selected_logits.argmax()) for engine, output in golden.engine_outputs.items()}
    best = np.sort(golden.reference.engine_output.selected_logits)[::-1]
    print(f"{name:13} {chosen}   lead {best[0] - best[1]:.2f}")

# %% [markdown]
# - llama.cpp's greedy sampler replaces its choice only by a larger logit, and `torch.argmax` returns the first maximum.
#   Both take the lowest id, as NumPy does.
# - The golden is the argmax of the engine's logits. The token that the engine itself picks is the first one of
#   [12](../12_generation/README.md).
#
# Further reading:
#
# - [`torch.argmax`](https://docs.pytorch.org/docs/stable/generated/torch.argmax.html),
#   [`numpy.argmax`](https://numpy.org/doc/stable/reference/generated/numpy.argmax.html) and
#   [`Iterator::max_by`](https://doc.rust-lang.org/std/iter/trait.Iterator.html#method.max_by): three sentences about
#   equal elements.
#
# ## Stages
#
# - stage: `argmax`, one whole number
# - llorch's function: [`greedy`](../../llorch/ops/sampling.py)
# - llama.cpp: `llama_sampler_init_greedy`
# - transformers: `argmax` in `generate`
#
# ## Compared values
#
# The argmax of llorch's row of [09](../09_selected_logits/README.md) is compared with the argmax of each engine's
# row. Ids are equal or not, so there is no tolerance. If they differ, the verdict is TIE with the gap when both
# logits of the float64 reference lie nearer to the largest one than rounding can move them. Else it is FAIL. The
# margin follows from the rounding of sums of the model's width and depth: see `Margins` in
# [`llorch/judging/tolerances/forward.py`](../../llorch/judging/tolerances/forward.py). llorch's logits do not
# enter into it.
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
# pytest -k checkpoint_10                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```

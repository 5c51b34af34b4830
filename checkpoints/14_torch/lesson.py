# %% [markdown]
# # 14 torch
#
# 45 minutes, two functions of four lines. Optional, and the only lesson that needs torch:
# `pip install 'llorch[torch]'`, or in a clone `pip install -c constraints.txt -e '.[torch]'`. Without torch the check
# says NOT RUN.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# You know the mathematics, in NumPy. This is the same model in torch, as a library would write it: with a batch in
# front of every shape, on the CPU or a GPU, in a dtype of your choice. You write two functions of this one short file,
# [`causal_lm.py`](../../llorch/pytorch/causal_lm.py): the norm of [01](../01_rms_norm/README.md) and the rotation of
# [01b](../01b_rope/README.md).
#
# ## Idea
#
# A formula does not say in which numbers it is computed. GPUs use fewer bits for speed: half the bits are half the
# memory to read for every token. Models run in three dtypes. Each stores these three numbers in its own way:

# %%
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
for dtype in DTYPES:
    print(f"{dtype!s:15}", torch.tensor([257.0, 0.1, 70000.0]).to(dtype).tolist())

# %% [markdown]
# bfloat16 has no 257: above 256 it has only every second whole number. float16 has no 70000: it ends at 65504, and
# larger numbers become infinite. This lesson follows from these two facts.
#
# The rule that keeps a model in half precision right is short. Store in half precision, compute sums and rotations in
# float32, and round once, at the end.
#
# ## The maths
#
# Rounding $x$ to $p$ binary digits moves it by half a step at most:
#
# ```math
# |\,\mathrm{round}(x) - x\,| \le u\,|x|, \qquad u = 2^{-p}
# ```
#
# | format | exponent bits | digits $p$ | $u$ | largest number | where |
# | --- | ---: | ---: | --- | --- | --- |
# | float32 | 8 | 24 | 6e-8 | 3e38 | everywhere |
# | TF32 | 8 | 11 | 5e-4 | 3e38 | factors of float32 products on NVIDIA GPUs, if switched on |
# | bfloat16 | 8 | 8 | 4e-3 | 3e38 | stored numbers |
# | float16 | 5 | 11 | 5e-4 | 65504 | stored numbers |
#
# Errors of several roundings are independent, so they grow with the root of their number: four roundings cost about
# twice as much as one. Additional roundings are therefore hard to see.
#
# ## The picture
#
# ![Bits of sign, exponent and fraction of float32, TF32, bfloat16 and float16](fig/formats.svg)
#
# Orange bits say how large a number can be, and blue bits how exact. bfloat16 is the upper half of a float32: the same
# range, with 7 bits of fraction. float16 gives three bits of the exponent to the fraction.
#
# ![The tolerance of a run of story after every layer in each dtype, and the error of both engines](fig/ladder.svg)
#
# The picture shows the tolerance of a right run of `story` after each layer, on a logarithmic scale. Below it, in grey,
# is the error of both engines in float32. The lines hardly rise. The format separates them: four decades lie between
# float32 and bfloat16, and a factor of 8 between bfloat16 and float16.
#
# ## Exercise
#
# Write `torch_rms_norm` and `torch_rope` in `l14_torch.py`:
#
# ```python
# def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...  # (..., width)
# def torch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...  # (batch, seq, heads, head_dim)
# ```
#
# ```
# llorch learn check 14
# llorch learn hint 14
# ```
#
# They replace llorch's functions in the modules that `llorch run --backend torch` runs, here on the CPU in float32 and
# bfloat16. The result must have the dtype and the device of `x`.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first wrong
# number ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and `llorch learn list` shows
# `PASS` next to 14.
#
# ## Run it
#
# Here are the embeddings of `story`, normed in each dtype and compared with float64:

# %%
import llorch
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

# yours: from l14_torch import torch_rms_norm, torch_rope
parts = {part.name: part.reference for part in BY_NUMBER["14"].parts}
torch_rms_norm, torch_rope = parts.values()
story, trace = llorch.load("story"), {}
ids = story.tokenizer.encode("Once upon a time there was a little fox")
story.forward(ids, trace=trace)
rows = torch.tensor(trace["embed"])
gain = torch.tensor(story.weights.layer(0)["attn_norm"])
exact = torch_rms_norm(rows.double(), gain.double(), 1e-5)
for dtype in DTYPES:
    y = torch_rms_norm(rows.to(dtype), gain.to(dtype), 1e-5)
    print(f"{dtype!s:15} off by ~{float((y.double() - exact).norm() / exact.norm()):.1e}")
print(check_functions("14", **parts))

# %% [markdown]
# The error is the step of the format and no more. (Gain and rows were rounded, too.)
#
# ## A mistake to plant
#
# Compute the sum of squares in float16, for speed:

# %%
wrong = typed_mistakes(BY_NUMBER["14"])["torch_rms_norm"]["norm-squares-in-half"]
for size in (1.0, 100.0, 300.0):
    normed = wrong(torch.full((1, 4), size), torch.ones(4), 1e-5)
    print(f"row of {size:5}:", normed[0].tolist())
print(check_functions("14", torch_rms_norm=wrong))

# %% [markdown]
# 300 squared is 90000, which float16 does not have. The root of infinity is infinity, and the row becomes zeros. There
# is no NaN and no warning, and the model forgets its token. After the last layer of `story`, every second token of the
# test text has an element beyond 256.
#
# The check found the mistake in float32, on small rows that are only rounded. In bfloat16 a right run may be off by
# 1.4e-2, and this mistake is 60 times smaller. So a PASS in half precision says little, and float32 is always judged as
# well. A norm that rounds after every operation is an even quieter mistake: right in float32, half a bit worse in
# bfloat16, and no test of one run can call it wrong.
#
# ## Both engines
#
# - transformers rounds twice in a norm, before the gain and after it. llama.cpp and llorch round once.
# - transformers rounds every intermediate result of a rotation, of the scores and of the activation. llorch rounds once
#   per stage.
# - llama.cpp adds the residual stream in float32. transformers and llorch add it in the dtype of the run.
# - "float32" on a GPU may be TF32, because of a process-wide switch that any library may set. Look at this switch first
#   if a run differs by 1e-3 and everything seems right.
#
# This block ends here: `llorch learn museum` lists bugs of real engines, whose cause you find from the numbers.
#
# [For porters](PORTING.md): reference code, tolerances of half precision, traps and known mistakes of this lesson.

# %% [markdown]
# # 14 torch
#
# 45 minutes, two functions of four lines. This is the only lesson that needs torch: `pip install 'llorch[torch]'`, or
# in a clone `pip install -c constraints.txt -e '.[torch]'`. Without torch the check says NOT RUN, and no later lesson
# depends on it.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# You have seen the mathematics, in NumPy. This is the same model in torch, as a library would write it: with a batch
# in front of every shape, on the CPU or a GPU, in a dtype of your choice. It is one short file,
# [`causal_lm.py`](../../llorch/pytorch/causal_lm.py). llorch runs validation points 01 to 12 again on it, for every
# device and dtype, against the same goldens. You write two of its functions, and you know both: the norm of
# [01](../01_rms_norm/README.md) and the rotation of [01b](../01b_rope/README.md).
#
# ## Idea
#
# A formula does not say in which numbers it is computed. For speed, GPUs use fewer bits: half the bits are half the
# memory to read for every token. Models run in three dtypes. Here is how each stores three numbers:

# %%
import inspect

import numpy as np
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
# This is the worst case. On average a rounding costs less than half of it, and the tolerances below count $2^{-9}$
# for bfloat16 and $2^{-12}$ for float16. Errors of several roundings are independent, so they grow with the root of
# their number: four roundings cost about twice as much as one. Additional roundings are therefore hard to see.
#
# ## The picture
#
# ![Bits of sign, exponent and fraction of float32, TF32, bfloat16 and float16](fig/formats.svg)
#
# Orange bits say how large a number can be, and blue bits how exact. bfloat16 is the upper half of a float32: the
# same range, with 7 bits of fraction. float16 gives three bits of the exponent to the fraction.
#
# ![The tolerance of a run of story after every layer in each dtype, and the error of both engines](fig/ladder.svg)
#
# The picture shows the tolerance of a right run of `story` after each layer, on a logarithmic scale. Below it, in
# grey, is the error of both engines in float32. The lines hardly rise. The format separates them: four decades lie
# between float32 and bfloat16, and a factor of 8 between bfloat16 and float16.
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
# They replace llorch's functions in the modules that `llorch run --backend torch` runs, here on the CPU in float32
# and bfloat16. The result must have the dtype and the device of `x`. With llorch's functions, the check prints:

# %%
from llorch.apps.learn.lessons import PARTS

print(check_functions("14", **{name: PARTS[name].reference for name in ("torch_rms_norm", "torch_rope")}))

# %% [markdown]
#
# ## Run it
#
# Here is the first norm of `micro-llama`, on its embeddings, in each dtype, compared with float64:

# %%
import llorch
from llorch.judging.goldens.forward import read
from llorch.pytorch.causal_lm import rms_norm
from llorch.runtime.builtin import goldens_folder

golden, model = read(goldens_folder() / "micro-llama"), llorch.load("micro-llama")
rows = torch.tensor(golden.engine_outputs["llamacpp"].traces["near"]["embed"])
gain = torch.tensor(model.weights["layers.0.attn_norm"])
reference = torch.tensor(golden.reference.engine_output.traces["near"]["l0.attn_norm"])


def format_error(y: torch.Tensor, right: torch.Tensor = reference) -> str:
    return f"~{float((y.double() - right).norm() / right.norm()):.1e}"


for dtype in DTYPES:
    y = rms_norm(rows.to(dtype), gain.to(dtype), eps=1e-5)
    print(f"{dtype!s:15} off by {format_error(y)}")

# %% [markdown]
# The error is the step of the format and no more. (Gain and rows were rounded too.) Next is a matrix product, with a
# fourth format. TF32 is never stored: the GPU drops 13 bits of each factor and adds up in float32. On a CPU one line
# imitates it:


# %%
def as_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


weight = torch.tensor(np.asarray(llorch.load("story").weights.layer(0)["gate_proj"], np.float32))
h = torch.tensor(read(goldens_folder() / "story").engine_outputs["llamacpp"].traces["near"]["l0.ffn_norm"])
exact = h.double() @ weight.double().T
print("float32 ", format_error(h @ weight.T, exact))
print("TF32    ", format_error(as_tf32(h) @ as_tf32(weight).T, exact))
for dtype in DTYPES[1:]:
    print(f"{str(dtype)[6:]:8}", format_error(h.to(dtype) @ weight.to(dtype).T, exact))

# %% [markdown]
# So "float32" on a GPU can be three decades worse than float32, because of a process-wide switch that any library may
# set. Look at this switch first if a run on a GPU differs by 1e-3 and everything seems right.
#
# ## The mistake
#
# The mistake is to compute the sum of squares in half precision, for speed.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["14"])["torch_rms_norm"]["norm-squares-in-half"]
print(inspect.getsource(wrong))
for size in (1.0, 100.0, 300.0):
    print(f"row of {size:5}:", wrong(torch.full((1, 4), size), torch.ones(4), 1e-5)[0].tolist())

# %% [markdown]
# 300 squared is 90000, which float16 does not have. The root of infinity is infinity, and the row becomes zeros.
# There is no NaN and no warning, and the model forgets its token. After the last layer of `story`, every second token
# of the test text has an element beyond 256. The largest is 2506. The small rows of the micro models do not overflow
# and are only rounded:

# %%
print(check_functions("14", torch_rms_norm=wrong))

# %% [markdown]
# The mistake shows in float32 only. The check runs your functions in bfloat16 too, where a right run may be off by
# 1.4e-2, and this mistake is 60 times smaller. No row shows the next mistake, which is the natural first draft:


# %%
def lazy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


for dtype in DTYPES[1:]:
    x, w = rows.to(dtype), gain.to(dtype)
    print(
        f"{str(dtype)[6:]:8}  rounded once {format_error(rms_norm(x, w, eps=1e-5))}"
        f"   at every step {format_error(lazy(x, w, 1e-5))}"
    )
print(check_functions("14", torch_rms_norm=lazy).label)

# %% [markdown]
# In float32 it is right. In bfloat16 it rounds after every operation and loses more than half a bit. This is worse,
# but within the rounding error, so no test of one run can call it wrong. (The verdict is BORROWED, not FAIL, because
# `torch_rope` is not written there.) In float16 the same line overflows. A PASS in half precision says little, so
# float32 is always judged as well.

# %% [markdown]
# # 14 torch: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.pytorch.causal_lm.rms_norm -->
#
# <!-- source: llorch.pytorch.causal_lm.rope -->
#
# <!-- source: llorch.pytorch.causal_lm.widened -->
#
# No line in them names a device. A tensor computed from `x` lies on the device of `x`. A tensor made from nothing
# (`torch.arange(half)`) lies on the CPU and fails on the first GPU.
#
# ## Where the engines differ
#
# On the first norm of `micro-llama`, transformers casts the divided row back to bfloat16 and then multiplies by the
# gain. It rounds twice, and llorch once. The third line rounds after every operation:

# %%
import numpy as np
import torch

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


x, w = rows.bfloat16(), gain.bfloat16()
divided = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
rounded_twice, rounded_once = w * divided.bfloat16(), rms_norm(x, w, eps=1e-5)
print(f"other bits in ~{int((rounded_twice != rounded_once).sum())} of {rounded_once.numel()} numbers")
print("rounded once ", format_error(rounded_once))
print("rounded twice", format_error(rounded_twice))
print("every time   ", format_error(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w))

# %% [markdown]
# The third is worse, but within the rounding error of bfloat16, so no test of one run can call it wrong.
#
# Next is a matrix product, with a fourth format. TF32 is never stored: the GPU drops 13 bits of each factor and adds up
# in float32. On a CPU one line imitates it:


# %%
def as_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


weight = torch.tensor(np.asarray(llorch.load("story").weights.layer(0)["gate_proj"], np.float32))
h = torch.tensor(read(goldens_folder() / "story").engine_outputs["llamacpp"].traces["near"]["l0.ffn_norm"])
exact = h.double() @ weight.double().T
print("float32 ", format_error(h @ weight.T, exact))
print("TF32    ", format_error(as_tf32(h) @ as_tf32(weight).T, exact))
for dtype in (torch.bfloat16, torch.float16):
    print(f"{str(dtype)[6:]:8}", format_error(h.to(dtype) @ weight.to(dtype).T, exact))

# %% [markdown]
# - transformers rounds in its norms twice, before the gain and after it. llama.cpp and llorch round once.
# - transformers rounds cosines and sines, both products of a rotation and their sum, scores before and after the
#   scale, the probabilities, and the two factors of the activation. llorch rounds once per stage, and does not round
#   scores and probabilities.
# - llama.cpp adds the residual stream in float32. transformers and llorch add it in the dtype of the run.
#
# Further reading:
#
# - Micikevicius and others, [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2017: which numbers may be
#   halves, and which sums may not.
# - Kalamkar and others, [A Study of BFLOAT16](https://arxiv.org/abs/1905.12322), 2019: why range counts more than
#   digits.
# - [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) in the documentation of
#   torch: batches, TF32, and sums in reduced precision.
# - `LlamaRMSNorm` in transformers
#   ([modeling_llama.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py)):
#   the cast before the gain.
#
# ## Tolerances of half precision
#
# Validation points 01 to 12 run on torch, for every device and dtype. Two questions are new. How far apart may two
# correct runs in bfloat16 or float16 be? Which mistakes can no longer be seen then?
#
# ## Formula
#
# ```math
# \begin{aligned}
# \mathrm{tolerance} &= 4 \sqrt{\textstyle\sum \mathrm{var}}\;/\;|\,\mathrm{golden}\,|,
# \qquad u_\mathrm{bfloat16} = 2^{-9}, \quad u_\mathrm{float16} = 2^{-12} \\
# \mathrm{var}(y) &= \textstyle\sum (\partial y / \partial x)^2\, \mathrm{var}(x) + 2u^2 y^2 \\
# &\quad (+\; u^2 \textstyle\sum w^2 x^2 \text{ for a product, whose weights are rounded})
# \end{aligned}
# ```
#
# ## Stages
#
# The stages are those of the stage table. Each is recorded by the line of `causal_lm.py` that makes it.
#
# | backend | weights and activations | tolerance |
# | --- | --- | --- |
# | `torch-cpu-float32`, `torch-cuda-float32` | float32, TF32 off | of 01 to 12 |
# | the same in `bfloat16`, `float16` | rounded to the dtype | of the dtype, below |
#
# In half precision, all rotations and the sums of norms, scores and softmax are computed in float32. The goldens are
# those of 01 to 12.
#
# There are several ways to run the model, and llorch judges each as a separate backend: the reference implementation
# as written, `-sdpa` (fused attention), `-fast` (all kernels that `llorch run` installs), `-reproducible`,
# `-compiled` (CUDA), and `-packed` (quantised matrices). `-batch` adds a second sequence, with padding. Fused
# attention shows no scores and no probabilities, so it is judged as one operation from `q_rope` to `attn_context`.
# [`torch.py`](../../llorch/judging/runners/torch.py) lists the backends.
#
# Rows of CUDA are NOT RUN without a device. With a device, they assert that they ran on it. *Isolated* is a whole
# pass in which the golden replaces every stage after it was recorded. So the running code computes each stage from
# the golden's inputs.
#
# ## Compared values
#
# The goldens are those of float32. The float64 reference uses the weights as they are stored. A run in half precision
# rounds the weights, so the tolerance includes this rounding. No engine runs in half precision for this. The
# tolerance is derived from the golden's numbers ([tolerances](../../llorch/judging/tolerances/forward.py)), element by
# element, with half a step of the dtype for every rounding. Isolated, the golden's inputs are rounded to the dtype
# first. Chained, errors go from stage to stage. The tolerance applies to the whole tensor, its worst element and every
# token.
#
# Such a tolerance lets a factor of 1.01 pass, because a whole tensor may be off by one per cent in random directions.
# Therefore an isolated stage in half precision is also judged by its *common factor*: the projection of the actual
# array on the golden. It is 1, up to independent roundings
# ([`factors.py`](../../llorch/judging/tolerances/factors.py)). `--json` has it as `common_factor` and
# `tolerance_factor`.
#
# Argmax (10) and text (12) of a run in half precision must equal the golden. A different token is a TIE if rounding
# every stage to the dtype can explain it: its logit in the float64 reference must be close enough to the largest. The
# text then continues after the golden's token. Probabilities (11) are made from float32 logits in every run and keep
# their tolerance. All numbers are the largest of both cases, of all layers and models.
#
# ### Isolated
#
# <!-- generated: isolated -->
# <!-- end -->
#
# ### Chained
#
# <!-- generated: chained -->
# <!-- end -->
#
# ### How the error grows
#
# `story`, chained, in the case `near`:
#
# <!-- generated: ladder -->
# <!-- end -->
#
# At every stage about a factor of 8, three bits, lies between float16 and bfloat16. So these runs differ from the
# float64 reference by rounding and by little else. The first layer costs most, since independent errors add up as the
# root of their number.
#
# ### Mistakes that half precision hides
#
# Some mistakes are smaller than these tolerances. Here every known mistake of a stage is made on the goldens' inputs
# and judged by the isolated tolerance of each dtype:
#
# <!-- generated: injected -->
# <!-- end -->
#
# `python benchmarks/missed_factors.py` injects a factor of 1.01 into every stage. In bfloat16 94 % of the isolated
# comparisons detect it, in float16 all of them. Chained comparisons in bfloat16 do not: norms pass on the errors of
# earlier stages as factors of whole rows. Isolated in bfloat16, four kinds of stages miss it. Fused attention misses
# it, because one rounded key moves all later queries. The state and the output of a delta net miss it, because one
# rounded key moves everything after it. The gate of a shared expert has only one row of weights. In some models, the
# sums of a stage have few terms.
#
# Engines in half precision do some of these on purpose. So rows in half precision alone are no evidence. The float32
# rows judge the model: there every mistake fails by ten times the tolerance. Rows in half precision then show that
# only rounding was added.
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Traps
#
# - **TF32 switched on by a library**: products of float32 matrices on CUDA keep 10 bits. Results are off by 1e-3, and
#   the float32 rows fail. The switch is process-wide.
# - **the kernel that SDPA chooses**: it depends on device, dtype, mask and head size. Some kernels round the
#   probabilities, some give NaN in a row that sees nothing.
# - **sums in bfloat16**: cuBLAS may add partial sums in the dtype (`allow_bf16_reduced_precision_reduction`). The
#   error grows with the width.
# - **rounding before the gain**: a norm that casts before it multiplies by the gain rounds twice. The difference is
#   small, but the bits are not the same.
# - **RoPE in half precision**: `model.to(torch.bfloat16)` rounds the frequencies too, and at position 4000 the angles
#   of fast pairs are off by radians (`rope-frequencies-in-bfloat16` of [01b](../01b_rope/README.md)). Positions in
#   bfloat16 are worse: above 256 not every integer exists.
# - **left padding**: a token of padding sees no key. A softmax over nothing is NaN, and 0 times NaN in a later
#   product is NaN.
# - **position ids**: with padding on the left, the first token still has position 0. If positions are counted from
#   the padding, scores hardly change, because angles are relative, and the text looks right. `q_rope`, `k_rope` and
#   the cache show the mistake.
#
# ## Check it
#
# ```
# pytest -k checkpoint_14                          # on the CPU; CUDA rows where there is a device
# llorch verify micro-llama --backend torch --dtype bfloat16
# ```

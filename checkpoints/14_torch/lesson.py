# %% [markdown]
# # 14 torch
#
# 45 minutes, two functions of four lines. The only lesson that needs torch: `pip install 'llorch[torch]'`, or in a
# clone `pip install -c constraints.txt -e '.[torch]'`. Without it the check says NOT RUN, and nothing later waits for
# it.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# The mathematics is behind you, and it ran on NumPy. This is the same model on torch, as a library would hold it:
# with a batch in front of every shape, on the CPU or a GPU, in a dtype of your choice. It fits on one page,
# [`causal_lm.py`](../../llorch/pytorch/causal_lm.py). Checkpoints 01 to 12 are run again on it, for every device and
# dtype, against the same goldens. Two of its functions are yours now, and both are old acquaintances: the norm of
# [01](../01_rms_norm/README.md) and the rotation of [01b](../01b_rope/README.md).
#
# ## Idea
#
# A formula does not say in which numbers it is computed. Other hardware chooses, and for speed it chooses fewer bits:
# half of them are half the memory to read for every token. The three dtypes that models run in, and what becomes of
# three numbers:

# %%
import inspect

import numpy as np
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
for dtype in DTYPES:
    print(f"{dtype!s:15}", torch.tensor([257.0, 0.1, 70000.0]).to(dtype).tolist())

# %% [markdown]
# bfloat16 has no 257: above 256 it knows every second number only. float16 has no 70000: it ends at 65504, and what is
# larger is infinite. Everything that this lesson is about follows from these two.
#
# The rule that keeps a model in half precision right is short. Store in half; compute sums and rotations in float32;
# round once, at the end.
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
# That is the worst case. On the average a rounding costs less than half of it, and the limits below count $2^{-9}$ for
# bfloat16 and $2^{-12}$ for float16. Errors of several roundings are independent, so they add up as the root of their
# number: four roundings cost about twice what one costs, no more. That makes them hard to see.
#
# ## The picture
#
# ![Bits of sign, exponent and fraction of float32, TF32, bfloat16 and float16](fig/formats.svg)
#
# Orange bits say how large a number can be, blue bits how exact. bfloat16 is the upper half of a float32: the same
# range, 7 bits of fraction. float16 gives three of the exponent's bits to the fraction.
#
# ![What a run of story may be off after every layer in each dtype, and what both engines are off](fig/ladder.svg)
#
# The ladder of `story`: what a right run may be off after each layer, on a logarithmic scale, and below it in grey
# what both engines *are* off in float32. The lines hardly climb. What separates them is the format: four decades
# between float32 and bfloat16, a factor of 8 between bfloat16 and float16.
#
# ## The reference
#
# <!-- source: llorch.pytorch.causal_lm.rms_norm -->
#
# <!-- source: llorch.pytorch.causal_lm.rope -->
#
# <!-- source: llorch.pytorch.causal_lm.widened -->
#
# Nothing in them names a device. A tensor that is made of `x` lies where `x` lies; a tensor made from nothing
# (`torch.arange(half)`) lies on the CPU, and fails on the first GPU.
#
# ## Run it
#
# The first norm of `micro-llama`, on its embeddings, in each dtype, beside float64:

# %%
import llorch
from llorch.builtin import goldens_folder
from llorch.pytorch.causal_lm import rms_norm
from llorch.verify.goldens import read

golden, model = read(goldens_folder() / "micro-llama"), llorch.load("micro-llama")
rows = torch.tensor(golden.evidence["llamacpp"].traces["near"]["embed"])
gain = torch.tensor(model.weights["layers.0.attn_norm"])
truth = torch.tensor(golden.truth.evidence.traces["near"]["l0.attn_norm"])


def off(y: torch.Tensor, right: torch.Tensor = truth) -> str:
    return f"~{float((y.double() - right).norm() / right.norm()):.1e}"


for dtype in DTYPES:
    y = rms_norm(rows.to(dtype), gain.to(dtype), eps=1e-5)
    print(f"{dtype!s:15} off by {off(y)}")

# %% [markdown]
# That is the step of the format and no more; gain and rows were rounded too. Then a matrix product, with the fourth
# format. TF32 is not stored anywhere: the GPU drops 13 bits of each factor and adds up in float32. On a CPU it takes a
# line to imitate:


# %%
def as_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


weight = torch.tensor(np.asarray(llorch.load("story").weights.layer(0)["gate_proj"], np.float32))
h = torch.tensor(read(goldens_folder() / "story").evidence["llamacpp"].traces["near"]["l0.ffn_norm"])
exact = h.double() @ weight.double().T
print("float32 ", off(h @ weight.T, exact))
print("TF32    ", off(as_tf32(h) @ as_tf32(weight).T, exact))
for dtype in DTYPES[1:]:
    print(f"{str(dtype)[6:]:8}", off(h.to(dtype) @ weight.to(dtype).T, exact))

# %% [markdown]
# So "float32" on a GPU can be three decades worse than float32, by a switch of the whole process that any library may
# set. That is the first thing to look at when a run on a GPU differs by 1e-3 and everything seems right.
#
# ## The mistake
#
# The sum of squares in half precision: somebody wanted the norm to be fast as well.

# %%
from llorch.learn.check import check_functions
from llorch.learn.lessons import BY_NUMBER
from llorch.learn.materials import typed_mistakes

wrong = typed_mistakes(BY_NUMBER["14"])["torch_rms_norm"]["norm-squares-in-half"]
print(inspect.getsource(wrong))
for size in (1.0, 100.0, 300.0):
    print(f"row of {size:5}:", wrong(torch.full((1, 4), size), torch.ones(4), 1e-5)[0].tolist())

# %% [markdown]
# 300 squared is 90000, which float16 does not have. The root of infinity is infinity, and the row becomes zeros: no
# NaN, no warning, a model that forgets its token. Behind the last layer of `story` every second token of the test text
# has an element beyond 256; the largest is 2506. The small rows of the micro models do not overflow. They are merely
# rounded:

# %%
print(check_functions("14", torch_rms_norm=wrong))

# %% [markdown]
# It is seen in float32 only. The check runs your functions in bfloat16 too, where a right run may be off by 1.4e-2,
# and this mistake is 60 times smaller. Here is one that no row sees, the natural first draft:


# %%
def lazy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


for dtype in DTYPES[1:]:
    x, w = rows.to(dtype), gain.to(dtype)
    print(f"{str(dtype)[6:]:8}  rounded once {off(rms_norm(x, w, eps=1e-5))}   at every step {off(lazy(x, w, 1e-5))}")
print(check_functions("14", torch_rms_norm=lazy).word)

# %% [markdown]
# In float32 it is right. In bfloat16 it rounds after every operation and loses more than half a bit: worse, within
# what rounding may do, so no test of one run can call it wrong. (BORROWED, not FAIL: `torch_rope` is not written
# there.) In float16 the same line overflows. Green in half precision says little; that is why float32 is always
# judged beside it.
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
# They take the place of ours in the modules that `llorch run --backend torch` runs, here on the CPU in float32 and
# bfloat16. What comes back has to have the dtype and the device of `x`. With ours in them:

# %%
from llorch.learn.lessons import PARTS

print(check_functions("14", **{name: PARTS[name].reference for name in ("torch_rms_norm", "torch_rope")}))

# %% [markdown]
# ## Where the engines differ
#
# On this very tensor: transformers casts the divided row back to bfloat16 and multiplies by the gain then. Two
# roundings where we have one:

# %%
x, w = rows.bfloat16(), gain.bfloat16()
divided = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
theirs, ours = w * divided.bfloat16(), rms_norm(x, w, eps=1e-5)
print(f"other bits in ~{int((theirs != ours).sum())} of {ours.numel()} numbers")
print("rounded once ", off(ours))
print("rounded twice", off(theirs))

# %% [markdown]
# - transformers rounds in its norms twice, before the gain and after it; llama.cpp and we round once.
# - transformers rounds cosines and sines, both products of a rotation, and their sum; scores before and after the
#   scale; the probabilities; and the two factors of the activation. We round once per stage, and scores and
#   probabilities not at all.
# - llama.cpp adds the residual stream in float32, transformers and we in the dtype of the run.
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
# ## What half precision is granted
#
# Checkpoints 01 to 12 on torch, for every device and dtype. What is new is how far two correct runs in bfloat16 or
# float16 may lie apart, and what can no longer be seen then.
#
# ## Formula
#
# ```math
# \begin{aligned}
# \mathrm{limit} &= 4 \sqrt{\textstyle\sum \mathrm{var}}\;/\;|\,\mathrm{golden}\,|,
# \qquad u_\mathrm{bfloat16} = 2^{-9}, \quad u_\mathrm{float16} = 2^{-12} \\
# \mathrm{var}(y) &= \textstyle\sum (\partial y / \partial x)^2\, \mathrm{var}(x) + 2u^2 y^2 \\
# &\quad (+\; u^2 \textstyle\sum w^2 x^2 \text{ for a product, whose weights are rounded})
# \end{aligned}
# ```
#
# ## Stages
#
# Those of the stage table, each observed on the page by the line that makes it.
#
# | backend | weights and activations | limit |
# | --- | --- | --- |
# | `torch-cpu-float32`, `torch-cuda-float32` | float32, TF32 off | of 01 to 12 |
# | the same in `bfloat16`, `float16` | rounded to the dtype | of the dtype, below |
#
# In half precision sums of norms, scores and softmax and all rotations are float32. The goldens are those of 01 to 12.
#
# Each of them comes in several ways to run, which are judged as backends of their own: the page as it is written,
# `-sdpa` with fused attention, `-fast` with all leaves that `llorch run` puts in, `-reproducible`, `-compiled` on
# CUDA, `-packed` where the file has quantised matrices; and with `-batch` beside another sequence, with padding.
# Fused attention shows no scores and no probabilities: from `q_rope` to `attn_context` it is judged as one op. They
# are listed in [`torch.py`](../../llorch/verify/runners/torch.py).
#
# Rows of CUDA are printed as NOT RUN where there is no device, and assert the device that they ran on where there is
# one. *Isolated* is a whole pass in which every stage is replaced by the golden's after it was recorded, so that each
# is computed from the golden's inputs by the very page that runs.
#
# ## What is compared
#
# The goldens are those of float32, and so is the truth: float64 with the weights as they are stored. Rounding the
# weights is part of what a run in half precision does, so it is part of what it is granted. No engine runs in half
# precision for this: what such a run may be off is derived from the golden's numbers
# ([`limits.py`](../../llorch/verify/limits.py)), element by element, with half a step of the dtype for every
# rounding. Isolated, the golden's inputs are rounded to the dtype first; chained, errors go from stage to stage. The
# whole tensor, its worst element and every token are held to it.
#
# Such a limit lets a factor of 1.01 pass, because a whole tensor may be off by one per cent in random directions. An
# isolated stage in half precision is therefore held to its *common factor*, too: the projection of the actual array on
# the golden, which is 1 up to what independent roundings leave in it
# ([`limits_of_factors.py`](../../llorch/verify/limits_of_factors.py)). In `--json` it is `common_factor` and
# `tolerance_factor`.
#
# Argmax (10) and text (12) of a run in half precision must be the golden's, or a token whose true logit is as large
# within what rounding every stage to the dtype costs, which is a TIE; behind it the text is begun anew with the
# golden's token. Probabilities (11) are made from float32 logits in every run and keep their limit. All numbers are
# the largest of both cases, of all layers and models.
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
# About a factor of 8, three bits, lies between float16 and bfloat16 at every place: these runs differ from the truth
# by rounding and by little else. The first layer costs most, since independent errors add up as the root of their
# number.
#
# ### What half precision cannot show
#
# At these limits some mistakes are smaller than rounding. Every known mistake of a stage, made on the goldens' inputs
# and judged by the isolated limit of each dtype:
#
# <!-- generated: teeth -->
# <!-- end -->
#
# A factor of 1.01 is planted into every stage by `python benchmarks/missed_factors.py`. In bfloat16 94 % of the
# isolated comparisons see it, in float16 all of them. Chained comparisons in bfloat16 do not: norms hand on the errors
# of earlier stages as factors of whole rows. Isolated in bfloat16, these stages miss it: fused attention (one rounded
# key moves all later queries), the state and the output of a delta net (one rounded key moves all that follows), the
# gate of a shared expert (one row of weights), and stages of some models where few numbers make up the sums.
#
# Some of these are what engines in half precision do. So rows in half precision alone are no evidence. The page is
# judged by its float32 rows, where every mistake goes red by ten times the limit; rows in half precision then say
# that nothing but rounding was added.
#
# How to read the numbers: [index](../README.md#how-to-read-a-page).
#
# ## Traps
#
# - **TF32 switched on by a library**: products of float32 matrices on CUDA keep 10 bits; results are off by 1e-3 and
#   the float32 rows fail. It is a switch of the whole process.
# - **the kernel that SDPA chooses**: it depends on device, dtype, mask and head size; some round the probabilities,
#   some give NaN in a row that sees nothing.
# - **sums in bfloat16**: cuBLAS may add partial sums in the dtype (`allow_bf16_reduced_precision_reduction`); the
#   error grows with the width.
# - **rounding before the gain**: a norm that casts before it multiplies by the gain rounds twice; harmless in size,
#   but not the same bits.
# - **RoPE in half precision**: `model.to(torch.bfloat16)` rounds the frequencies too, and at position 4000 the angles
#   of fast pairs are off by radians (`rope-frequencies-in-bfloat16` of [01b](../01b_rope/README.md)). Positions in
#   bfloat16 are worse: above 256 not every integer is one.
# - **left padding**: a token of padding sees no key: a softmax over nothing is NaN, and 0 times NaN in a later
#   product is NaN.
# - **position ids**: with padding on the left the first token still has position 0. Counted from the padding, scores
#   hardly change, because angles are relative, and the text hides it; `q_rope`, `k_rope` and the cache show it.
#
# ## Check it
#
# ```
# pytest -k checkpoint_14                          # on the CPU; CUDA rows where there is a device
# llorch verify micro-llama --backend torch --dtype bfloat16
# ```

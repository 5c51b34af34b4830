# %% [markdown]
# # 18 optimizer_step: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.training.adamw.clip_by_norm -->
#
# <!-- source: llorch.training.adamw.moments -->
#
# <!-- source: llorch.training.adamw.moved -->
#
# <!-- source: llorch.training.adamw.learning_rate -->
#
# ## Where the engines differ
#
# They differ in one way that is no mistake and larger than all roundings so far. If a gradient is about as small as
# $\epsilon$, its rounding decides the length of the first step:

# %%
import numpy as np

from llorch.training.adamw import adamw_step

HOW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
for g in (1e-2, 1e-6, 1e-8, 1e-9):
    steps = [adamw_step(np.zeros(1), np.full(1, g + d), np.zeros(1), np.zeros(1), step=1, **HOW)[0] for d in (0, 1e-9)]
    print(f"gradient {g:.0e} and 1e-9 more: {abs(steps[0] - steps[1])[0] / HOW['lr']:.4f} learning rates apart")

# %% [markdown]
# Two right engines differ by this much. So parameters are compared in units of the learning rate, and moments
# relatively. The section below derives it.
#
# Two mistakes hide at opposite ends of a run. One is there from the first step and fades. The other is zero at first
# and grows:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

typed = typed_mistakes(BY_NUMBER["18"])["adamw_step"]
rng = np.random.default_rng(0)
for wrong in ("adamw-no-bias-correction", "adamw-decay-missing"):
    p = q = np.full(1, 0.5)
    m = v = mq = vq = np.zeros(1)
    differences = {}
    for step in range(1, 301):
        g = np.full(1, 0.3 + rng.standard_normal())
        p, m, v = adamw_step(p, g, m, v, step=step, **HOW | {"weight_decay": 0.1})
        q, mq, vq = typed[wrong](q, g, mq, vq, step, 0.01, 0.9, 0.95, 1e-8, 0.1)
        differences[step] = abs(p - q)[0] / 0.01
    print(f"{wrong:26}", ", ".join(f"step {n}: {differences[n]:.3f}" for n in (1, 10, 300)), "learning rates off")

# %% [markdown]
# - torch decays before the update, bitsandbytes' CUDA kernels after it.
# - torch divides by `norm + 1e-6` when it clips, so a norm just above the limit is scaled a little below the limit.
# - transformers' schedules give step 1 the rate after zero steps: with warm-up, the first update changes nothing.
# - On a base in bfloat16, a single step is still float32 and is judged as such. In a chain, the norm and the moments
#   of step 1 are judged, and no parameters ([17](../17_gradients/PORTING.md#in-bfloat16)).
#
# Further reading:
#
# - Kingma and Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014: section 3 is the correction. Loshchilov and Hutter,
#   [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101), 2017: the W.
# - Pascanu et al., [On the difficulty of training recurrent neural networks](https://arxiv.org/abs/1211.5063), 2012:
#   where clipping by the norm comes from.
# - torch's [AdamW](https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html), with the algorithm in full.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# These are compared: moments and parameters after steps 1, 2 and 10 of a run with clipping and weight decay, and the
# norm before clipping. Isolated, a step starts from PEFT's gradients and torch's state (steps 1 and 2). Learning
# rates are compared for all steps of transformers' schedules, with warm-up. They are pure functions and must be equal
# to the last bits.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Why parameters are measured in learning rates
#
# The first step moves every parameter by $\eta\,g / (|g| + \epsilon)$, which is nearly $\eta$ times the sign of $g$.
# Its derivative is $\eta\,\epsilon / (|g| + \epsilon)^2$, at most $\eta / \epsilon$. Two correct float32 engines
# differ in a gradient by about 1e-7 of the tensor's typical size. If this size is 1e-2, they differ by 1e-9. If $|g|$
# is no larger than $\epsilon$ = 1e-8, this difference alone moves the parameter by $\eta \cdot 10^{-9} / 10^{-8}$, a
# tenth of a learning rate. Moments still agree to 1e-6.
#
# As a share of the parameter, such a difference means nothing. As a share of $\eta$, it is bounded. So moments are
# compared relatively, and parameters in units of $\eta$ (root mean square, and the worst element). The tolerance of
# the worst element is never more than 0.2 $\eta$. Isolated, the gradients are the same bits, and the tolerance is 4
# ulp of a parameter of size 1.
#
# ## Mistakes it catches
#
# `pytest tests/faults` replaces one of llorch's functions by each mistake. The test requires that this validation
# point fails first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_18                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# ```

# %% [markdown]
# # 18 optimizer_step
#
# 30 minutes, three functions. They lead from gradients to new parameters: one norm over all tensors, one factor, two
# moments, one step.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# Every number of the adapter has a gradient ([17](../17_gradients/README.md)). The simplest step subtracts it, times a
# small rate. Language models are trained with AdamW instead, which remembers earlier gradients. A wrong AdamW may not
# show in a loss curve for a hundred steps.
#
# ## Idea
#
# Gradients of different numbers differ in size by factors of thousands, and the same rate cannot suit all. So Adam
# divides: it keeps a running mean $m$ of each number's gradient and a running mean $v$ of its square, and moves by
# $m / \sqrt{v}$. This ratio does not depend on the size of the gradient. If the gradient is always the same, the step
# is one learning rate, here 0.01. If its sign changes from step to step, $m$ is small, and so is the step.

# %%
import numpy as np

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

# yours: from l18_optimizer_step import adamw_step, clip_by_norm, learning_rate
parts = {part.name: part.reference for part in BY_NUMBER["18"].parts}
clip_by_norm, adamw_step, learning_rate = parts.values()
settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
for gradients in ([1e-4] * 5, [100.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0]):
    p, m, v, path = np.zeros(1), np.zeros(1), np.zeros(1), []
    for step, gradient in enumerate(gradients, 1):
        p, m, v = adamw_step(p, np.full(1, gradient), m, v, step, **settings)
        path.append(f"{p[0]:+.4f}")
    print(f"{gradients[0]:g}, {gradients[1]:g}, ...".ljust(18), " ".join(path))

# %% [markdown]
# Clipping comes before it. One unusual batch may have a gradient a hundred times the usual size. All gradients together
# are one long vector. If it is longer than a limit, it is shortened to the limit. Its direction stays.
#
# The rate also changes over the run. It rises in the first steps, while $m$ and $v$ know little, and then falls.
#
# ## The maths
#
# ```math
# \begin{aligned}
# c &= \min\Bigl(1, \frac{\mathrm{max}}{\lVert g \rVert + 10^{-6}}\Bigr), \qquad g \leftarrow c\,g \\
# m &\leftarrow \beta_1 m + (1 - \beta_1)\,g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\,g^2 \\
# p &\leftarrow p\,(1 - \eta\lambda) - \eta\,\frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
# \end{aligned}
# ```
#
# | symbol | usual | meaning |
# | --- | --- | --- |
# | $g$ | | the gradient of a tensor; its norm is over *all* tensors |
# | $\beta_1, \beta_2$ | 0.9, 0.95 to 0.999 | how much of the old mean is kept |
# | $t$ | 1, 2, ... | number of the step in the whole run |
# | $\eta$ | 1e-4 to 1e-2 | learning rate of this step |
# | $\lambda$ | 0 to 0.1 | weight decay: every step takes away the share $\eta\lambda$ of the parameter |
# | $\epsilon$ | 1e-8 | in case $v$ is 0 |
#
# Why the corrections? Both means start at 0. After the first step $m = 0.1\,g$ and $v = 0.05\,g^2$, which is far too
# small. The factor is known: $1 - \beta^t$ for step $t$. Divided by it, the first step is exactly $\eta\,g / |g|$.
#
# By hand: $p = 1$, $g = 2$, $\eta = 0.01$, $\lambda = 0$, $t = 1$. $m = 0.2$, $v = 0.2$; corrected 2 and 4; so
# $p = 1 - 0.01 \cdot 2 / 2 = 0.99$. Without the correction: $1 - 0.01 \cdot 0.2 / 0.447 = 0.9955$.
#
# ## The picture
#
# ![The path of one weight over thirty steps, as it should be and under six mistakes](fig/path.svg)
#
# The picture shows one number of the adapter of `micro-llama` over thirty steps, from the same gradients in every line.
# The thick grey line is right. Without the correction, the first steps are half as long, and the weight never catches
# up. Decay in the gradient goes through the division and pulls as hard as the gradient. Decay that is not multiplied by
# the rate pulls 200 times too hard. A first moment that is not weighted makes ten steps in one. Without the root, the
# weight runs off the picture at once. The thin line on top of the right one has the betas exchanged: that run is only a
# little worse.
#
# ## Exercise
#
# Write three functions in `l18_optimizer_step.py`:
#
# ```python
# def clip_by_norm(grads, max_norm) -> tuple[np.ndarray, float]: ...  # all tensors in one row
# def adamw_step(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay) -> tuple: ...
# def learning_rate(step, schedule, peak, warmup_steps, total_steps) -> float: ...
# ```
#
# ```
# llorch learn check 18
# llorch learn hint 18
# llorch learn check 18 --chain      # ten steps, from your own gradients
# ```
#
# The quick check gives steps 1 and 2 torch's gradients, moments and parameters: a wrong step count is invisible in step
# 1.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first wrong
# moment or parameter ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 18.
#
# ## Run it

# %%
one = np.ones(1)
print(adamw_step(one, 2 * one, 0 * one, 0 * one, 1, **settings))
print(clip_by_norm({"a": np.array([3.0]), "b": np.array([4.0])}, max_norm=1.0))
print([round(float(learning_rate(step, "linear", 0.01, 2, 6)), 4) for step in range(7)])
print(check_functions("18", **parts))

# %% [markdown]
# The last list has two steps of warm-up, then a straight line down to 0.
#
# ## A mistake to plant
#
# Adam existed before AdamW, and had its weight decay in the gradient: $g + \lambda p$, which follows from a penalty on
# $p^2$. But then the decay goes through the division, too. A parameter with large gradients hardly decays, and one with
# small gradients decays as fast as it can move. AdamW takes the decay out of the gradient; the W stands for this. Put
# it back:

# %%
wrong = typed_mistakes(BY_NUMBER["18"])["adamw_step"]["adamw-decay-in-gradient"]
print(check_functions("18", adamw_step=wrong))

# %% [markdown]
# Other mistakes hide at opposite ends. A missing correction is there from the first step and fades. A missing decay is
# nearly zero at first and grows. Two steps with exact numbers show both.
#
# ## Both engines
#
# PEFT's adapters are stepped by torch's AdamW, with transformers' schedules.
#
# - torch decays before the update, bitsandbytes' CUDA kernels after it.
# - transformers' schedules give step 1 the rate after zero steps: with a warm-up, the first update changes nothing.
# - Two right engines may move a parameter by different amounts if its gradient is about as small as $\epsilon$. So
#   parameters are compared in units of the learning rate, and moments relatively.
#
# [For porters](PORTING.md): reference code, that derivation, compared values and all known mistakes of this lesson.

"""Known mistakes in clipping, AdamW and schedules: each maps a right function of llorch to a wrong one."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function

ADAMW = "llorch.training.adamw."
MOVED, MOMENTS, STEP, CLIP = ADAMW + "moved", ADAMW + "moments", ADAMW + "adamw_step", ADAMW + "clip_by_norm"
RATE = ADAMW + "learning_rate"
OF_MOMENTS = ("first_moment", "second_moment", "parameters")


def uncorrected(right: Function) -> Function:
    """Use the moments without bias correction."""
    return lambda p, m, v, **kw: right(p, m, v, **kw | {"step": 10**9})  # the correction is 1 then


def counted_per_tensor(right: Function) -> Function:
    """Increment the step count with every updated tensor."""
    n_updates = [0]

    def wrong(p: np.ndarray, m: np.ndarray, v: np.ndarray, **kw: Any) -> np.ndarray:
        n_updates[0] += 1
        return right(p, m, v, **kw | {"step": n_updates[0]})

    return wrong


def counted_from_zero(right: Function) -> Function:
    """Count steps from 0, so that the second step is corrected like the first."""
    return lambda p, m, v, **kw: right(p, m, v, **kw | {"step": max(1, kw["step"] - 1)})


def decay_in_gradient(right: Function) -> Function:
    """Add weight decay to the gradient."""
    return lambda p, grad, m, v, **kw: right(
        p, grad + p.dtype.type(kw["weight_decay"]) * p, m, v, **kw | {"weight_decay": 0.0}
    )


def decay_missing(right: Function) -> Function:
    """Omit weight decay."""
    return lambda p, m, v, **kw: right(p, m, v, **kw | {"weight_decay": 0.0})


def decay_not_times_rate(right: Function) -> Function:
    """Decay the parameter by wd instead of lr * wd."""
    return lambda p, m, v, **kw: right(
        (p * (1 - kw["weight_decay"])).astype(p.dtype), m, v, **kw | {"weight_decay": 0.0}
    )


def decay_after_update(right: Function) -> Function:
    """Decay the updated parameter."""

    def wrong(p: np.ndarray, m: np.ndarray, v: np.ndarray, **kw: Any) -> np.ndarray:
        factor = 1 - kw["lr"] * kw["weight_decay"]
        return (right(p, m, v, **kw | {"weight_decay": 0.0}) * factor).astype(p.dtype)

    return wrong


def eps_inside(right: Function) -> Function:
    """Divide by sqrt(v + eps)."""

    def wrong(p: np.ndarray, m: np.ndarray, v: np.ndarray, **kw: Any) -> np.ndarray:
        corrected = v / (1 - kw["betas"][1] ** kw["step"]) + kw["eps"]
        v = corrected * (1 - kw["betas"][1] ** kw["step"])
        return right(p, m, v, **kw | {"eps": 0.0}).astype(p.dtype)

    return wrong


def root_missing(right: Function) -> Function:
    """Divide by v instead of its square root: `right` takes the root of the corrected v * v."""
    return lambda p, m, v, **kw: right(p, m, v * v / (1 - kw["betas"][1] ** kw["step"]), **kw)


def betas_swapped(right: Function) -> Function:
    """Exchange the two betas, in the moments or in their correction."""
    return lambda *arrays, **kw: right(*arrays, **kw | {"betas": kw["betas"][::-1]})


def moment_not_weighted(right: Function) -> Function:
    """Compute m = b1 m + g, as in SGD with momentum."""
    return lambda grad, m, v, *, betas: ((betas[0] * m + grad).astype(grad.dtype), right(grad, m, v, betas=betas)[1])


def clip_ignored(right: Function) -> Function:
    """Compute the norm without scaling the gradients."""
    return lambda grads, *, max_norm: (dict(grads), right(grads, max_norm=max_norm)[1])


def clip_per_tensor(right: Function) -> Function:
    """Clip each tensor by its own norm."""

    def wrong(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
        clipped = {name: right({name: grad}, max_norm=max_norm)[0][name] for name, grad in grads.items()}
        return clipped, right(grads, max_norm=max_norm)[1]

    return wrong


def clip_by_value(right: Function) -> Function:
    """Clip each element to -max_norm ... max_norm."""

    def wrong(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
        cut = {name: np.clip(grad, -max_norm, max_norm) for name, grad in grads.items()}
        return cut, right(grads, max_norm=max_norm)[1]

    return wrong


def norm_of_norms(right: Function) -> Function:
    """Sum the norms of the tensors instead of their squares."""

    def wrong(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
        norm = sum(math.sqrt(float(np.square(grad, dtype=np.float64).sum())) for grad in grads.values())
        factor = min(1.0, max_norm / (norm + 1e-6))
        return {name: grad * grad.dtype.type(factor) for name, grad in grads.items()}, norm

    return wrong


def one_step_late(right: Function) -> Function:
    """Use the learning rate of the previous step."""
    return lambda step, **kw: right(max(0, step - 1), **kw)


def one_step_early(right: Function) -> Function:
    """Use the learning rate of the next step."""
    return lambda step, **kw: right(step + 1, **kw)


def decay_from_the_start(right: Function) -> Function:
    """Use the learning rate of a schedule without warm-up after the warm-up."""
    return lambda step, **kw: right(step, **kw if step < kw["warmup_steps"] else kw | {"warmup_steps": 0})


def without_warmup(right: Function) -> Function:
    """Use the peak learning rate from the first step on."""
    return lambda step, **kw: right(max(step, kw["warmup_steps"]), **kw)


_update_mistake = partial(training_mistake, cases=("step 1", "step 2"))
_schedule_mistake = partial(training_mistake, cases=("linear", "cosine"))

OPTIMIZER: tuple[Mistake[Any], ...] = (
    _update_mistake("clip-ignored", OF_MOMENTS, CLIP, clip_ignored,
        "Gradients above the largest norm went into the update as they are."),
    _update_mistake("clip-per-tensor", OF_MOMENTS, CLIP, clip_per_tensor,
        "Each tensor was clipped to the norm by itself; clip by the norm of all gradients together."),
    _update_mistake("clip-by-value", OF_MOMENTS, CLIP, clip_by_value,
        "Elements were cut off at the limit; all gradients are scaled by one factor, which keeps their direction."),
    _update_mistake("clip-norm-of-tensors-added", ("grad_norm", *OF_MOMENTS), CLIP, norm_of_norms,
        "The norms of the tensors were added up; add their squares and take the root."),
    _update_mistake("adamw-betas-swapped", ("first_moment", "second_moment"), MOMENTS, betas_swapped,
        "beta1 and beta2 were exchanged; beta1 is for the gradient, beta2, nearer to 1, for its square.",
        along=(MOVED, betas_swapped)),
    _update_mistake("adamw-moment-not-weighted", ("first_moment", "parameters"), MOMENTS, moment_not_weighted,
        "The gradient was added to the first moment whole, as momentum of SGD does; its weight is 1 - beta1."),
    _update_mistake("adamw-decay-in-gradient", OF_MOMENTS, STEP, decay_in_gradient,
        "Weight decay was added to the gradient (Adam with L2); AdamW takes it from the parameter, without moments."),
    _update_mistake("adamw-no-bias-correction", ("parameters",), MOVED, uncorrected,
        "Moments were used as they are; they start at zero and are divided by 1 - beta^t."),
    _update_mistake("adamw-step-counted-per-tensor", ("parameters",), MOVED, counted_per_tensor,
        "The count of steps went up with every tensor; there is one count, and it goes up once per step."),
    _update_mistake("adamw-step-counted-late", ("parameters",), MOVED, counted_from_zero,
        "The second step was corrected as if it were the first; t is the number of this step, from 1.",
        cases=("step 2",)),
    _update_mistake("adamw-decay-missing", ("parameters",), MOVED, decay_missing, "Weight decay has no effect."),
    _update_mistake("adamw-decay-not-times-rate", ("parameters",), MOVED, decay_not_times_rate,
        "Parameters were multiplied by 1 - weight_decay; it is 1 - lr * weight_decay."),
    _update_mistake("adamw-decay-after-update", ("parameters",), MOVED, decay_after_update,
        "The updated parameter decayed; torch decays first and then updates."),
    _update_mistake("adamw-eps-inside-root", ("parameters",), MOVED, eps_inside,
        "eps was added under the root; it is added to the root, after the bias correction."),
    _update_mistake("adamw-root-missing", ("parameters",), MOVED, root_missing,
        "The update was divided by the second moment; it is divided by its root."),
    _schedule_mistake("schedule-one-step-late", ("learning_rate",), RATE, one_step_late,
        "Each step used the rate of the previous step; the first step uses the schedule at 0 completed steps."),
    _schedule_mistake("schedule-one-step-early", ("learning_rate",), RATE, one_step_early,
        "Each step used the rate of the next step; steps are counted from 0, so a run with warm-up starts at rate 0."),
    _schedule_mistake("schedule-decays-from-the-start", ("learning_rate",), RATE, decay_from_the_start,
        "The decay ran from step 0 and jumps after the warm-up; it runs from the end of the warm-up."),
    _schedule_mistake("schedule-without-warmup", ("learning_rate",), RATE, without_warmup,
        "The rate started at its peak; it rises from 0 over the warm-up."),
)  # fmt: skip

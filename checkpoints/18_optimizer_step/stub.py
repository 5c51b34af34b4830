"""Lesson 18: one optimizer step. All gradients clipped together, AdamW for each tensor, and the rate of the step.

Write the bodies of `clip_by_norm`, `adamw_step` and `learning_rate`, save, and check them: llorch learn check 18
Change nothing in place: return new arrays.
"""

import numpy as np


def clip_by_norm(grads: dict[str, np.ndarray], max_norm: float) -> tuple[np.ndarray, float]:
    """Scale all gradients by one factor so that their common norm is at most `max_norm`.

    Args:
        grads: Gradient of every tensor by name, any shapes, float32.
        max_norm: The largest norm.

    Returns:
        The clipped gradients in one row (n,), float32, tensor after tensor in the order of `grads`; and the norm
        before. As in torch, the factor is max_norm / (norm + 1e-6), and never above 1.
    """
    raise NotImplementedError


def adamw_step(
    param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Make one AdamW step of one tensor.

    Args:
        param: The tensor, any shape, float32; `grad`, `m` and `v` have the same.
        grad: Its gradient, clipped already.
        m: Running mean of the gradient, zeros before the first step.
        v: Running mean of its square, zeros before the first step.
        step: Number of this step in the whole run, from 1.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Small number, so that the divisor is not zero.
        weight_decay: Share of the tensor that is subtracted, times lr.

    Returns:
        The new tensor, m and v.
    """
    raise NotImplementedError


def learning_rate(step: int, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Compute the learning rate of one step.

    Args:
        step: Number of steps before this one: 0 for the first.
        schedule: constant, linear or cosine: the course after the warm-up.
        peak: The rate at the end of the warm-up, in which it rises evenly from 0.
        warmup_steps: Number of steps of the warm-up.
        total_steps: Number of steps of the run, with the warm-up; linear and cosine reach 0 there.

    Returns:
        The rate.
    """
    raise NotImplementedError

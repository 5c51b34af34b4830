"""Wrong code for an optimizer step, by the name of the known mistake."""

import math
from collections.abc import Callable
from itertools import count

import numpy as np

Grads = dict[str, np.ndarray]


def norm_of(grad: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(grad, dtype=np.float64))))


def in_one_row(grads: Grads) -> np.ndarray:
    return np.concatenate([grad.ravel() for grad in grads.values()])


def norm_only_logged(grads: Grads, max_norm: float) -> tuple[np.ndarray, float]:
    flat = in_one_row(grads)
    return flat, norm_of(flat)


def each_clipped_alone(grads: Grads, max_norm: float) -> tuple[np.ndarray, float]:
    clipped = {
        name: (grad * min(1.0, max_norm / (norm_of(grad) + 1e-6))).astype(grad.dtype) for name, grad in grads.items()
    }
    return in_one_row(clipped), norm_of(in_one_row(grads))


def values_cut(grads: Grads, max_norm: float) -> tuple[np.ndarray, float]:
    flat = in_one_row(grads)
    return np.clip(flat, -max_norm, max_norm), norm_of(flat)


def norms_added(grads: Grads, max_norm: float) -> tuple[np.ndarray, float]:
    norm = sum(norm_of(grad) for grad in grads.values())
    flat = in_one_row(grads)
    return (flat * min(1.0, max_norm / (norm + 1e-6))).astype(flat.dtype), norm


def adamw(
    *, b1_of_step: Callable[[float, int], float] = lambda beta, step: beta**step,
    weight: Callable[[float], float] = lambda beta1: 1 - beta1, exchanged: bool = False, l2: bool = False,
    decay: Callable[[float, float], float] = lambda lr, weight_decay: 1 - lr * weight_decay, late: bool = False,
    divisor: Callable[[np.ndarray, float], np.ndarray] = lambda v_hat, eps: np.sqrt(v_hat) + eps,
) -> Callable[..., tuple[np.ndarray, ...]]:  # fmt: skip
    """AdamW with one wrong line."""

    def step_of(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
        if exchanged:
            beta1, beta2 = beta2, beta1
        if l2:
            grad = grad + weight_decay * param
        m = beta1 * m + weight(beta1) * grad
        v = beta2 * v + (1 - beta2) * grad * grad
        m_hat, v_hat = (mean / (1 - b1_of_step(beta, step)) for mean, beta in ((m, beta1), (v, beta2)))
        kept = 1.0 if l2 else decay(lr, weight_decay)
        update = lr * m_hat / divisor(v_hat, eps)
        return ((param - update) * kept if late else param * kept - update).astype(param.dtype), m, v

    return step_of


def counting_calls() -> Callable[..., tuple[np.ndarray, ...]]:
    """`self.t += 1`, inside the loop over tensors."""
    calls, right = count(1), adamw()
    return lambda step, **given: right(step=next(calls), **given)


def schedule(
    *, shift: int = 0, warmup: bool = True, decay_from_warmup: bool = True
) -> Callable[[int, str, float, int, int], float]:
    """The schedule with one wrong decision."""

    def rate(step: int, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
        step = max(0, step + shift)
        if step < warmup_steps:
            if warmup:
                return peak * step / warmup_steps
            step = warmup_steps
        begin = warmup_steps if decay_from_warmup else 0
        done = (step - begin) / (total_steps - begin)
        shares = {"constant": 1.0, "linear": max(0.0, 1 - done), "cosine": (1 + math.cos(math.pi * done)) / 2}
        return peak * shares[schedule]

    return rate


WRONG = {
    "clip_by_norm": {
        "clip-ignored": norm_only_logged,
        "clip-per-tensor": each_clipped_alone,
        "clip-by-value": values_cut,
        "clip-norm-of-tensors-added": norms_added,
    },
    "adamw_step": {
        "adamw-betas-swapped": adamw(exchanged=True),
        "adamw-moment-not-weighted": adamw(weight=lambda beta1: 1.0),
        "adamw-decay-in-gradient": adamw(l2=True),
        "adamw-no-bias-correction": adamw(b1_of_step=lambda beta, step: 0.0),
        "adamw-step-counted-per-tensor": counting_calls(),
        "adamw-step-counted-late": adamw(b1_of_step=lambda beta, step: beta ** max(1, step - 1)),
        "adamw-decay-missing": adamw(decay=lambda lr, weight_decay: 1.0),
        "adamw-decay-not-times-rate": adamw(decay=lambda lr, weight_decay: 1 - weight_decay),
        "adamw-decay-after-update": adamw(late=True),
        "adamw-eps-inside-root": adamw(divisor=lambda v_hat, eps: np.sqrt(v_hat + eps)),
        "adamw-root-missing": adamw(divisor=lambda v_hat, eps: v_hat + eps),
    },
    "learning_rate": {
        "schedule-one-step-late": schedule(shift=-1),
        "schedule-one-step-early": schedule(shift=1),
        "schedule-decays-from-the-start": schedule(decay_from_warmup=False),
        "schedule-without-warmup": schedule(warmup=False),
    },
}
UNTYPED: dict[str, str] = {}

"""AdamW as torch computes it: decay first, bias-corrected moments, eps outside the corrected root; and learning rates.

    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m)             v <- beta2 * v + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)          t: steps of the whole run, from 1

Weight decay is decoupled from the gradient and scaled by the rate of its own tensor. It acts on every trained tensor,
on A and B and on the magnitude of DoRA, as in PEFT under the Trainer. What it pulls to zero is the adapter, so the
model is pulled to its base; not with DoRA, whose magnitude begins as the length of the base's rows.

Learning rates are pure functions of the step: a run that is resumed has nothing to restore.

    warm-up   peak * step / warmup_steps                                                     while step < warmup_steps
    constant  peak
    linear    peak * (total_steps - step) / (total_steps - warmup_steps)
    cosine    peak * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

Steps are counted as in transformers: the first one is 0, so a run with warm-up begins with a rate of 0; linear and
cosine reach 0 one step after the last.

Source: arXiv:1711.05101; torch/optim/adamw.py and torch/nn/utils/clip_grad.py; LoRA+ arXiv:2402.12354,
peft/optimizers/loraplus.py; transformers/optimization.py, `get_{constant,linear,cosine}_schedule_with_warmup`.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jaxtyping import Float

from llorch.runtime.errors import UserError

Array = Float[np.ndarray, "*shape"]  # a trained tensor, its gradient, or one of its moments


def adamw_step(
    param: Array, grad: Array, m: Array, v: Array, *,
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One step of one tensor: the new tensor, m and v.

    The gradient is clipped already; m and v are zeros before `step` 1, which counts the whole run; `weight_decay` is
    the share of the tensor, times lr, that is taken away.
    """
    m, v = moments(grad, m, v, betas=betas)
    return moved(param, m, v, step=step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), m, v


def moments(grad: Array, m: Array, v: Array, *, betas: tuple[float, float]) -> tuple[Array, Array]:
    """Update the running means of the gradient and of its square; see `adamw_step`."""
    return m + (1 - betas[0]) * (grad - m), betas[1] * v + (1 - betas[1]) * grad * grad


def moved(
    param: Array, m: Array, v: Array, *, step: int, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float,
) -> Array:  # fmt: skip
    """Compute the tensor after decay and update, from the new moments; see `adamw_step`."""
    corrected_root = np.sqrt(v) / math.sqrt(1 - betas[1] ** step) + eps
    return param * (1 - lr * weight_decay) - lr / (1 - betas[0] ** step) * m / corrected_root


def clip_by_norm(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
    """Scale all gradients together so that their common norm is at most `max_norm`, infinity for no limit.

    Returns the gradients and the norm before; NonFiniteNorm where one holds NaN or infinity.
    """
    norm = math.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads.values()))
    if not math.isfinite(norm):
        raise NonFiniteNorm(norm, [name for name, grad in grads.items() if not np.isfinite(grad).all()])
    factor = min(1.0, max_norm / (norm + 1e-6))
    return {name: grad * grad.dtype.type(factor) for name, grad in grads.items()}, norm


def rate_factor(name: str, *, lr_ratio: float) -> float:
    """Return LoRA+'s factor of the learning rate of one tensor (`layers.3.q_proj.lora_A`).

    It is the ratio for B and for DoRA's magnitude, 1 for A. The groups are PEFT's, with one difference. PEFT gives both
    tensors of an embedding a fixed rate, 1e-6 unless it is set; here the embedding is a matrix like the others.
    """
    return 1.0 if name.endswith(".lora_A") else lr_ratio


class NonFiniteNorm(UserError):
    """The gradients have no finite norm, so that no step can be taken."""

    def __init__(self, norm: float, names: Iterable[str]) -> None:
        """Say which tensors are at fault."""
        names = list(names)
        found = f"NaN or infinity in {len(names)}: {', '.join(names[:5])}" if names else "their squares overflow"
        super().__init__(f"gradients: expected a finite norm, got {norm}; {found}; no parameter was updated")


SCHEDULES: dict[str, Callable[[int, int], float]] = {  # steps done and steps in all, after warm-up -> share of the peak
    "constant": lambda done, span: 1.0,
    "linear": lambda done, span: max(0.0, (span - done) / max(1, span)),
    "cosine": lambda done, span: max(0.0, 0.5 * (1.0 + math.cos(math.pi * (done / max(1, span))))),
}


def learning_rate(step: int, *, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Compute the learning rate of one step; `step` counts the steps before it, from 0 on.

    `peak` is the rate after `warmup_steps`, over which it rises from 0; `total_steps` include them.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if step < warmup_steps:
        return peak * (step / warmup_steps)
    return peak * SCHEDULES[schedule](step - warmup_steps, total_steps - warmup_steps)

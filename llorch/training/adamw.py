"""AdamW as in torch: decay first, bias-corrected moments, eps outside the corrected root; and learning rates.

    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m)             v <- beta2 * v + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)          t: steps of the whole run, from 1

Weight decay is decoupled from the gradient and scaled by the learning rate of the tensor. It applies to every trained
tensor: A, B and the magnitude of DoRA, as in PEFT with the Trainer. It shrinks the adapter to zero, so the model moves
towards its base. DoRA is an exception, because its magnitude starts as the norm of the base's rows.

Learning rates are pure functions of the step: a resumed run has nothing to restore.

    warm-up   peak * step / warmup_steps                                                     while step < warmup_steps
    constant  peak
    linear    peak * (total_steps - step) / (total_steps - warmup_steps)
    cosine    peak * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

Steps are counted from 0 as in transformers, so a run with warm-up begins with a rate of 0; linear and cosine reach 0
one step after the last.

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
    """Take one step for one tensor; return the new tensor, m and v.

    The gradient is already clipped. `step` counts the steps of the whole run from 1, and m and v are zeros before
    step 1. Weight decay subtracts lr * `weight_decay` times the tensor.
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
    """Scale all gradients together so that their common norm is at most `max_norm`; infinity means no limit.

    Return the gradients and the norm before; NonFiniteNorm if a gradient has NaN or infinity.
    """
    norm = math.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads.values()))
    if not math.isfinite(norm):
        raise NonFiniteNorm(norm, [name for name, grad in grads.items() if not np.isfinite(grad).all()])
    factor = min(1.0, max_norm / (norm + 1e-6))
    return {name: grad * grad.dtype.type(factor) for name, grad in grads.items()}, norm


def rate_factor(name: str, *, lr_ratio: float) -> float:
    """Return LoRA+'s factor of the learning rate of one tensor (`layers.3.q_proj.lora_A`).

    It is `lr_ratio` for B and for DoRA's magnitude, 1 for A. The groups are PEFT's, with one difference: PEFT gives
    both tensors of an embedding a fixed rate (default 1e-6); llorch treats the embedding like other matrices.
    """
    return 1.0 if name.endswith(".lora_A") else lr_ratio


class NonFiniteNorm(UserError):
    """Error for gradients without a finite norm, with which no step can be taken."""

    def __init__(self, norm: float, names: Iterable[str]) -> None:
        """Name the tensors with NaN or infinity."""
        names = list(names)
        cause = f"NaN or infinity in {len(names)}: {', '.join(names[:5])}" if names else "their squares overflow"
        super().__init__(f"gradients: expected a finite norm, got {norm}; {cause}; no parameter was updated")


SCHEDULES: dict[
    str, Callable[[int, int], float]
] = {  # (steps done, all steps), both after warm-up -> share of the peak
    "constant": lambda done, span: 1.0,
    "linear": lambda done, span: max(0.0, (span - done) / max(1, span)),
    "cosine": lambda done, span: max(0.0, 0.5 * (1.0 + math.cos(math.pi * (done / max(1, span))))),
}


def learning_rate(step: int, *, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Compute the learning rate of one step; `step` counts from 0.

    The rate rises from 0 to `peak` over `warmup_steps`; `total_steps` include the warm-up.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if step < warmup_steps:
        return peak * (step / warmup_steps)
    return peak * SCHEDULES[schedule](step - warmup_steps, total_steps - warmup_steps)

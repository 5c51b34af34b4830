"""Known mistakes of training planted into the torch path, by the names that they have in the library."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llorch.diagnosis.mistakes import MISTAKES
from llorch.pytorch import causal_lm as torch_model
from llorch.pytorch.lora import leaves
from llorch.pytorch.lora import leaves as torch_leaves
from llorch.pytorch.train import adamw as torch_adamw
from llorch.pytorch.train import forward as torch_forward
from llorch.pytorch.train import loss as torch_loss

Plant = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def alpha_alone(right: Any) -> Any:
    return lambda x, lora_A, lora_B, *, scaling, **how: right(x, lora_A, lora_B, scaling=scaling * len(lora_A), **how)


def keys_of_one_head(right: Any) -> Any:
    """Every query head has keys of its own, and only the first of each group sends a gradient back."""

    def wrong(q: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
        group = q.shape[2] // keys.shape[1]
        wide, first = keys.repeat_interleave(group, 1), torch.arange(q.shape[2]) % group == 0
        one = torch.where(first[:, None, None], wide, wide.detach())
        return right(q, one, values.repeat_interleave(group, 1), *others)

    return wrong


def not_shifted(right: Any) -> Any:
    def wrong(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = (labels.flatten() >= 0).nonzero()[:, 0]
        return hidden.flatten(0, 1)[index], labels.flatten()[index], index

    return wrong


def smoothing_missing(right: Any) -> Any:
    return lambda rows, lm_head, targets, tokens, *, smoothing: right(rows, lm_head, targets, tokens, smoothing=0.0)


def input_left_out(right: Any) -> Any:
    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x, *others = right(ctx, *grads)
        return None if d_x is None else torch.zeros_like(d_x), *others

    return staticmethod(wrong)


def graph_cut(right: Any) -> Any:
    """Recomputation as it was before torch 1.11: a block with a frozen input gets no graph."""
    return lambda forward, x, *given, **how: checkpoint(forward, x.detach(), *given, use_reentrant=False)


def with_settings(**changed: Any) -> Callable[[Any], Any]:
    """The update with other settings of the optimizer."""

    def make(right: Any) -> Any:
        def wrong(own: Any, *given: Any) -> None:
            kept = {name: getattr(own, name) for name in changed}
            vars(own).update(changed)
            right(own, *given)
            vars(own).update(kept)

        return wrong

    return make


def decay_after_update(right: Any) -> Any:
    def wrong(own: Any, names: Any, m: Any, v: Any, lr: float) -> None:
        with_settings(weight_decay=0.0)(right)(own, names, m, v, lr)
        for name in names:
            own.params[name].mul_(1 - lr * own.weight_decay)

    return wrong


def per_tensor(right: Any) -> Any:
    def wrong(optimizer: Any, max_norm: float) -> float:
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in optimizer.params.values()]))
        for parameter in optimizer.params.values():
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return norm

    return wrong


PLANTED: dict[str, Plant] = {
    "lora-scaled-twice": replaced(torch_leaves, "delta", MISTAKES["lora-scaled-twice"].wrong),
    "lora-alpha-not-divided": replaced(torch_leaves, "delta", alpha_alone),
    "loss-labels-not-shifted": replaced(torch_loss, "_trained_rows", not_shifted),
    "loss-smoothing-missing": replaced(torch_loss, "_all_at_once", smoothing_missing),
    "gradient-keys-not-summed-over-group": replaced(torch_model, "attention", keys_of_one_head),
    "gradient-lora-input-left-out": replaced(leaves.DeltaFunction, "backward", input_left_out),
    "gradient-graph-cut-between-blocks": replaced(torch_forward, "checkpoint", graph_cut),
    "clip-ignored": replaced(torch_adamw.AdamW, "clip", lambda right: lambda own, max_norm: right(own, math.inf)),
    "clip-per-tensor": replaced(torch_adamw.AdamW, "clip", per_tensor),
    "adamw-no-bias-correction": replaced(torch_adamw.AdamW, "_move", with_settings(step_count=10**9)),
    "adamw-decay-missing": replaced(torch_adamw.AdamW, "_move", with_settings(weight_decay=0.0)),
    "adamw-decay-after-update": replaced(torch_adamw.AdamW, "_move", decay_after_update),
}
AS_TRAINER = ("gradient-graph-cut-between-blocks",)  # shown by the way that saves memory

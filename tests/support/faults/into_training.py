"""Faults of training, in NumPy by the names of the library's mistakes and in torch, and the runs that they go into."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.stored_goldens import training_golden_of, training_weights_of
from helpers.torch_targets import target_or_skip
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from faults.fault import TRAINER, Inject, InjectedFault, replaced
from llorch.diagnosis.mistakes import MISTAKES, Mistake, planting
from llorch.diagnosis.mistakes.mistake import injected
from llorch.judging.expectations.adapter_files import compare_file, exported
from llorch.judging.expectations.training import comparisons, derive_tolerance, make_expectations
from llorch.judging.expectations.training_refs import Arrays
from llorch.judging.goldens.training import TrainingGolden
from llorch.judging.runners.training_numpy import NumpyTrainingRunner, Results
from llorch.judging.runners.training_torch import TorchTrainingRunner
from llorch.judging.tolerances.training import NUMPY_ONLY, can_show_mistakes
from llorch.judging.types import Comparison
from llorch.ops.numerics import DtypeName
from llorch.pytorch import causal_lm
from llorch.pytorch.lora import modules
from llorch.pytorch.train import adamw, forward, loss
from llorch.stages.comparison import Difference
from llorch.stages.training import BY_GROUP


def in_numpy(fault: InjectedFault, _: pytest.MonkeyPatch, __: Path) -> Sequence[Comparison]:
    """Comparisons of a model with a mistake of the library in the code."""
    return rows_with(MISTAKES[fault.name], fault.model)


def in_torch(fault: InjectedFault, patch: pytest.MonkeyPatch, _: Path) -> Sequence[Comparison]:
    """Comparisons up to the checkpoint of the mistake of this name."""
    IN_TORCH[fault.name](patch)
    golden, target = training_golden_of(fault.model), target_or_skip(f"torch-cpu-{fault.dtype}")
    runner = TorchTrainingRunner(training_weights_of(fault.model), golden, target, as_trainer=fault.variant == TRAINER)
    last = MISTAKES[fault.name].checkpoints[0]
    return compare(fault.model, golden, runner, last, dtype=fault.dtype, left_out=NUMPY_ONLY)


def in_float64(fault: InjectedFault, _: pytest.MonkeyPatch, __: Path) -> Sequence[Comparison]:
    """Comparisons of a group of stages in float64, with a function of llorch off by one part in a million."""
    weights, golden = training_weights_of(fault.model).astype(np.float64), training_golden_of(fault.model)
    with planting.replaced(fault.name, lambda right: _off_in(fault.name, right)):
        return _of_group(fault, NumpyTrainingRunner(weights, golden))


def in_torch_float64(fault: InjectedFault, patch: pytest.MonkeyPatch, _: Path) -> Sequence[Comparison]:
    """The comparisons of `in_float64`, of a function of the torch path."""
    owner, name = planting.find_owner(fault.name)
    patch.setattr(owner, name, _off_in(fault.name, getattr(owner, name)))
    golden, target = training_golden_of(fault.model), target_or_skip("torch-cpu-float64")
    weights, as_trainer = training_weights_of(fault.model), fault.variant == TRAINER
    return _of_group(fault, TorchTrainingRunner(weights, golden, target, as_trainer=as_trainer))


def _of_group(fault: InjectedFault, runner: NumpyTrainingRunner | TorchTrainingRunner) -> Sequence[Comparison]:
    """Comparisons of one group of stages, alone or in a chain up to gradients."""
    ((_, group),) = fault.check.over
    last = BY_GROUP[group].checkpoint
    ours: dict[str, Arrays] = {"isolated": dict(up_to(last, runner.isolated())), "chained": {}}
    if last <= "17":
        ours["chained"] = dict(up_to(last, runner.chained()))
    every = make_expectations(training_golden_of(fault.model), training_weights_of(fault.model).config, "float64")
    mine = (expectation for expectation in every if expectation.stage_ref.stage == group)
    return [c for c in comparisons(fault.model, mine, ours, "float64") if not c.note]


def _off(output: Any) -> Any:
    """Every number of a result off by one part in a million."""
    if isinstance(output, tuple):
        return tuple(map(_off, output))
    if isinstance(output, dict):
        return {name: _off(array) for name, array in output.items()}
    return output if output is None else output * (1 + 1e-6)


def _off_in(part: str, right: Any) -> Any:
    name = part.rpartition(".")[2]
    if name in ("clip", "step"):  # take one number, and are given one that is off
        return lambda optimizer, number: right(optimizer, _off(number))
    made = lambda *args, **kwargs: _off(right(*args, **kwargs))  # noqa: E731
    return staticmethod(made) if name == "backward" else made


@cache
def rows_with(mistake: Mistake[Any], model: str) -> list[Comparison]:
    """Rows of a model with a mistake in the code, checkpoint by checkpoint, up to the last of the mistake."""
    weights, golden, last = training_weights_of(model), training_golden_of(model), mistake.checkpoints[-1]
    with injected(mistake):
        runner = NumpyTrainingRunner(weights, golden)
        if last < "20":
            return compare(model, golden, runner, last)
        logits, files = exported(weights, golden)
        ours = {"isolated": dict(runner.isolated()), "chained": dict(runner.merged()) | logits}
        of_files = [compare_file(model, kind, table, golden.files[kind]) for kind, table in files.items()]
        every = make_expectations(golden, weights.config, "float32")
        mine = (expectation for expectation in every if expectation.stage_ref.checkpoint == last)
        return in_order([*comparisons(model, mine, ours, "numpy"), *of_files])


def compare(
    model: str, golden: TrainingGolden, runner: NumpyTrainingRunner | TorchTrainingRunner, last: str, *,
    dtype: DtypeName = "float32", left_out: Sequence[str] = (),
) -> list[Comparison]:  # fmt: skip
    """Rows of a runner up to a checkpoint; ten steps in a row show nothing more than one from the golden's state."""
    before = {"isolated": last, "chained": "17" if last == "18" else last}
    ours: dict[str, Arrays] = {mode: {} for mode in before}
    with suppress(ValueError):  # torch's optimizer refuses parameters without a gradient, and takes no step
        for mode, number in before.items():
            for stage_ref, array in up_to(number, getattr(runner, mode)()):
                ours[mode][stage_ref] = array
    every = make_expectations(golden, training_weights_of(model).config, dtype)
    mine = (expectation for expectation in every if expectation.stage_ref.checkpoint <= before[expectation.mode])
    return in_order(comparisons(model, mine, ours, "injected", left_out=left_out))


def in_order(comparisons: Iterable[Comparison]) -> list[Comparison]:
    return sorted(comparisons, key=lambda c: (c.stage_ref.checkpoint, c.mode != "isolated", c.mode == "exact"))


def up_to(last: str, arrays: Results) -> Results:
    """Arrays of the checkpoints up to one; isolated and chained runs make them in this order."""
    return takewhile(lambda entry: entry[0].checkpoint <= last, arrays)


def over_in_half(comparison: Comparison) -> float:
    """By what factor a row is over the tolerance of bfloat16; 0 where that has none."""
    if comparison.mode == "exact" or not can_show_mistakes(comparison.stage_ref, comparison.mode, "bfloat16"):
        return 0.0
    golden, config = training_golden_of(comparison.model), training_weights_of(comparison.model).config
    allowed = derive_tolerance(golden, config, comparison.stage_ref, comparison.mode, "bfloat16")
    return Difference(comparison.difference.error, comparison.difference.worst).over(allowed)


def alpha_alone(right: Any) -> Any:
    return lambda x, lora_A, lora_B, *, scaling, **kwargs: right(
        x, lora_A, lora_B, scaling=scaling * len(lora_A), **kwargs
    )


def keys_of_one_head(right: Any) -> Any:
    """Every query head has keys of its own, and only the first of each group sends a gradient back."""

    def wrong(q: Tensor, keys: Tensor, values: Tensor, *args: Any) -> Tensor:
        group = q.shape[2] // keys.shape[1]
        wide, first = keys.repeat_interleave(group, 1), torch.arange(q.shape[2]) % group == 0
        one = torch.where(first[:, None, None], wide, wide.detach())
        return right(q, one, values.repeat_interleave(group, 1), *args)

    return wrong


def not_shifted(right: Any) -> Any:
    def wrong(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = (labels.flatten() >= 0).nonzero()[:, 0]
        return hidden.flatten(0, 1)[index], labels.flatten()[index], index

    return wrong


def input_left_out(right: Any) -> Any:
    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x, *others = right(ctx, *grads)
        return None if d_x is None else torch.zeros_like(d_x), *others

    return staticmethod(wrong)


def graph_cut(right: Any) -> Any:
    """Recomputation as it was before torch 1.11: a block with a frozen input gets no graph."""
    return lambda block, x, *args, **kwargs: checkpoint(block, x.detach(), *args, use_reentrant=False)


def with_settings(**changed: Any) -> Callable[[Any], Any]:
    """The update with other settings of the optimizer."""

    def make(right: Any) -> Any:
        def wrong(optimizer: Any, *args: Any) -> None:
            kept = {name: getattr(optimizer, name) for name in changed}
            vars(optimizer).update(changed)
            right(optimizer, *args)
            vars(optimizer).update(kept)

        return wrong

    return make


def decay_after_update(right: Any) -> Any:
    def wrong(optimizer: Any, names: Any, m: Any, v: Any, lr: float) -> None:
        with_settings(weight_decay=0.0)(right)(optimizer, names, m, v, lr)
        for name in names:
            optimizer.params[name].mul_(1 - lr * optimizer.weight_decay)

    return wrong


def per_tensor(right: Any) -> Any:
    def wrong(optimizer: Any, max_norm: float) -> float:
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in optimizer.params.values()]))
        for parameter in optimizer.params.values():
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return norm

    return wrong


IN_TORCH: dict[str, Inject] = {
    "lora-scaled-twice": replaced(modules, "delta", MISTAKES["lora-scaled-twice"].wrong),
    "lora-alpha-not-divided": replaced(modules, "delta", alpha_alone),
    "loss-labels-not-shifted": replaced(loss, "_trained_rows", not_shifted),
    "loss-smoothing-missing": replaced(
        loss, "_all_at_once", lambda right: lambda *args, smoothing: right(*args, smoothing=0.0)
    ),
    "gradient-keys-not-summed-over-group": replaced(causal_lm, "attention", keys_of_one_head),
    "gradient-lora-input-left-out": replaced(modules.DeltaFunction, "backward", input_left_out),
    "gradient-graph-cut-between-blocks": replaced(forward, "checkpoint", graph_cut),
    "clip-ignored": replaced(adamw.AdamW, "clip", lambda right: lambda optimizer, max_norm: right(optimizer, math.inf)),
    "clip-per-tensor": replaced(adamw.AdamW, "clip", per_tensor),
    "adamw-no-bias-correction": replaced(adamw.AdamW, "_move", with_settings(step_count=10**9)),
    "adamw-decay-missing": replaced(adamw.AdamW, "_move", with_settings(weight_decay=0.0)),
    "adamw-decay-after-update": replaced(adamw.AdamW, "_move", decay_after_update),
}

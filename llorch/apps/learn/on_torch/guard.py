"""The checks of `llorch.apps.learn.guard` around a function of tensors; NumPy has no bfloat16."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import llorch.apps.learn.on_torch.ours  # noqa: F401 (before a function of llorch is replaced)
from llorch.apps.learn.calling import called, not_within_itself, require_parameters
from llorch.apps.learn.exercise import Call, Exercise
from llorch.runtime.errors import LearnerFault


def guarded_on_torch(part: Exercise, function: Call, *, note: Callable[[str], None]) -> Call:
    """Wrap a learner's function in its checks; the function is given copies."""
    function = not_within_itself(part, function)

    def call(**given: Any) -> Tensor:
        require_parameters(part, function, given)
        handed = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        got, want = called(part, function, handed), part.reference(**given)
        _require_unchanged(part, given, handed)
        _require_like(part, got, want)
        if (nan := got.isnan()).any() and not want.isnan().any():
            note(f"{part.name}: {part.returns[0]} has {int(nan.sum())} NaN of {got.numel()} numbers")
        return got.contiguous()

    return call


def _require_unchanged(part: Exercise, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, old in before.items():
        if isinstance(old, Tensor) and not torch.equal(old.nan_to_num(), after[name].nan_to_num()):
            raise LearnerFault(part.name, f"changed its argument {name}; compute into a new tensor")


def _require_like(part: Exercise, got: Any, want: Tensor) -> None:
    name = part.returns[0]
    if not isinstance(got, Tensor):
        raise LearnerFault(part.name, f"expected {name} to be a torch tensor, got {type(got).__name__}")
    if got.shape != want.shape:
        raise LearnerFault(part.name, f"expected {name} of shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if got.dtype != want.dtype:
        raise LearnerFault(part.name, f"expected {name} of dtype {want.dtype}, got {got.dtype}; end with .to(x.dtype)")
    if got.device != want.device:
        raise LearnerFault(part.name, f"expected {name} on {want.device}, got {got.device}; make it with x.device")

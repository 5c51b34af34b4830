"""The checks of `llorch.apps.learn.guard` around a function of tensors; NumPy has no bfloat16."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llorch.apps.learn.calling import called, not_within_itself, require_parameters
from llorch.apps.learn.exercise import Call, Exercise
from llorch.runtime.errors import LearnerFault


def guarded_on_torch(exercise: Exercise, function: Call, *, note: Callable[[str], None]) -> Call:
    """Wrap a learner's function in its checks; the function is given copies."""
    function = not_within_itself(exercise, function)

    def call(**given: Any) -> Tensor:
        require_parameters(exercise, function, given)
        handed = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        actual, expected = called(exercise, function, handed), exercise.reference(**given)
        _require_unchanged(exercise, given, handed)
        _require_like(exercise, actual, expected)
        if (nan := actual.isnan()).any() and not expected.isnan().any():
            note(f"{exercise.name}: {exercise.returns[0]} has {int(nan.sum())} NaN of {actual.numel()} numbers")
        return actual.contiguous()

    return call


def _require_unchanged(exercise: Exercise, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, old in before.items():
        if isinstance(old, Tensor) and not torch.equal(old.nan_to_num(), after[name].nan_to_num()):
            raise LearnerFault(exercise.name, f"changed its argument {name}; compute into a new tensor")


def _require_like(exercise: Exercise, actual: Any, expected: Tensor) -> None:
    name = exercise.returns[0]
    if not isinstance(actual, Tensor):
        raise LearnerFault(exercise.name, f"expected {name} to be a torch tensor, got {type(actual).__name__}")
    if actual.shape != expected.shape:
        raise LearnerFault(
            exercise.name, f"expected {name} of shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    if actual.dtype != expected.dtype:
        raise LearnerFault(
            exercise.name, f"expected {name} of dtype {expected.dtype}, got {actual.dtype}; end with .to(x.dtype)"
        )
    if actual.device != expected.device:
        raise LearnerFault(
            exercise.name, f"expected {name} on {expected.device}, got {actual.device}; make it with x.device"
        )

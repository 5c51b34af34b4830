"""Describe a failed comparison: the first wrong number, the pattern of the errors, and properties still right."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llorch.apps.learn.checks.forward import suite_of
from llorch.diagnosis.dump_checker import by_token, has_heads
from llorch.diagnosis.mistakes import AFTER_LOGITS
from llorch.diagnosis.patterns import describe_error, describe_mask, describe_non_finite
from llorch.diagnosis.patterns.axes import Axis
from llorch.judging.types import Comparison
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import BY_NAME

UNEXPLAINED = 1e-3  # largest share of the error that a pattern leaves, so that the first number does not contradict it
CLEAR = 10.0  # properties are still right if they differ by less than this multiple of the tolerance
CHANNELS = {  # axis: its name
    "head_dim": "dim", "q_width": "dim", "kv_width": "dim", "ctx": "key", "vocab": "token id", "topk": "slot",
    "experts": "expert", "v_heads": "head", "key_dim": "key dim", "value_dim": "value dim",
}  # fmt: skip
TRAINING_AXES = {  # group of stages -> axes, if they do not depend on the tensor
    "lora_delta": "token out", "adapted_logits": "token vocab", "merged_logits": "token vocab",
    "exported_logits": "token vocab", "token_losses": "token", "loss": "", "grad_norm": "", "learning_rate": "step",
    "loss_curve": "step", "norm_curve": "step", "merged_weight": "out in",
}  # fmt: skip


@dataclass(frozen=True)
class ComparedNumber:
    """One number of the learner and of the golden."""

    where: str
    expected: float
    actual: float

    @property
    def difference(self) -> float:
        """Difference between the learner's number and the golden's."""
        return 0.0 if self.expected == self.actual else abs(self.expected - self.actual)


class FailedComparison:
    """A failed comparison of an array that has the expected shape."""

    def __init__(self, comparison: Comparison) -> None:
        """Hold a comparison for which `has_same_shape` is true."""
        assert comparison.expectation is not None
        assert comparison.actual is not None
        self.comparison, self.expectation = comparison, comparison.expectation
        self.stage = BY_NAME.get(self.expectation.stage_ref.stage)  # None: not a stage of the forward pass
        self.expected, self.actual = (
            self._by_token(array.astype(np.float64)) for array in (self.expectation.expected, comparison.actual)
        )

    def _by_token(self, array: np.ndarray) -> np.ndarray:
        """Reshape an array to (token, head, channel) if its axes are known."""
        if self.stage is None or not {"seq", "ctx"} & set(self.stage.axes.split()):
            return array
        return by_token(array, self.stage, suite_of(self.comparison.model).weights.config)

    @cached_property
    def differences(self) -> np.ndarray:
        """Difference of every number; infinite if one side is not finite, unless both are equal (masked)."""
        with np.errstate(invalid="ignore"):
            differences = np.where(self.expected == self.actual, 0.0, np.abs(self.actual - self.expected))
        return np.where(np.isfinite(differences), differences, np.inf)

    @cached_property
    def is_wrong(self) -> np.ndarray:
        """Mask of wrong numbers: those above a single number's tolerance, else the array's, else the worst."""
        finite = self.expected[np.isfinite(self.expected)]
        for limit in (self._limit, self.expectation.tolerance.error * float(np.sqrt(np.square(finite).mean()))):
            if (self.differences > limit).any():
                return self.differences > limit
        return self.differences == self.differences.max()

    @property
    def first(self) -> ComparedNumber:
        """First wrong number, token by token."""
        return self._number(int(self.is_wrong.ravel().argmax()))

    @property
    def worst(self) -> ComparedNumber:
        """Number with the largest difference."""
        return self._number(int(self.differences.ravel().argmax()))

    def _number(self, flat_index: int) -> ComparedNumber:
        index = np.unravel_index(flat_index, self.differences.shape)
        names = self._axes()
        label = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True) if name)
        return ComparedNumber(f"[{label}]" if label else "", float(self.expected[index]), float(self.actual[index]))

    def _axes(self) -> tuple[str, ...]:
        if self.comparison.stage_ref.stage in AFTER_LOGITS:
            return ("token id",)
        if self.stage is None:
            return _training_axes(self.expectation.stage_ref) or tuple(
                f"axis {i}:" for i in range(self.differences.ndim)
            )
        axes = self.stage.axes.split()
        if not {"seq", "ctx"} & set(axes):  # a state
            return tuple(CHANNELS.get(axis, axis) for axis in axes)
        return "token", "head" if has_heads(self.stage) else "", CHANNELS.get(axes[-1], "channel")

    def pattern(self) -> str:
        """Describe the part of the array that is wrong, and its values; empty if there is no pattern."""
        shape = self.expected.shape
        if not shape:
            return ""
        nouns, labels = (name.rstrip(":") or "head" for name in self._axes()), np.ogrid[tuple(map(slice, shape))]
        axes = [Axis(noun, label, i) for i, (noun, label) in enumerate(zip(nouns, labels, strict=True))]
        return (
            describe_mask(self.actual, self.expected, axes)
            or describe_non_finite(self.actual, self.expected, {}, axes)
            or describe_error(
                self.actual, self.expected, axes, tolerance=self.expectation.tolerance.error, unexplained=UNEXPLAINED
            )
        )

    @property
    def _limit(self) -> float:
        """Largest allowed difference of one number: `tolerance.worst`, in a unit or relative to the largest number."""
        finite = np.abs(self.expected[np.isfinite(self.expected)])
        return self.expectation.tolerance.worst * (self.expectation.unit or float(finite.max(initial=0.0)))

    def _is_close(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Tell if two arrays differ by at most `CLEAR` times the tolerance, relative to `a`."""
        return bool(np.linalg.norm(a - b) <= CLEAR * self.expectation.tolerance.error * np.linalg.norm(a))

    def still_right(self) -> list[str]:
        """List the properties that a wrong array still has."""
        properties = ["shape", "dtype"]
        expected, actual = self.expected, self.actual
        if not np.isfinite(expected).all() or not np.isfinite(actual).all():
            return properties
        if self.stage is not None and self.stage.name == "attn_probs" and np.allclose(actual.sum(-1), 1, atol=1e-5):
            properties.append("every row sums to 1")
        elif expected.ndim > 1 and self._is_close(np.linalg.norm(expected, axis=-1), np.linalg.norm(actual, axis=-1)):
            properties.append(f"the length of every {'head vector' if expected.shape[1] > 1 else 'row'}")
        return properties


def _training_axes(stage_ref: StageRef) -> tuple[str, ...]:
    """Name the axes of an adapter's tensor, of a block's input, or of a group with fixed axes."""
    kind = stage_ref.part.rpartition(".")[2]
    part_axes = {"lora_A": "rank in", "lora_B": "out rank"} | dict.fromkeys(
        ("block_in", "last_block_out"), "token channel"
    )
    return tuple(TRAINING_AXES.get(stage_ref.stage, part_axes.get(kind, "")).split())


def has_same_shape(comparison: Comparison) -> bool:
    """Tell if both arrays of a comparison exist and have the same shape, so that numbers can be shown."""
    complete = comparison.expectation is not None and comparison.actual is not None
    return complete and comparison.actual.shape == comparison.expectation.expected.shape  # type: ignore[union-attr]

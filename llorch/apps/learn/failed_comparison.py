"""What is to be seen in a comparison that failed: the first wrong number, the pattern, and what is still right."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from llorch.apps.learn.checks.forward import suite_of
from llorch.diagnosis.dump_checker import by_token, has_heads
from llorch.diagnosis.mistakes import AFTER_LOGITS
from llorch.judging.types import Comparison
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import BY_NAME

CLEARLY = 10.0  # times what is allowed, so that rounding decides nothing that is said
CHANNELS = {"head_dim": "dim", "q_width": "dim", "kv_width": "dim", "ctx": "key", "vocab": "vocab"}
OF_TRAINING = {  # group of stages -> axes, where they do not depend on what it is of
    "lora_delta": "token out", "adapted_logits": "token vocab", "merged_logits": "token vocab",
    "exported_logits": "token vocab", "token_losses": "token", "loss": "", "grad_norm": "", "learning_rate": "step",
    "loss_curve": "step", "norm_curve": "step", "merged_weight": "out in",
}  # fmt: skip
CONSTANT = 1e-3  # of the error: what is left where a factor makes it


@dataclass(frozen=True)
class ComparedNumber:
    """One number beside its golden."""

    where: str
    expected: float
    actual: float

    @property
    def off(self) -> float:
        """Difference between the learner's number and the golden's."""
        return 0.0 if self.expected == self.actual else abs(self.expected - self.actual)


class FailedComparison:
    """A comparison that failed, of an array that has the shape it should have."""

    def __init__(self, comparison: Comparison) -> None:
        """Take a comparison that has an expectation and an array."""
        assert comparison.expectation is not None
        assert comparison.actual is not None
        self.comparison, self.expectation = comparison, comparison.expectation
        self.stage = BY_NAME.get(self.expectation.stage_ref.stage)
        self.expected, self.actual = (
            self._by_token(array.astype(np.float64)) for array in (self.expectation.expected, comparison.actual)
        )

    def _by_token(self, array: np.ndarray) -> np.ndarray:
        """Reshape an array to (token, head, channel) where these axes are known."""
        if self.stage is None:
            return array
        return by_token(array, self.stage, suite_of(self.comparison.model).weights.config)

    @cached_property
    def off(self) -> np.ndarray:
        """Difference of every number; infinite where one side alone masks or is not finite."""
        with np.errstate(invalid="ignore"):
            off = np.where(self.expected == self.actual, 0.0, np.abs(self.actual - self.expected))
        return np.where(np.isfinite(off), off, np.inf)

    @cached_property
    def outside(self) -> np.ndarray:
        """Which numbers are wrong: those beyond the limit of the worst, else all that are off by more than the rest."""
        finite = self.expected[np.isfinite(self.expected)]
        for limit in (self._limit, self.expectation.tolerance.error * float(np.sqrt(np.square(finite).mean()))):
            if (self.off > limit).any():
                return self.off > limit
        return self.off == self.off.max()

    @property
    def first(self) -> ComparedNumber:
        """The first that is wrong, token by token."""
        return self._number(int(self.outside.ravel().argmax()))

    @property
    def worst(self) -> ComparedNumber:
        """Number with the largest difference."""
        return self._number(int(self.off.ravel().argmax()))

    def _number(self, at: int) -> ComparedNumber:
        index = np.unravel_index(at, self.off.shape)
        names = self._axes()
        said = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True) if name)
        return ComparedNumber(f"[{said}]" if said else "", float(self.expected[index]), float(self.actual[index]))

    def _axes(self) -> tuple[str, ...]:
        if self.comparison.stage_ref.stage in AFTER_LOGITS:
            return ("token id",)
        if self.stage is None:
            return _axes_of_training(self.expectation.stage_ref) or tuple(f"axis {at}:" for at in range(self.off.ndim))
        axes = self.stage.axes.split()
        return "token", "head" if has_heads(self.stage) else "", CHANNELS.get(axes[-1], "channel")

    def pattern(self) -> str:
        """Describe which tokens, heads and channels are wrong, and what the pattern looks like."""
        if self.stage is None:
            return self._looks_like()
        names = [name for name in self._axes() if name]
        clearly = self.off > CLEARLY * self._limit
        wrong = clearly if clearly.any() else self.outside
        axes = [
            np.asarray(wrong.any(axis=tuple({0, 1, 2} - {at}))) for at in ((0, 1, 2) if len(names) == 3 else (0, 2))
        ]
        said = "; ".join(_which(name, each) for name, each in zip(names, axes, strict=True))
        looks = self._looks_like() or self._grows(axes[0])
        return f"{said} -> {looks}" if looks else said

    @property
    def _limit(self) -> float:
        """Return the largest difference of a single number that the tolerance allows."""
        finite = np.abs(self.expected[np.isfinite(self.expected)])
        return self.expectation.tolerance.worst * (self.expectation.unit or float(finite.max(initial=0.0)))

    def _grows(self, tokens: np.ndarray) -> str:
        """Describe errors of all tokens but the first, else ""."""
        first = self.expectation.stage_ref.n_cached == 0 and len(tokens) > 2
        return (
            "the mistake depends on positions or earlier tokens" if first and not tokens[0] and tokens[1:].all() else ""
        )

    def _looks_like(self) -> str:
        """Recognise a factor, another order, or a mask; empty if none of these fits."""
        masked = np.isneginf(self.expected) != np.isneginf(self.actual)
        if masked.any():
            return f"{int(masked.sum())} entries are masked on one side only"
        if not np.isfinite(self.off).all():
            return f"{int((~np.isfinite(self.off)).sum())} numbers are not finite"
        expected, actual = (np.where(np.isfinite(x), x, 0.0) for x in (self.expected, self.actual))
        if (factor := _factor(expected, actual)) is not None:
            return f"every number is {factor:.5g} times the golden"
        rows = [_factor(a, b) for a, b in zip(expected, actual, strict=True)] if expected.ndim > 1 else [None]
        if all(each is not None for each in rows):
            return "each token has a different factor"
        if self._close(np.sort(expected, axis=None), np.sort(actual, axis=None)):
            return "the same numbers in another order"
        return ""

    def _close(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Tell if two arrays differ by at most `CLEARLY` times the tolerance, relative to `a`."""
        return bool(np.linalg.norm(a - b) <= CLEARLY * self.expectation.tolerance.error * np.linalg.norm(a))

    def still_right(self) -> list[str]:
        """List the properties that a wrong array still has."""
        said = ["shape", "dtype"]
        expected, actual = self.expected, self.actual
        if not np.isfinite(expected).all() or not np.isfinite(actual).all():
            return said
        if self.stage is not None and self.stage.name == "attn_probs" and np.allclose(actual.sum(-1), 1, atol=1e-5):
            said.append("every row sums to 1")
        elif expected.ndim > 1 and self._close(np.linalg.norm(expected, axis=-1), np.linalg.norm(actual, axis=-1)):
            said.append(f"the length of every {'head vector' if expected.shape[1] > 1 else 'row'}")
        return said


def _axes_of_training(stage_ref: StageRef) -> tuple[str, ...]:
    """Name the axes of an adapter's tensor, of a block's input, or of a group with fixed axes."""
    kind = stage_ref.part.rpartition(".")[2]
    of_part = {"lora_A": "rank in", "lora_B": "out rank"} | dict.fromkeys(
        ("block_in", "last_block_out"), "token channel"
    )
    return tuple(OF_TRAINING.get(stage_ref.stage, of_part.get(kind, "")).split())


def _factor(expected: np.ndarray, actual: np.ndarray) -> float | None:
    """Return the factor of all numbers if it makes the whole difference; else None."""
    size = float(np.square(expected).sum())
    if not size:
        return None
    factor = float((expected * actual).sum()) / size
    apart, left = np.linalg.norm(actual - expected), np.linalg.norm(actual - factor * expected)
    return factor if left <= CONSTANT * apart and factor else None


def _which(name: str, wrong: np.ndarray) -> str:
    """Format which indices are right and wrong: `token 0 right, tokens 1-11 wrong`."""
    plural = name if name == "vocab" else f"{name}s"
    if wrong.all():
        return f"all {plural}" if len(wrong) > 1 else f"{name} 0"
    runs = [(is_wrong, [i for i, _ in run]) for is_wrong, run in groupby(enumerate(wrong), key=lambda each: each[1])]
    if len(runs) > 4:
        return f"{int(wrong.sum())} of {len(wrong)} {plural}"
    spoken = (f"{name} {run[0]}" if len(run) == 1 else f"{plural} {run[0]}-{run[-1]}" for _, run in runs)
    return ", ".join(f"{said} {'wrong' if bad else 'right'}" for said, (bad, _) in zip(spoken, runs, strict=True))


def is_shown(comparison: Comparison) -> bool:
    """Tell if the numbers of a comparison can be shown."""
    both = comparison.expectation is not None and comparison.actual is not None
    return both and comparison.actual.shape == comparison.expectation.expected.shape  # type: ignore[union-attr] (both are there)

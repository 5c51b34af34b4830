"""The report of one lesson: its verdict, and the lines that help a learner to find the mistake."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from textwrap import wrap

from llorch.apps.learn.failed_comparison import ComparedNumber, FailedComparison, has_same_shape
from llorch.apps.learn.lessons import BY_NUMBER
from llorch.judging.types import Cause, Comparison
from llorch.stages.comparison import FAIL, NOT_RUN, safe_ratio
from llorch.stages.table import forward_rank

BORROWED = "BORROWED"  # label of a lesson with unwritten exercises: llorch's code runs instead
WIDTH, LABEL_WIDTH = 110, 23  # columns of a line, and of the label at its start
MAX_NAMES, MAX_NOTES = 6, 2  # of a list


@dataclass(frozen=True)
class LessonReport:
    """Result of one lesson's check.

    Attributes:
        lesson: Number of the lesson.
        label: PASS, FAIL, NOT RUN or BORROWED, if no written exercise is wrong and one is not written.
        by_exercise: Comparisons by exercise name. The key is "" if several exercises were installed together.
        unwritten: Exercises that are not written.
        fault: Error of the learner's code that ended the check, with its frames; empty if the check finished.
        causes: Known mistakes, or rounding, that explain the failed comparisons.
        reason: Reason of NOT RUN.
        notes: Harmless observations that the learner should know.
        where: Wrong exercise, `my_llama/l01b_rope.py:14 rope()`; empty if there is none.
        traceback: Complete traceback of the fault.
        small_errors: First wrong result in the small cases of an exercise, by name of the exercise.
    """

    lesson: str
    label: str
    by_exercise: Mapping[str, Sequence[Comparison]] = field(default_factory=dict, repr=False)
    unwritten: Sequence[str] = ()
    fault: str = ""
    causes: Sequence[Cause] = ()
    reason: str = ""
    notes: Sequence[str] = ()
    where: str = ""
    traceback: str = field(default="", repr=False)
    small_errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def comparisons(self) -> list[Comparison]:
        """Every comparison, in the order of the exercises."""
        return [comparison for comparisons in self.by_exercise.values() for comparison in comparisons]

    @cached_property
    def failures(self) -> list[tuple[str, Comparison]]:
        """Failed comparisons with their exercise names, exercise by exercise, the earliest in the run first."""
        return [
            (exercise_name, comparison)
            for exercise_name, comparisons in self.by_exercise.items()
            for comparison in sorted(comparisons, key=_run_order)
            if comparison.verdict == FAIL
        ]

    @property
    def wrong(self) -> list[Comparison]:
        """Failed comparisons of `failures`, in its order, without the exercise names."""
        return [comparison for _, comparison in self.failures]

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the failure; only then does the first cause have no stages."""
        return bool(self.causes) and not self.causes[0].stages

    def record(self) -> dict[str, object]:
        """Return the report as JSON values, for `--json`."""
        failed = FailedComparison(self.wrong[0]) if self.wrong and has_same_shape(self.wrong[0]) else None
        return {
            "lesson": self.lesson,
            "verdict": to_verdict(self.label),
            "where": self.where,
            "compared": len(self.comparisons),
            "wrong": [c.record() for c in self.wrong],
            "first": asdict(failed.first) if failed else None,
            "worst": asdict(failed.worst) if failed else None,
            "pattern": failed.pattern() if failed else "",
            "causes": [asdict(cause) for cause in self.causes],
            "rounding": self.is_rounding,
            "unwritten": [*self.unwritten],
            "fault": self.fault,
            "small_cases": {**self.small_errors},
            "reason": self.reason,
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        """Format the report as text: at most 16 lines, one for a pass without notes."""
        head = [f"checkpoint_{self.lesson}_{BY_NUMBER[self.lesson].name}", self.label]
        if self.label == FAIL:
            run = [f"{c.model}, {c.stage_ref.run}" for c in self.wrong[:1]]
            return "\n".join(["   ".join([*head, *filter(None, [self.where]), *run]), *self._failed_lines()])
        head += [self.reason] if self.reason else []
        if right := [name for name in self.by_exercise if name and self.unwritten]:
            head.append(f"right: {', '.join(right)}")
        if self.unwritten:
            head.append(f"not written yet, llorch's code runs instead: {', '.join(self.unwritten)}")
        if self.comparisons:
            head += [*_summarise_pass(self.comparisons), "next: llorch learn next"]
        notes = [*(f"not your bug: {cause.sentence}" for cause in self.causes if self.is_rounding), *self.notes]
        return "\n".join(["   ".join(head), *(f"  {note}" for note in notes)])

    def _failed_lines(self) -> Iterator[str]:
        for line in self.fault.splitlines():
            yield f"  {line}"
        for name, error in [*self.small_errors.items()][:1]:
            yield from _line("small case", f"{name} {error}")
        if self.wrong and has_same_shape(self.wrong[0]):
            yield from self._number_lines(FailedComparison(self.wrong[0]))
        elif self.wrong:
            comparison = self.wrong[0]
            reason = comparison.note or f"error {comparison.difference.error:.1e}"
            yield from _line("first wrong", f"{_stage_key(comparison)}   {reason}")
        if self.wrong or self.small_errors or self.causes:
            yield from self._diagnosis_lines()
        for note in self.notes[:MAX_NOTES]:
            yield from _line("note", note)
        if len(self.notes) > MAX_NOTES:
            yield from _line("", f"({len(self.notes) - MAX_NOTES} more notes)")
        yield from _line("hint", f"llorch learn hint {self.lesson}")

    def _number_lines(self, failed: FailedComparison) -> Iterator[str]:
        comparison, first, worst = failed.comparison, failed.first, failed.worst
        location, numbers = f"{_stage_key(comparison)} {first.where}", _format_number(first)
        fits = len(f"{location}   {numbers}") <= WIDTH - LABEL_WIDTH
        yield from _line("first wrong number", f"{location}   {numbers}" if fits else location)
        yield from () if fits else _line("", numbers)
        yield from _line("worst", f"{worst.where}   difference {worst.difference:.1e}")
        engine_error = comparison.engine_error
        engine_text = "" if math.isnan(engine_error) else f" (engine's own error {engine_error:.0e})"
        tolerance = f"tolerance {comparison.tolerance.error:.1e}{engine_text}"
        if not comparison.tolerance.error:
            tolerance = "all must be equal"
        error = f"error {comparison.difference.error:.1e}, {tolerance}"
        extent = f"{int(failed.is_wrong.sum())} of {failed.differences.size} numbers; {comparison.note or error}"
        yield from _line("how much", extent)
        if pattern := failed.pattern():
            yield from _line("pattern", pattern)
        right = [", ".join(failed.still_right()), *self._right_names()]
        if right != ["shape, dtype"]:
            yield from _line("still right", "; ".join(right))

    def _right_names(self) -> Iterator[str]:
        """Yield a list of the stages, and one of the models, that are right in every comparison."""
        wrong_stages, wrong_models = {c.stage_ref.name for c in self.wrong}, {c.model for c in self.wrong}
        stages = dict.fromkeys(c.stage_ref.name for c in self.comparisons if c.stage_ref.name not in wrong_stages)
        models = dict.fromkeys(c.model for c in self.comparisons if c.model not in wrong_models)
        for prefix, names in (("", stages), ("all of ", models)):
            if names:
                more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
                yield f"{prefix}{', '.join([*names][:MAX_NAMES] + more)}"

    def _diagnosis_lines(self) -> Iterator[str]:
        """Yield the lines that name the mistake, and other mistakes with the same results."""
        if not self.causes:
            yield from _line("diagnosis", "this matches no known mistake")
        for label, cause in zip(("diagnosis", "or"), self.causes, strict=False):
            yield from _line(label, cause.name + (f" ({cause.value})" if cause.value else ""))
            yield from _line("", cause.sentence)
        if more := [cause.name for cause in self.causes[2 : 2 + MAX_NAMES]]:
            yield from _line("or", ", ".join(more))


def _run_order(comparison: Comparison) -> tuple[float, ...]:
    """Return a sort key: first isolated comparisons, then few cached tokens, then case `near`, then early stages."""
    stage_ref = comparison.stage_ref
    rank = forward_rank(stage_ref.stage, stage_ref.layer)
    return comparison.mode != "isolated", stage_ref.n_cached, stage_ref.case != "near", *rank


def _line(label: str, text: str) -> Iterator[str]:
    first, *more_lines = wrap(text, WIDTH - LABEL_WIDTH, break_on_hyphens=False) or [""]
    yield f"  {label:<{LABEL_WIDTH - 2}}{first}".rstrip()
    yield from (f"{'':<{LABEL_WIDTH}}{line}" for line in more_lines)


def _stage_key(comparison: Comparison) -> str:
    layer = "" if comparison.stage_ref.layer is None else f" of layer {comparison.stage_ref.layer}"
    return f"{comparison.stage_ref.name}{layer}"


def _format_number(number: ComparedNumber) -> str:
    """Format a number as expected, got and difference."""
    return f"expected {number.expected:+.5g}   got {number.actual:+.5g}   difference {number.difference:.1e}"


def _summarise_pass(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Describe the comparison that is nearest to its tolerance, and count comparisons and models."""
    worst = max(comparisons, key=lambda c: safe_ratio(c.difference.error, c.tolerance.error))
    engine_text = "" if math.isnan(worst.engine_error) else f", the engine's own ~{worst.engine_error:.0e}"
    if worst.tolerance.error or worst.difference.error:
        yield f"worst error ~{worst.difference.error:.1e}, tolerance ~{worst.tolerance.error:.1e}{engine_text}"
    counts = {"comparison": len(comparisons), "model": len({c.model for c in comparisons})}
    yield ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())


def to_verdict(label: str) -> str:
    """Return the verdict of a label: BORROWED is NOT RUN."""
    return NOT_RUN if label == BORROWED else label

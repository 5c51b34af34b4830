"""The verdict of one lesson, and what a person needs to go on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from textwrap import wrap

from llorch.apps.learn.failed_comparison import ComparedNumber, FailedComparison, is_shown
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS
from llorch.diagnosis.verdict import percent
from llorch.judging.types import Cause, Comparison
from llorch.stages.comparison import FAIL, NOT_RUN, times_over
from llorch.stages.table import STAGES

BORROWED = "BORROWED"
WIDTH, LABEL, LISTED, NOTES = 110, 23, 6, 2
_ORDER = {stage.name: at for at, stage in enumerate(STAGES)}


@dataclass(frozen=True)
class LessonReport:
    """What is said of one lesson.

    Attributes:
        lesson: Its number.
        label: The verdict PASS, FAIL or NOT RUN, or BORROWED: a part is not written, and nothing written is wrong.
        by_part: Every comparison, by the part that alone was in place; by "" where several were.
        unwritten: Parts that are not written.
        fault: What the learner's code did that nothing can go on with, with its frames; empty if it ran.
        causes: Known mistakes that make what failed; see `Check.find_causes`.
        reason: Why it did not run.
        notes: What is harmless but worth knowing.
        where: The part that is wrong, `my_llama/l01b_rope.py:14 rope()`; empty if nothing is.
        traceback: Of the fault, all of it.
    """

    lesson: str
    label: str
    by_part: Mapping[str, Sequence[Comparison]] = field(default_factory=dict, repr=False)
    unwritten: Sequence[str] = ()
    fault: str = ""
    causes: Sequence[Cause] = ()
    reason: str = ""
    notes: Sequence[str] = ()
    where: str = ""
    traceback: str = field(default="", repr=False)

    @property
    def comparisons(self) -> list[Comparison]:
        """Every comparison, in the order of the parts."""
        return [comparison for comparisons in self.by_part.values() for comparison in comparisons]

    @cached_property
    def wrong_by_part(self) -> list[tuple[str, Comparison]]:
        """The comparisons that failed, each with its part, the one to begin with first."""
        return [
            (part, comparison)
            for part, comparisons in self.by_part.items()
            for comparison in sorted(comparisons, key=_place_in_run)
            if comparison.verdict == FAIL
        ]

    @property
    def wrong(self) -> list[Comparison]:
        """The comparisons that failed, the one to begin with first."""
        return [comparison for _, comparison in self.wrong_by_part]

    @property
    def is_rounding(self) -> bool:
        """True if what failed is arithmetic: another hardware or library, no mistake."""
        return bool(self.causes) and not self.causes[0].stages

    def record(self) -> dict[str, object]:
        """Return the verdict as `--json` gives it."""
        first = FailedComparison(self.wrong[0]) if self.wrong and is_shown(self.wrong[0]) else None
        return {
            "lesson": self.lesson,
            "verdict": verdict_of(self.label),
            "where": self.where,
            "compared": len(self.comparisons),
            "wrong": [each.record() for each in self.wrong],
            "first": asdict(first.first) if first else None,
            "worst": asdict(first.worst) if first else None,
            "pattern": first.pattern() if first else "",
            "causes": [asdict(each) | {"near_miss": each.kind == "near miss"} for each in self.causes],
            "rounding": self.is_rounding,
            "unwritten": [*self.unwritten],
            "fault": self.fault,
            "reason": self.reason,
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        """Format the verdict for a person: under 15 lines, one line for a pass."""
        head = [f"checkpoint_{self.lesson}_{BY_NUMBER[self.lesson].name}", self.label]
        if self.label == FAIL:
            run = [f"{c.model}, {c.stage_ref.run}" for c in self.wrong[:1]]
            return "\n".join(["   ".join([*head, *filter(None, [self.where]), *run]), *self._failed()])
        head += [self.reason] if self.reason else []
        if self.unwritten:
            head.append(f"not written yet, llorch's code runs instead: {', '.join(self.unwritten)}")
        if self.comparisons:
            head += [*_passed(self.comparisons), *_next(self.lesson)]
        notes = [*(f"not your bug: {each.sentence}" for each in self.causes if self.is_rounding), *self.notes]
        return "\n".join(["   ".join(head), *(f"  {note}" for note in notes)])

    def _failed(self) -> Iterator[str]:
        for line in self.fault.splitlines():
            yield f"  {line}"
        if self.wrong and is_shown(self.wrong[0]):
            yield from self._numbers(FailedComparison(self.wrong[0]))
        elif self.wrong:
            comparison = self.wrong[0]
            reason = comparison.note or f"error {comparison.difference.error:.1e}"
            yield from _line("first wrong", f"{_stage_key(comparison)}   {reason}")
        if self.wrong:
            yield from self._diagnosis_lines()
        for note in self.notes[:NOTES]:
            yield from _line("note", note)
        if len(self.notes) > NOTES:
            yield from _line("", f"({len(self.notes) - NOTES} more notes)")
        yield from _line("hint", f"llorch learn hint {self.lesson}")

    def _numbers(self, wrong: FailedComparison) -> Iterator[str]:
        comparison, first, worst = wrong.comparison, wrong.first, wrong.worst
        begins, beside = f"{_stage_key(comparison)} {first.where}", _format_number(first)
        fits = len(f"{begins}   {beside}") <= WIDTH - LABEL
        yield from _line("first wrong number", f"{begins}   {beside}" if fits else begins)
        yield from () if fits else _line("", beside)
        yield from _line("worst", f"{worst.where}   difference {worst.off:.1e}")
        engines = "" if math.isnan(comparison.engine_error) else f" (engine's own error {comparison.engine_error:.0e})"
        error = f"error {comparison.difference.error:.1e}, tolerance {comparison.tolerance.error:.1e}{engines}"
        how_much = f"{int(wrong.outside.sum())} of {wrong.off.size} numbers; {comparison.note or error}"
        yield from _line("how much", how_much)
        if pattern := wrong.pattern():
            yield from _line("pattern", pattern)
        yield from _line("still right", "; ".join([", ".join(wrong.still_right()), *self._others()]))

    def _others(self) -> Iterator[str]:
        """Yield the stages, models and parts that are right in every comparison."""
        bad = {each.stage_ref.name for each in self.wrong}, {each.model for each in self.wrong}
        stages = dict.fromkeys(each.stage_ref.name for each in self.comparisons if each.stage_ref.name not in bad[0])
        models = dict.fromkeys(each.model for each in self.comparisons if each.model not in bad[1])
        for said, names in (("", stages), ("all of ", models)):
            if names:
                listed = [*names][:LISTED] + ([f"{len(names) - LISTED} more"] if len(names) > LISTED else [])
                yield f"{said}{', '.join(listed)}"

    def _diagnosis_lines(self) -> Iterator[str]:
        """Yield the lines that name the mistake, and mistakes that explain the error as well or nearly."""
        near = [each for each in self.causes if each.kind == "near miss"]
        named = [each for each in self.causes if each.kind != "near miss"]
        if named:
            first, *alike = named
            value = f" ({first.value})" if first.value else ""
            yield from _line("diagnosis", f"{first.name}{value}: {_explains(first)}")
            yield from _line("", first.sentence)
            if alike:
                yield from _line("as well", ", ".join(each.name for each in alike))
        else:
            yield from _line("diagnosis", "this matches no known mistake")
        if near:
            said = ", ".join(f"{each.name} ({percent(each.explained_share)})" for each in near)
            yield from _line("not the cause" if named else "nearest", said)


def _explains(cause: Cause) -> str:
    return f"explains {percent(cause.explained_share)} of the error" if cause.remaining else "explains the whole error"


def _place_in_run(each: Comparison) -> tuple[float, ...]:
    """Return a sort key: isolated before chained, the beginning of a text before its end, the first stage first."""
    stage_ref = each.stage_ref
    layer = stage_ref.layer
    if layer is None:
        layer = -1 if stage_ref.stage == "embed" else math.inf
    is_far, order = stage_ref.case != "near", _ORDER.get(stage_ref.stage, 0)
    return each.mode != "isolated", stage_ref.n_cached, is_far, layer, order


def _line(label: str, said: str) -> Iterator[str]:
    first, *rest = wrap(said, WIDTH - LABEL, break_on_hyphens=False) or [""]
    yield f"  {label:<{LABEL - 2}}{first}".rstrip()
    yield from (f"{'':<{LABEL}}{line}" for line in rest)


def _stage_key(comparison: Comparison) -> str:
    layer = "" if comparison.stage_ref.layer is None else f" of layer {comparison.stage_ref.layer}"
    return f"{comparison.stage_ref.name}{layer}"


def _format_number(number: ComparedNumber) -> str:
    """Format one number as expected, got and difference."""
    return f"expected {number.expected:+.5g}   got {number.actual:+.5g}   difference {number.off:.1e}"


def _passed(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Describe the comparison that is nearest to its tolerance, and count the comparisons."""
    worst = max(comparisons, key=lambda c: times_over(c.difference.error, c.tolerance.error))
    engines = "" if math.isnan(worst.engine_error) else f", the engine's own ~{worst.engine_error:.0e}"
    if worst.tolerance.error or worst.difference.error:
        yield f"worst error ~{worst.difference.error:.1e}, tolerance ~{worst.tolerance.error:.1e}{engines}"
    yield f"{len(comparisons)} comparisons, {len({c.model for c in comparisons})} models"


def _next(number: str) -> Iterator[str]:
    """Name the lesson after this one."""
    for lesson in LESSONS[LESSONS.index(BY_NUMBER[number]) + 1 :][:1]:
        yield f"next: {lesson.number} {lesson.name}"


def verdict_of(label: str) -> str:
    """Return the verdict of a label: what is not written is NOT RUN."""
    return NOT_RUN if label == BORROWED else label

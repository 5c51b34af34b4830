"""Verdict on an engine for one input. A bug is confirmed only if a correction from outside makes it go away.

An input has control inputs, which differ from it in one thing: the style of the configuration, or one feature. If an
engine is wrong on an input and right on a control input, that one correction is the cause. Two corrections at once
could blame one mistake for the effect of two: such an input stays `wrong`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.judging import EngineRunReport
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS

RIGHT, HONEST, BUG, WRONG, NOT_RUN = "right", "honest difference", "bug", "wrong", "not run"
UNREADABLE = "unreadable"
_EXACT = "float32"
_OF_READING = frozenset(mistake.name for mistake in QUANTISED_FOLDERS)  # no adapter can make one


@dataclass(frozen=True)
class EngineReport:
    """Line of the table.

    Attributes:
        engine: Its name.
        way: Name of the options that it ran with; empty for its defaults.
        input: Input of the engine.
        verdict: `right`, `honest difference`, `bug`, `wrong` (no correction confirmed a cause), `refused`, `crashed`,
            `hung`, `too large`, `unreadable` (the adapter wrote no dump of this input), `not run`.
        said: Message of the engine, or the known cause.
        version: Version of the engine.
        seconds: Duration of the run.
        run_report: Distances, if the run ended well.
        confirmed_by: Control input on which it is right.
        correction: Difference of the control input, in words.
        agreed: Distances on the control input.
    """

    engine: str
    way: str
    input: AtlasInput
    verdict: str
    said: str = ""
    version: str = ""
    seconds: float = 0.0
    run_report: EngineRunReport | None = None
    confirmed_by: AtlasInput | None = None
    correction: str = ""
    agreed: EngineRunReport | None = None

    def record(self) -> dict[str, Any]:
        """Convert a verdict to plain values for JSON; the writer must replace NaN and infinity."""
        made = _round_to_three_digits(asdict(self)) | {"input": self.input.name}
        return made | {"confirmed_by": self.confirmed_by.name if self.confirmed_by else None}


def word_of(run_report: EngineRunReport) -> tuple[str, str]:
    """Choose the verdict of a run that ended well, before any cause is confirmed, and describe the known cause."""
    if run_report.is_right and run_report.tie:
        return HONEST, f"{run_report.arithmetic}; experts at a tie: {run_report.tie}"
    if run_report.is_right:
        return (RIGHT, "") if run_report.arithmetic == _EXACT else (HONEST, run_report.arithmetic)
    if (
        run_report.stages[-1].over <= 1 and run_report.wrong and run_report.mistake not in _OF_READING
    ):  # nothing came of it: it is not what the engine went on with
        off = max(run_report.stages, key=lambda row: row.over)
        return (
            UNREADABLE,
            f"the array named {off.stage} differs by {off.over:.0f} times the tolerance, but the logits are right",
        )
    said = run_report.findings[0] if run_report.findings else ""
    return (WRONG if run_report.wrong else HONEST), said


def confirmed(verdicts: Sequence[EngineReport]) -> Iterator[EngineReport]:
    """Mark a wrong verdict as a bug if a control input made the engine agree; the verdict then names the cause."""
    by_place: Mapping[tuple[str, str, AtlasInput], EngineReport] = {
        (each.engine, each.way, each.input): each for each in verdicts
    }
    for each in verdicts:
        controls = each.input.controls if each.verdict == WRONG else []
        tried = [by_place.get((each.engine, each.way, one)) for one in controls]
        control = next((one for one in tried if one is not None and one.verdict in (RIGHT, HONEST)), None)
        if control is None:
            yield each
        else:
            correction = _correction(each.input, control.input)
            yield replace(
                each, verdict=BUG, confirmed_by=control.input, correction=correction, agreed=control.run_report
            )


def _correction(this: AtlasInput, control: AtlasInput) -> str:
    """Describe the control input by its difference from `this`: the feature it lacks, or the style of its keys."""
    if this.style == control.style:
        return f"the same model without {this.feature}"
    return f"the same rope keys {'at the top of config.json' if control.style == 'old' else 'under rope_parameters'}"


def _round_to_three_digits(value: Any) -> Any:
    """Round every number to three digits."""
    if isinstance(value, dict):
        return {key: _round_to_three_digits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_round_to_three_digits(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value

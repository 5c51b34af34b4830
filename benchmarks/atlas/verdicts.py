"""Verdict on an engine for one input. A cause is confirmed only if a correction from outside makes the error go away.

An input has control inputs, which differ from it in one thing: the style of the configuration, or one feature. If an
engine is wrong on an input and right on a control input, that one correction is the cause. Two corrections at once
could blame one mistake for the effect of two: the cause of such an input stays unconfirmed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.atlas.inputs import AtlasInput
from benchmarks.atlas.judging import EngineRunReport, over_tolerance
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS
from llorch.stages.comparison import FAIL, PASS, ROUNDING

DONE, UNREADABLE = "done", "unreadable"  # outcomes; for others see RunEnd
CAUSE_CONFIRMED = "FAIL, cause confirmed"
_EXACT = "float32"
_READING_MISTAKES = frozenset(mistake.name for mistake in QUANTISED_FOLDERS)  # no adapter can cause them


@dataclass(frozen=True)
class EngineReport:
    """Line of the table: one engine, option set and input.

    Attributes:
        engine: Name of the engine.
        way: Name of the options that it ran with; empty for its defaults.
        input: Input of the engine.
        outcome: End of the run: `done`, `refused`, `crashed`, `hung`, `too large`, or `unreadable` (the adapter wrote
            no dump of this input). Empty without a run.
        verdict: PASS, ROUNDING, FAIL or NOT RUN; empty for a run that is not done.
        message: Message of the engine, or the known cause.
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
    outcome: str = DONE
    verdict: str = ""
    message: str = ""
    version: str = ""
    seconds: float = 0.0
    run_report: EngineRunReport | None = None
    confirmed_by: AtlasInput | None = None
    correction: str = ""
    agreed: EngineRunReport | None = None

    @property
    def cause_confirmed(self) -> bool:
        """True if the engine is right on a control input."""
        return self.confirmed_by is not None

    @property
    def label(self) -> str:
        """Verdict of a run that is done, with `cause confirmed` if it is; outcome of any other run."""
        return CAUSE_CONFIRMED if self.cause_confirmed else self.verdict or self.outcome

    def record(self) -> dict[str, Any]:
        """Convert a report to plain values for JSON; the writer must replace NaN and infinity."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"input": self.input.name}
        values |= {key: run and run.record() for key, run in (("run_report", self.run_report), ("agreed", self.agreed))}
        confirmed_by = self.confirmed_by.name if self.confirmed_by else None
        return _round_to_three_digits(values | {"cause_confirmed": self.cause_confirmed, "confirmed_by": confirmed_by})


def with_verdict(report: EngineReport, run_report: EngineRunReport) -> EngineReport:
    """Add the verdict of a run that is done, before any cause is confirmed, and a message on its known cause."""
    verdict, message = _choose_verdict(run_report)
    outcome = DONE if verdict else UNREADABLE
    return replace(report, outcome=outcome, verdict=verdict, message=message, run_report=run_report)


def _choose_verdict(run_report: EngineRunReport) -> tuple[str, str]:
    """Choose a verdict and describe the known cause; no verdict if the dump does not show what the engine computed."""
    if run_report.is_right and run_report.tie:
        return ROUNDING, f"{run_report.arithmetic}; experts at a tie: {run_report.tie}"
    if run_report.is_right:
        return (PASS, "") if run_report.arithmetic == _EXACT else (ROUNDING, run_report.arithmetic)
    is_reading = run_report.mistake in _READING_MISTAKES
    if run_report.wrong and run_report.has_right_logits and not is_reading:  # the engine did not use what it showed
        worst = max(run_report.comparisons, key=over_tolerance)
        excess = f"differs by {over_tolerance(worst):.0f} times the tolerance, but the logits are right"
        return "", f"the array named {worst.stage_ref.stage} {excess}"
    return (FAIL if run_report.wrong else ROUNDING), next(iter(run_report.findings), "")


def confirmed(verdicts: Sequence[EngineReport]) -> Iterator[EngineReport]:
    """Name the cause of each FAIL whose engine is right on a control input."""
    by_place: Mapping[tuple[str, str, AtlasInput], EngineReport] = {
        (report.engine, report.way, report.input): report for report in verdicts
    }
    for report in verdicts:
        controls = report.input.controls if report.verdict == FAIL else []
        reports = [by_place.get((report.engine, report.way, x)) for x in controls]
        control = next((r for r in reports if r is not None and r.verdict in (PASS, ROUNDING)), None)
        if control is None:
            yield report
        else:
            correction = _correction(report.input, control.input)
            yield replace(report, confirmed_by=control.input, correction=correction, agreed=control.run_report)


def _correction(atlas_input: AtlasInput, control: AtlasInput) -> str:
    """Describe the control input by its difference from `this`: the feature it lacks, or the style of its keys."""
    if atlas_input.style == control.style:
        return f"the same model without {atlas_input.feature}"
    return f"the same rope keys {'at the top of config.json' if control.style == 'old' else 'under rope_parameters'}"


def _round_to_three_digits(value: Any) -> Any:
    """Round every number to three digits."""
    if isinstance(value, dict):
        return {key: _round_to_three_digits(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_round_to_three_digits(child) for child in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value

"""The rows of a verification, grouped and counted: what the report prints and what `--json` gives."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llorch.families.config import ModelConfig
from llorch.judging.expectations.long_contexts import LONG_MODES
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.training import PEFT_FLOAT64
from llorch.judging.runners.numpy import BACKENDS
from llorch.judging.types import Comparison
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, TIE
from llorch.stages.table import BY_NAME, CHECKPOINTS, STAGES, keys
from llorch.stages.training import CHECKPOINTS as TRAINING

NOT_COMPARED = "not judged"  # of tensors that llorch does not compute with
KERNELS = "kernels"  # in place of a model: ours beside torch's own
_SEVERITY = {PASS: 0, TIE: 1, FAIL: 2}
_MODES = ("isolated", "chained", "free", "decode", *LONG_MODES, "exact")

_OF_STAGES = {stage.checkpoint for stage in STAGES}
_SPECIAL = _OF_STAGES - {stage.checkpoint for stage in STAGES if stage.is_dense}  # a dense model has none of these
EXACT = tuple(number for number in CHECKPOINTS if number < "13" and number not in _SPECIAL)


def checkpoints_of(config: ModelConfig, *, quantised: bool = False) -> tuple[str, ...]:
    """List the checkpoints that judge a model, 13 only with ggml numerics; checkpoint 14 repeats them on torch."""
    has = {stage.checkpoint for _, stage, _ in keys(config)}
    here = (number for number in CHECKPOINTS if number < ("14" if quantised else "13"))
    return tuple(number for number in here if number in has or number not in _OF_STAGES)


@dataclass(frozen=True)
class ModelReport:
    """All rows of one model, and what could not be run."""

    model: str
    comparisons: Sequence[Comparison]
    not_run: Sequence[str] = ()  # reasons: a golden or an engine that is missing
    numerics: str = ""  # the arithmetic, when it is not exact
    checkpoints: Sequence[str] = EXACT  # those that should have rows
    backend: str = ""  # device and dtype of the torch path, when that was judged
    dump: str = ""  # folder of the dump that stages were compared with, if it was one
    unsupported_reason: Mapping[str, str] = field(default_factory=dict)  # engines that compute another model, and why
    notes: Sequence[str] = ()  # parts of the model that nothing is compared of
    seconds: float = math.nan  # of judging by goldens or on torch
    is_users: bool = False  # a file or folder of the user's, no built-in model

    @property
    def engines(self) -> list[str]:
        """The reference engines that stages were compared with."""
        return sorted({c.engine for c in self.comparisons if c.stage_ref.name in BY_NAME} - {FLOAT64_REFERENCE})

    @property
    def n_not_run(self) -> int:
        """Number of checkpoints without a comparison, and of engines that cannot judge the model."""
        return len(_not_run(self)) + len(self.unsupported_reason)

    @property
    def verdict(self) -> str:
        """The worst verdict of the rows; NOT RUN is worse than TIE, because it changes the exit code."""
        worst = max((c.verdict for c in self.comparisons), key=_SEVERITY.__getitem__, default=NOT_RUN)
        return NOT_RUN if worst != FAIL and (self.not_run or _not_run(self)) else worst


@dataclass(frozen=True)
class Line:
    """Some rows of one model, shown by the one that is closest to its tolerance."""

    checkpoint: str  # its number
    stage: str  # the stage, when the rows are of one stage only
    n_rows: int
    closest: Comparison | None  # with the largest error for its tolerance; a failure goes first. None: nothing was run
    engine_errors: Mapping[str, float]  # engine to its distance from the float64 reference, in that stage

    @property
    def verdict(self) -> str:
        """The worst verdict of the rows."""
        return self.closest.verdict if self.closest is not None else NOT_RUN


def lines(report: ModelReport, *, by_stage: bool = False) -> list[Line]:
    """Make a line for each checkpoint, even without comparisons.

    With `by_stage` make a line for each stage of the judged model, and one for each other model that was judged beside.
    """
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in report.comparisons:
        stage_ref = comparison.stage_ref
        stage = stage_ref.stage if stage_ref.checkpoint in TRAINING else stage_ref.name  # one of many tensors there
        part = stage if comparison.model == report.model else comparison.model
        groups[stage_ref.checkpoint, part if by_stage else ""].append(comparison)
    out = []
    for checkpoint in report.checkpoints:
        found = [(stage, comparisons) for (number, stage), comparisons in groups.items() if number == checkpoint]
        for stage, comparisons in found:
            closest = max(comparisons, key=_closeness)
            beside = [c for c in comparisons if (c.model, *_place_of(c)) == (closest.model, *_place_of(closest))]
            errors = {c.engine: c.engine_error for c in beside}
            out.append(Line(checkpoint, stage, len(comparisons), closest, errors))
        if not found:
            out.append(Line(checkpoint, "", 0, None, {}))
    return out


def first_failure(report: ModelReport) -> Comparison | None:
    """Find the failing row that comes first in the forward pass; of one stage, the isolated one."""
    failing = [c for c in report.comparisons if c.verdict == FAIL]
    return min(failing, key=_order, default=None)


def closer_to_reference(models: Sequence[ModelReport], backend: str) -> dict[str, dict[str, int]]:
    """Count how often llorch's float32 is at least as close to the float64 reference as every reference engine.

    Returned are, for each case (and `all`), the number of (stage, layer, model) places, and in how many llorch is
    closer. Places without a float64 reference are not counted.
    """
    places: dict[tuple, list[Comparison]] = defaultdict(list)
    for number, report in enumerate(models):
        for comparison in report.comparisons:
            known = comparison.mode == "chained" and not math.isnan(comparison.reference_error)
            if known and comparison.backend == backend and comparison.stage_ref.checkpoint not in TRAINING:
                places[number, _place_of(comparison)].append(comparison)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, (case, *_)), here in places.items():
        is_closer = all(c.reference_error <= c.engine_error for c in here)
        for name in ("all", case):
            counts[name].update(comparisons=1, llorch=int(is_closer))
    return {name: dict(count) for name, count in counts.items()}


def worst_float64(comparisons: Sequence[Comparison]) -> dict | None:
    """Return the comparison in which llorch's float64 is farthest from the float64 reference, as `--json` has it."""
    wide = [
        c
        for c in comparisons
        if c.engine in (FLOAT64_REFERENCE, PEFT_FLOAT64) and c.mode != "exact" and not _is_narrow(c)
    ]
    return max(wide, key=lambda c: c.difference.error).record() if wide else None


def _is_narrow(comparison: Comparison) -> bool:
    """Tell whether a row of a long context compares float32 with the float64 reference."""
    return comparison.mode in LONG_MODES and "float64" not in comparison.backend


def summary(models: Sequence[ModelReport], absent: Mapping[str, str] | None = None, *, strict: bool = False) -> dict:
    """Count over all models, once per backend, as `--json` does; `absent` has backends that did not run, and why."""
    absent = absent or {}
    comparisons = [c for report in models for c in report.comparisons]
    verdicts = Counter(c.verdict for c in comparisons)
    failures = [failure for report in models if (failure := first_failure(report)) is not None]
    return {
        "models": sum(report.backend == models[0].backend and report.model != KERNELS for report in models),
        "comparisons": len(comparisons),
        "passed": verdicts[PASS],
        "failed": verdicts[FAIL],
        "ties": verdicts[TIE],
        "strict": strict,
        "checkpoints_not_run": sum(len(_not_run(report)) for report in models),
        "not_run": [{"model": report.model, "reason": reason} for report in models for reason in report.not_run],
        "unsupported": [
            {"model": report.model, "engine": engine, "reason": reason}
            for report in models
            for engine, reason in report.unsupported_reason.items()
        ],
        "notes": [{"model": report.model, "note": note} for report in models for note in report.notes],
        "backends": sorted({c.backend for c in comparisons}),
        "backends_not_run": [{"backend": backend, "reason": reason} for backend, reason in absent.items()],
        "engines": {report.model: report.engines for report in models if not report.numerics},
        "float64": worst_float64(comparisons),
        "closer_to_reference": {backend: closer_to_reference(models, backend) for backend in BACKENDS},
        "first_failures": [failure.record() for failure in failures],
    }


def _not_run(report: ModelReport) -> set[str]:
    """Return the model's checkpoints of which there is no comparison."""
    return {*report.checkpoints} - {c.stage_ref.checkpoint for c in report.comparisons}


def _place_of(comparison: Comparison) -> tuple[str, str, str, int | None]:
    return comparison.stage_ref.run, comparison.mode, comparison.stage_ref.name, comparison.stage_ref.layer


def _closeness(comparison: Comparison) -> tuple[int, float]:
    """Return a sort key: severity of the verdict, then the largest ratio of an error to its tolerance."""
    return _SEVERITY[comparison.verdict], comparison.difference.over(comparison.tolerance)


_STAGE_ORDER = {name: place for place, name in enumerate(BY_NAME)}
_CHECKPOINT_ORDER = {number: place for place, number in enumerate(CHECKPOINTS)}


def _order(comparison: Comparison) -> tuple[int, float, int, int]:
    """Return a sort key: the file and its tokens first, then the forward pass, then sampling."""
    stage_ref = comparison.stage_ref
    stage = BY_NAME.get(stage_ref.name)
    if stage is None:
        part, layer, place = (0 if stage_ref.checkpoint == "00" else 2), 0.0, _CHECKPOINT_ORDER[stage_ref.checkpoint]
    else:
        place = _STAGE_ORDER[stage.name]
        outside = -1.0 if place == 0 else float("inf")  # embed comes before all layers, the rest after them
        part, layer = 1, outside if stage_ref.layer is None else float(stage_ref.layer)
    return part, layer, place, _MODES.index(comparison.mode)

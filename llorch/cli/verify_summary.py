"""Comparisons of a verification, grouped and counted, for the report and for `--json`.

A checkpoint is a numbered validation point, a group of stages (named intermediate tensors); see `stages.table`.
Verdicts: PASS, FAIL, TIE (two top tokens nearer than rounding), NOT RUN (no comparison). Modes of a comparison:
isolated (from the reference's inputs), chained (from llorch's own), others in `judging.types.Comparison`.
"""

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
from llorch.stages.table import BY_NAME, CHECKPOINTS, STAGES, forward_rank, keys
from llorch.stages.training import CHECKPOINTS as TRAINING

NOT_COMPARED = "not judged"  # note on tensors that llorch does not compute with
KERNELS = "kernels"  # in place of a model: llorch's kernels against torch's
_SEVERITY = {PASS: 0, TIE: 1, FAIL: 2}
_MODES = ("isolated", "chained", "free", "decode", *LONG_MODES, "exact")

_FROM_STAGES = {stage.checkpoint for stage in STAGES}
_SPECIAL = _FROM_STAGES - {stage.checkpoint for stage in STAGES if stage.is_dense}  # stages that dense models lack
EXACT = tuple(number for number in CHECKPOINTS if number < "13" and number not in _SPECIAL)  # of a dense model


def checkpoints_of(config: ModelConfig, *, quantised: bool = False) -> tuple[str, ...]:
    """List the checkpoints that judge a model, 13 only with ggml numerics; checkpoint 14 repeats them on torch."""
    model_checkpoints = {stage.checkpoint for _, stage, _ in keys(config)}
    candidates = (number for number in CHECKPOINTS if number < ("14" if quantised else "13"))
    return tuple(number for number in candidates if number in model_checkpoints or number not in _FROM_STAGES)


@dataclass(frozen=True)
class ModelReport:
    """All comparisons of one model on one backend, and the reasons for NOT RUN."""

    model: str
    comparisons: Sequence[Comparison]
    not_run: Sequence[str] = ()  # reasons: missing goldens or engines
    numerics: str = ""  # arithmetic, if it is not exact
    checkpoints: Sequence[str] = EXACT  # checkpoints that should have comparisons
    backend: str = ""  # device and dtype of the torch path, if it was judged
    dump: str = ""  # folder of the dump that stages were compared with, if any
    unsupported_reason: Mapping[str, str] = field(default_factory=dict)  # by engine that cannot judge the model
    notes: Sequence[str] = ()  # parts of the model that are not compared
    seconds: float = math.nan  # time of judging by goldens or on torch
    is_users: bool = False  # the user's file or folder, not a built-in model

    @property
    def engines(self) -> list[str]:
        """The reference engines that stages were compared with."""
        return sorted({c.engine for c in self.comparisons if c.stage_ref.name in BY_NAME} - {FLOAT64_REFERENCE})

    @property
    def n_not_run(self) -> int:
        """Number of checkpoints without a comparison, and of engines that cannot judge the model."""
        return len(_checkpoints_not_run(self)) + len(self.unsupported_reason)

    @property
    def verdict(self) -> str:
        """Worst verdict of the comparisons; NOT RUN ranks between FAIL and TIE, because it changes the exit code."""
        worst = max((c.verdict for c in self.comparisons), key=_SEVERITY.__getitem__, default=NOT_RUN)
        return NOT_RUN if worst != FAIL and (self.not_run or _checkpoints_not_run(self)) else worst


@dataclass(frozen=True)
class Line:
    """Group of comparisons of one model, shown by the one that is closest to its tolerance."""

    checkpoint: str  # number of the checkpoint
    stage: str  # stage, if all comparisons are of one stage
    n_rows: int
    closest: Comparison | None  # worst verdict, then largest ratio of error to tolerance. None: nothing was run
    engine_errors: Mapping[str, float]  # by engine: its error against the float64 reference in the closest stage

    @property
    def verdict(self) -> str:
        """Worst verdict of the comparisons."""
        return self.closest.verdict if self.closest is not None else NOT_RUN


def lines(report: ModelReport, *, by_stage: bool = False) -> list[Line]:
    """Make a line for each checkpoint, even without comparisons.

    With `by_stage`, make a line for each stage of the judged model, and one for each other model judged with it.
    """
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in report.comparisons:
        stage_ref = comparison.stage_ref
        stage = stage_ref.stage if stage_ref.checkpoint in TRAINING else stage_ref.name  # else one line per tensor
        label = stage if comparison.model == report.model else comparison.model
        groups[stage_ref.checkpoint, label if by_stage else ""].append(comparison)
    out = []
    for checkpoint in report.checkpoints:
        rows = [(stage, comparisons) for (number, stage), comparisons in groups.items() if number == checkpoint]
        for stage, comparisons in rows:
            closest = max(comparisons, key=_closeness)
            same_place = [c for c in comparisons if (c.model, *_key(c)) == (closest.model, *_key(closest))]
            errors = {c.engine: c.engine_error for c in same_place}
            out.append(Line(checkpoint, stage, len(comparisons), closest, errors))
        if not rows:
            out.append(Line(checkpoint, "", 0, None, {}))
    return out


def first_failure(report: ModelReport) -> Comparison | None:
    """Find the failure that comes first in the forward pass; the isolated comparison first within a stage."""
    failing = [c for c in report.comparisons if c.verdict == FAIL]
    return min(failing, key=_run_order, default=None)


def closer_to_reference(models: Sequence[ModelReport], backend: str) -> dict[str, dict[str, int]]:
    """Count how often llorch is at least as close to the float64 reference as every reference engine, on a backend.

    Return for each case (a run of the model, such as `near`, and `all`) the number of places (model, stage, layer), and
    in how many llorch is closer. Only chained comparisons with a float64 reference count.
    """
    places: dict[tuple, list[Comparison]] = defaultdict(list)
    for number, report in enumerate(models):
        for comparison in report.comparisons:
            has_reference = comparison.mode == "chained" and not math.isnan(comparison.reference_error)
            if has_reference and comparison.backend == backend and comparison.stage_ref.checkpoint not in TRAINING:
                places[number, _key(comparison)].append(comparison)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, (case, *_)), at_place in places.items():
        is_closer = all(c.reference_error <= c.engine_error for c in at_place)
        for name in ("all", case):
            counts[name].update(comparisons=1, llorch=int(is_closer))
    return {name: dict(count) for name, count in counts.items()}


def worst_float64(comparisons: Sequence[Comparison]) -> dict | None:
    """Return the comparison in which llorch's float64 is farthest from the float64 reference, as `--json` has it."""
    float64_comparisons = [
        c
        for c in comparisons
        if c.engine in (FLOAT64_REFERENCE, PEFT_FLOAT64) and c.mode != "exact" and not _is_long_float32(c)
    ]
    return max(float64_comparisons, key=lambda c: c.difference.error).record() if float64_comparisons else None


def _is_long_float32(comparison: Comparison) -> bool:
    """Tell if a comparison is of a long context that llorch computed in float32, not float64."""
    return comparison.mode in LONG_MODES and "float64" not in comparison.backend


def summary(models: Sequence[ModelReport], absent: Mapping[str, str] | None = None, *, strict: bool = False) -> dict:
    """Count for `--json`: "models" counts each model once, all other counts include every backend's report of it.

    `absent` maps backends that did not run to reasons.
    """
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
        "checkpoints_not_run": sum(len(_checkpoints_not_run(report)) for report in models),
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


def _checkpoints_not_run(report: ModelReport) -> set[str]:
    """Return the model's checkpoints without a comparison; `report.not_run` has reasons."""
    return {*report.checkpoints} - {c.stage_ref.checkpoint for c in report.comparisons}


def _key(comparison: Comparison) -> tuple[str, str, str, int | None]:
    return comparison.stage_ref.run, comparison.mode, comparison.stage_ref.name, comparison.stage_ref.layer


def _closeness(comparison: Comparison) -> tuple[int, float]:
    """Return a sort key: severity of the verdict, then the largest ratio of an error to its tolerance."""
    return _SEVERITY[comparison.verdict], comparison.difference.over(comparison.tolerance)


_CHECKPOINT_ORDER = {number: index for index, number in enumerate(CHECKPOINTS)}


def _run_order(comparison: Comparison) -> tuple[float, ...]:
    """Return a sort key: the file and its tokens (part 0), then the forward pass (1), then sampling and more (2)."""
    stage_ref, mode = comparison.stage_ref, _MODES.index(comparison.mode)
    if stage_ref.name in BY_NAME:
        return 1, *forward_rank(stage_ref.name, stage_ref.layer), mode
    return 0 if stage_ref.checkpoint == "00" else 2, 0, _CHECKPOINT_ORDER[stage_ref.checkpoint], mode

"""The rows of a verification, grouped and counted: what the report prints and what `--json` gives."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llorch.families.config import ModelConfig
from llorch.judging.expectations.long_contexts import LONG_MODES
from llorch.judging.expectations.training_stages import CHECKPOINTS as TRAINING
from llorch.judging.goldens.float64_reference import WITNESS
from llorch.judging.goldens.training import TRUTH
from llorch.judging.judge import Comparison
from llorch.judging.runners.numpy import BACKENDS
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, TIE, times_over
from llorch.stages.table import BY_NAME, CHECKPOINTS, STAGES, keys

NOT_JUDGED = "not judged"  # of tensors that llorch does not compute with
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
class JudgedModel:
    """All rows of one model, and what could not be run."""

    model: str
    rows: Sequence[Comparison]
    not_run: Sequence[str] = ()  # reasons: a golden or an engine that is missing
    numerics: str = ""  # the arithmetic, when it is not exact
    checkpoints: Sequence[str] = EXACT  # those that should have rows
    backend: str = ""  # device and dtype of the torch path, when that was judged
    dump: str = ""  # folder of the dump that stages were compared with, if it was one
    cannot_judge: Mapping[str, str] = field(default_factory=dict)  # engines that compute another model, and why
    notes: Sequence[str] = ()  # parts of the model that nothing is compared of
    seconds: float = math.nan  # of judging by goldens or on torch
    is_users: bool = False  # a file or folder of the user's, no built-in model

    @property
    def witnesses(self) -> list[str]:
        """The reference engines that stages were compared with."""
        return sorted({row.producer for row in self.rows if row.stage in BY_NAME} - {WITNESS})

    @property
    def n_not_run(self) -> int:
        """Number of checkpoints without a comparison, and of engines that cannot judge the model."""
        return len(_not_run(self)) + len(self.cannot_judge)

    @property
    def verdict(self) -> str:
        """The worst verdict of the rows; NOT RUN is worse than TIE, because it changes the exit code."""
        worst = max((row.verdict for row in self.rows), key=_SEVERITY.__getitem__, default=NOT_RUN)
        return NOT_RUN if worst != FAIL and (self.not_run or _not_run(self)) else worst


@dataclass(frozen=True)
class Line:
    """Some rows of one model, shown by the one that is closest to its tolerance."""

    checkpoint: str  # its number
    stage: str  # the stage, when the rows are of one stage only
    n_rows: int
    closest: Comparison | None  # with the largest error for its tolerance; a failure goes first. None: nothing was run
    producer_errors: Mapping[str, float]  # engine to its distance from the float64 reference, in that stage

    @property
    def verdict(self) -> str:
        """The worst verdict of the rows."""
        return self.closest.verdict if self.closest is not None else NOT_RUN


def lines(judged: JudgedModel, *, by_stage: bool = False) -> list[Line]:
    """Make a line for each checkpoint, even without comparisons.

    With `by_stage` make a line for each stage of the judged model, and one for each other model that was judged beside.
    """
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for row in judged.rows:
        stage = row.place.stage if row.checkpoint in TRAINING else row.stage  # one of many tensors there
        part = stage if row.model == judged.model else row.model
        groups[row.checkpoint, part if by_stage else ""].append(row)
    out = []
    for checkpoint in judged.checkpoints:
        found = [(stage, rows) for (number, stage), rows in groups.items() if number == checkpoint]
        for stage, rows in found:
            closest = max(rows, key=_closeness)
            beside = [row for row in rows if (row.model, *_place_of(row)) == (closest.model, *_place_of(closest))]
            errors = {row.producer: row.producer_error for row in beside}
            out.append(Line(checkpoint, stage, len(rows), closest, errors))
        if not found:
            out.append(Line(checkpoint, "", 0, None, {}))
    return out


def first_failure(judged: JudgedModel) -> Comparison | None:
    """Find the failing row that comes first in the forward pass; of one stage, the isolated one."""
    failing = [row for row in judged.rows if row.verdict == FAIL]
    return min(failing, key=_order, default=None)


def closer_to_truth(models: Sequence[JudgedModel], backend: str) -> dict[str, dict[str, int]]:
    """Count how often llorch's float32 is at least as close to the float64 reference as every reference engine.

    Returned are, for each case (and `all`), the number of (stage, layer, model) places, and in how many llorch is
    closer. Places without a float64 reference are not counted.
    """
    places: dict[tuple, list[Comparison]] = defaultdict(list)
    for number, judged in enumerate(models):
        for row in judged.rows:
            known = row.mode == "chained" and not math.isnan(row.truth_error)
            if known and row.backend == backend and row.checkpoint not in TRAINING:
                places[number, _place_of(row)].append(row)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, (case, *_)), here in places.items():
        ours = all(row.truth_error <= row.producer_error for row in here)
        for name in ("all", case):
            counts[name].update(places=1, ours=int(ours))
    return {name: dict(count) for name, count in counts.items()}


def worst_float64(rows: Sequence[Comparison]) -> dict | None:
    """Return the comparison in which llorch's float64 is farthest from the float64 reference, as `--json` has it."""
    wide = [row for row in rows if row.producer in (WITNESS, TRUTH) and row.mode != "exact" and not _is_narrow(row)]
    return max(wide, key=lambda row: row.error).record() if wide else None


def _is_narrow(row: Comparison) -> bool:
    """Tell whether a row of a long context compares float32 with the float64 reference."""
    return row.mode in LONG_MODES and "float64" not in row.backend


def summary(models: Sequence[JudgedModel], absent: Mapping[str, str] | None = None, *, strict: bool = False) -> dict:
    """Count over all models, once per backend, as `--json` does; `absent` has backends that did not run, and why."""
    absent = absent or {}
    rows = [row for judged in models for row in judged.rows]
    verdicts = Counter(row.verdict for row in rows)
    failures = [failure for judged in models if (failure := first_failure(judged)) is not None]
    return {
        "models": sum(judged.backend == models[0].backend and judged.model != KERNELS for judged in models),
        "comparisons": len(rows),
        "passed": verdicts[PASS],
        "failed": verdicts[FAIL],
        "ties": verdicts[TIE],
        "strict": strict,
        "checkpoints_not_run": sum(len(_not_run(judged)) for judged in models),
        "not_run": [{"model": judged.model, "reason": reason} for judged in models for reason in judged.not_run],
        "cannot_judge": [
            {"model": judged.model, "witness": witness, "reason": reason}
            for judged in models
            for witness, reason in judged.cannot_judge.items()
        ],
        "notes": [{"model": judged.model, "note": note} for judged in models for note in judged.notes],
        "backends": sorted({row.backend for row in rows}),
        "backends_not_run": [{"backend": backend, "reason": reason} for backend, reason in absent.items()],
        "witnesses": {judged.model: judged.witnesses for judged in models if not judged.numerics},
        "float64": worst_float64(rows),
        "closer_to_truth": {backend: closer_to_truth(models, backend) for backend in BACKENDS},
        "first_failures": [failure.record() for failure in failures],
    }


def _not_run(judged: JudgedModel) -> set[str]:
    """Return the model's checkpoints of which there is no comparison."""
    return {*judged.checkpoints} - {row.checkpoint for row in judged.rows}


def _place_of(row: Comparison) -> tuple[str, str, str, int | None]:
    return row.case, row.mode, row.stage, row.layer


def _closeness(row: Comparison) -> tuple[int, float]:
    """Return a sort key: severity of the verdict, then the largest ratio of an error to its tolerance."""
    parts = (
        (row.error, row.tolerance),
        (row.worst, row.tolerance_worst),
        (row.token_error, row.tolerance_token),
        (abs(row.common_factor - 1), row.tolerance_factor),
    )
    return _SEVERITY[row.verdict], max(times_over(*part) for part in parts if not math.isnan(part[0]))


_STAGE_ORDER = {name: place for place, name in enumerate(BY_NAME)}
_CHECKPOINT_ORDER = {number: place for place, number in enumerate(CHECKPOINTS)}


def _order(row: Comparison) -> tuple[int, float, int, int]:
    """Return a sort key: the file and its tokens first, then the forward pass, then sampling."""
    stage = BY_NAME.get(row.stage)
    if stage is None:
        part, layer, place = (0 if row.checkpoint == "00" else 2), 0.0, _CHECKPOINT_ORDER[row.checkpoint]
    else:
        place = _STAGE_ORDER[stage.name]
        outside = -1.0 if place == 0 else float("inf")  # embed comes before all layers, the rest after them
        part, layer = 1, float(row.layer) if row.layer is not None else outside
    return part, layer, place, _MODES.index(row.mode)

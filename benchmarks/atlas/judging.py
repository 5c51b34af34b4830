"""Comparison of one run of an engine with the float64 reference of its input: errors and tolerances of every stage.

The float64 reference is transformers, see `llorch.judging.goldens.float64_reference`. Tolerances are derived from its
numbers and the arithmetic that the engine declares or shows, see `llorch.judging.tolerances.forward`. If a run is
beyond them, the diagnosis names the stage and the mistake.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.expected import HALF, EngineArithmetic, rows
from llorch.diagnosis.guards import require_comparable
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.files import Weights, open_weights
from llorch.files.quantised import QuantisedFolder
from llorch.judging.expert_selection import ExpertSelection
from llorch.judging.tolerances.forward import derive_tolerance, variances
from llorch.judging.tolerances.rounding import CHAINED
from llorch.ops.numerics import SCHEME
from llorch.runtime.errors import FormatError
from llorch.stages.comparison import EXACT, Difference, Tolerance, measure
from llorch.stages.stage_ref import Pass, has_tokens, part_of, token_axis
from llorch.stages.table import BY_NAME

_ANY = Tolerance(np.inf, np.inf)
_SCHEME = "Activations are rounded as the settings of the folder say; with --numerics scheme no stage differs."
_FLIPS = (
    "Activations are rounded as the settings of the folder say. Inputs in half precision round some of them to another "
    "code, so stages differ; the logits are within the tolerance."
)
Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StageRow:
    """Stage in all layers and passes: its largest error, and that error as a share of its tolerance."""

    stage: str
    error: float
    allowed: float
    over: float


@dataclass(frozen=True)
class EngineRunReport:
    """Comparison of a run that ended well.

    Attributes:
        stages: In the order of the forward pass; the last is `logits`.
        over: Factor by which the worst stage exceeds its tolerance; at most 1: the arithmetic explains all.
        arithmetic: Arithmetic in which it was judged.
        wrong: A stage is beyond its tolerance, and no arithmetic explains it.
        findings: Sentences of the diagnosis, if a stage is beyond its tolerance.
        mistake: Names of the causes of the first of them, and the recovered value: `rope-theta 10000`; empty: unknown.
        key: Stage key where it shows first, `l0.q_rope`.
        tie: Note on the first tie, where rounding chose other experts; nothing after the tie is judged.
    """

    stages: Sequence[StageRow]
    over: float
    arithmetic: str
    wrong: bool = False
    findings: Sequence[str] = field(default=())
    mistake: str = ""
    key: str = ""
    tie: str = ""

    @property
    def is_right(self) -> bool:
        """True if the run is no farther from the float64 reference than its arithmetic explains."""
        return self.over <= 1

    @property
    def error(self) -> float:
        """Error of the logits."""
        return self.stages[-1].error


def judge(model: Path, dump_folder: Path, reference: Trace) -> EngineRunReport:
    """Compare a dump with the float64 reference.

    Args:
        model: The folder with the numbers that the engine was given.
        dump_folder: The folder that the engine wrote.
        reference: Stages of the whole sequence in float64, by trace key.

    Returns:
        Distances, tolerances and, where one is exceeded, causes.

    Raises:
        FormatError: The dump is not one, or has no logits.
        GuardFailed: Its numbers are of other tokens or weights.
    """
    weights = open_weights(model)
    dump = stage_dump(open_raw(dump_folder), weights.config, weights=weights)
    require_comparable(dump, weights)
    ties: list[str] = []
    differences = list(_differences(weights, dump, reference, ties))
    stages = list(_by_stage(differences))
    if not stages or stages[-1].stage != "logits":
        raise ValueError(f"{dump_folder}: expected logits of at least 1 token, got {len(stages)} stages without logits")
    over, arithmetic = max(row.over for row in stages), EngineArithmetic(dump).mode_at(0, "logits").name or "float32"
    if over <= 1:
        return EngineRunReport(stages, over, arithmetic, tie=ties[0] if ties else "")
    return _diagnosed(weights, dump, EngineRunReport(stages, over, arithmetic))


def _differences(
    weights: Weights, dump: StageDump, reference: Trace, ties: list[str]
) -> Iterator[tuple[str, Difference, Tolerance]]:
    """Compare each stage of each pass with the float64 reference; after a tie of experts nothing is a fault."""
    engine, scores = EngineArithmetic(dump), dict[str, np.ndarray]()
    ids = tuple(token for tokens in dump.passes for token in tokens.ids)
    with np.errstate(all="ignore"):
        for key, variance in variances(weights, Pass(ids), reference, lambda key: engine.mode_at(0, key).arithmetic):
            stage, stop = BY_NAME[key.rpartition(".")[2]], 0
            if stage.name.startswith("router_"):
                scores[stage.name] = variance[CHAINED]
            for number, tokens in enumerate(dump.passes):
                start, stop = stop, stop + len(tokens.ids)
                seen = dump.dumped.get((number, key))
                if seen is None or not (has_tokens(stage) or stop == len(ids)):
                    continue
                right = rows(part_of(stage, reference[key], start, stop), stage, seen)
                theirs = seen.read().astype(right.dtype)
                if stage.is_choice:
                    by = stage.input_names(weights.config, None)[0]
                    at = rows(np.arange(start, stop), stage, seen)
                    choice = ExpertSelection(right, reference[key.replace(stage.name, by)][at], scores[by][at])
                    apart = choice.difference(theirs)
                    ties += [] if apart.error else filter(None, [choice.note(theirs)])
                    yield stage.name, apart, _ANY if ties else EXACT
                    continue
                spread = rows(part_of(stage, variance[CHAINED], start, stop), stage, seen)
                found = measure(theirs, right, masked=stage.masked, token_axis=token_axis(stage))
                yield stage.name, found, _ANY if ties else derive_tolerance(right, spread, stage)


def _by_stage(differences: Sequence[tuple[str, Difference, Tolerance]]) -> Iterator[StageRow]:
    names = dict.fromkeys(name for name, _, _ in differences)
    for name in sorted(names, key=list(BY_NAME).index):
        here = [(found, allowed) for each, found, allowed in differences if each == name]
        worst, allowed = max(here, key=lambda pair: pair[0].over(pair[1]))
        error = max(found.error for found, _ in here)
        yield StageRow(name, error, allowed.error, worst.over(allowed))


def _diagnosed(weights: Weights, dump: StageDump, run_report: EngineRunReport) -> EngineRunReport:
    """Diagnose a run that exceeds a tolerance, and add the causes and the first wrong stage to its comparison."""
    found = diagnose(weights.astype(np.float64), dump)
    wrong = [finding for finding in found.findings if finding.kind != "honest"]
    names = [f"{each.name} {each.value}".strip() for each in wrong[0].suspects] if wrong else []
    if wrong and not names and (said := _scheme_said(weights, dump, run_report)):
        return replace(run_report, findings=(said,))
    return replace(
        run_report,
        wrong=not found.findings or bool(wrong),
        findings=tuple(finding.sentence for finding in wrong or found.findings),
        mistake=" + ".join(names),
        key=wrong[0].key if wrong else "",
    )


def _scheme_said(weights: Weights, dump: StageDump, run_report: EngineRunReport) -> str:
    """Explain a run of a quantised folder whose settings round activations; empty if they do not explain it."""
    if not isinstance(weights.source, QuantisedFolder):
        return ""
    try:
        rounded = weights.using(numerics=SCHEME)
    except FormatError:  # no scheme that llorch computes
        return ""
    if rounded.rounds_nothing:
        return ""
    if all(finding.kind == "honest" for finding in diagnose(rounded.astype(np.float64), dump).findings):
        return _SCHEME
    return _FLIPS if run_report.arithmetic.startswith(tuple(HALF)) and run_report.stages[-1].over <= 1 else ""

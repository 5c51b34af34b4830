"""Comparison of one run of an engine with the float64 reference of its input: errors and tolerances of every stage.

The float64 reference is transformers, see `llorch.judging.goldens.float64_reference`. Tolerances are derived from its
numbers and the arithmetic that the engine declares or shows, see `llorch.judging.tolerances.forward`. If a run is
beyond them, the diagnosis names the stage and the mistake.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from llorch.judging.compare import judge_difference
from llorch.judging.expert_selection import ExpertSelection
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.tolerances.forward import derive_tolerance, variances
from llorch.judging.tolerances.rounding import CHAINED
from llorch.judging.types import Comparison
from llorch.ops.numerics import SCHEME
from llorch.runtime.errors import FormatError
from llorch.stages.comparison import EXACT, FAIL, ROUNDING, Tolerance, measure
from llorch.stages.stage_ref import Pass, StageRef, has_tokens, part_of, token_axis
from llorch.stages.table import BY_NAME

_ANY = Tolerance(np.inf, np.inf)
_SCHEME = "Activations are rounded as the settings of the folder say; with --numerics scheme no stage differs."
_FLIPS = (
    "Activations are rounded as the settings of the folder say. Inputs in half precision round some of them to another "
    "code, so stages differ; the logits are within the tolerance."
)
Trace = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class EngineRunReport:
    """Comparisons of a finished run with the float64 reference, and the findings of the diagnosis.

    Attributes:
        comparisons: Every stage in every layer and pass, in the order of the forward pass; the last is of the logits.
        arithmetic: Arithmetic of the tolerances.
        wrong: True if a stage exceeds its tolerance and no arithmetic explains it.
        findings: Sentences of the diagnosis, if a stage is beyond its tolerance.
        mistake: Causes of the first finding, with recovered values: `rope-theta 10000`; empty: unknown.
        key: Stage key where the mistake shows first, `l0.q_rope`.
        tie: Note on the first tie, where rounding chose other experts; nothing after the tie is judged.
    """

    comparisons: Sequence[Comparison]
    arithmetic: str
    wrong: bool = False
    findings: Sequence[str] = ()
    mistake: str = ""
    key: str = ""
    tie: str = ""

    @cached_property
    def over(self) -> float:
        """Factor by which the worst stage exceeds its tolerance; at most 1: the arithmetic explains all."""
        return max(over_tolerance(comparison) for comparison in self.comparisons)

    @property
    def is_right(self) -> bool:
        """True if the run is no farther from the float64 reference than its arithmetic explains."""
        return self.over <= 1

    @property
    def has_right_logits(self) -> bool:
        """True if the logits are within their tolerance."""
        return over_tolerance(self.worst_of("logits")) <= 1

    @property
    def error(self) -> float:
        """Error of the logits."""
        return self.errors["logits"]

    @cached_property
    def errors(self) -> dict[str, float]:
        """Largest error of each stage, over layers and passes."""
        return {stage: max(c.difference.error for c in c_list) for stage, c_list in self._by_stage.items()}

    @cached_property
    def _by_stage(self) -> dict[str, list[Comparison]]:
        by_stage: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            by_stage.setdefault(comparison.stage_ref.stage, []).append(comparison)
        return {name: by_stage[name] for name in BY_NAME if name in by_stage}

    def worst_of(self, stage: str) -> Comparison:
        """Return the comparison of a stage that is farthest beyond its tolerance."""
        return max(self._by_stage[stage], key=over_tolerance)

    def record(self) -> dict[str, object]:
        """Convert the report to plain values for JSON, with one object for each stage."""
        stages: list[dict[str, object]] = []
        for stage, error in self.errors.items():
            worst = self.worst_of(stage)
            tolerance, over = worst.tolerance.error, over_tolerance(worst)
            stages.append({"stage": stage, "error": error, "tolerance": tolerance, "over": over})
        values = {"over": self.over, "arithmetic": self.arithmetic, "wrong": self.wrong, "findings": [*self.findings]}
        return {"stages": stages, **values, "mistake": self.mistake, "key": self.key, "tie": self.tie}


def over_tolerance(comparison: Comparison) -> float:
    """Return the difference as a multiple of the tolerance."""
    return comparison.difference.over(comparison.tolerance)


def judge(model: Path, dump_folder: Path, reference: Trace) -> EngineRunReport:
    """Compare a dump with the float64 reference.

    Args:
        model: The folder with the numbers of the engine's model.
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
    comparisons = list(_compare_stages(weights, dump, reference, model.name, ties))
    if not comparisons or comparisons[-1].stage_ref.stage != "logits":
        n_stages = len({comparison.stage_ref.stage for comparison in comparisons})
        raise ValueError(f"{dump_folder}: expected logits of at least 1 token, got {n_stages} stages without logits")
    arithmetic = EngineArithmetic(dump).mode_at(0, "logits").name or "float32"
    run_report = EngineRunReport(comparisons, arithmetic)
    if run_report.is_right:
        return replace(run_report, tie=ties[0] if ties else "")
    run_report = _add_diagnosis(weights, dump, run_report)
    return run_report if run_report.wrong else replace(run_report, comparisons=[*map(_as_rounding, comparisons)])


def _as_rounding(comparison: Comparison) -> Comparison:
    """Mark a comparison as ROUNDING if it exceeds its tolerance but the run's arithmetic explains it."""
    return replace(comparison, verdict=ROUNDING) if comparison.verdict == FAIL else comparison


def _compare_stages(
    weights: Weights, dump: StageDump, reference: Trace, model: str, ties: list[str]
) -> Iterator[Comparison]:
    """Compare each stage of each pass with the float64 reference; after a tie of experts no difference counts."""
    engine, scores = EngineArithmetic(dump), dict[str, np.ndarray]()
    ids = tuple(token for tokens in dump.passes for token in tokens.ids)
    with np.errstate(all="ignore"):
        for key, variance in variances(weights, Pass(ids), reference, lambda key: engine.mode_at(0, key).arithmetic):
            layer, _, name = key.rpartition(".")
            stage, stop = BY_NAME[name], 0
            if stage.name.startswith("router_"):
                scores[stage.name] = variance[CHAINED]
            for number, tokens in enumerate(dump.passes):
                start, stop = stop, stop + len(tokens.ids)
                dumped = dump.dumped.get((number, key))
                if dumped is None or not (has_tokens(stage) or stop == len(ids)):
                    continue
                expected = rows(part_of(stage, reference[key], start, stop), stage, dumped)
                actual = dumped.read().astype(expected.dtype)
                if stage.is_selection:
                    score = stage.input_names(weights.config, None)[0]
                    positions = np.arange(start, stop) if dumped.tokens is None else start + np.asarray(dumped.tokens)
                    by_position = reference[key.replace(stage.name, score)][positions], scores[score][positions]
                    selection = ExpertSelection(expected, *by_position)
                    difference, tolerance = selection.difference(actual), EXACT
                    ties += [] if difference.error else filter(None, [selection.note(actual)])
                else:
                    spread = rows(part_of(stage, variance[CHAINED], start, stop), stage, dumped)
                    difference = measure(actual, expected, masked=stage.masked, token_axis=token_axis(stage))
                    tolerance = derive_tolerance(expected, spread, stage)
                stage_ref = StageRef(stage.checkpoint, name, int(layer[1:]) if layer else None, f"pass {number}")
                yield judge_difference(
                    difference, _ANY if ties else tolerance, stage_ref, "chained", FLOAT64_REFERENCE, model=model,
                    backend=dump.features.engine or "dump",
                )  # fmt: skip


def _add_diagnosis(weights: Weights, dump: StageDump, run_report: EngineRunReport) -> EngineRunReport:
    """Diagnose a run that exceeds a tolerance, and add the causes and the first wrong stage to its comparison."""
    diagnosis = diagnose(weights.astype(np.float64), dump)
    wrong = [finding for finding in diagnosis.findings if finding.kind != "rounding"]
    names = [f"{cause.name} {cause.value}".strip() for cause in wrong[0].causes] if wrong else []
    if wrong and not names and (explanation := _explain_scheme(weights, dump, run_report)):
        return replace(run_report, findings=(explanation,))
    return replace(
        run_report,
        wrong=not diagnosis.findings or bool(wrong),
        findings=tuple(finding.sentence for finding in wrong or diagnosis.findings),
        mistake=" + ".join(names),
        key=wrong[0].key if wrong else "",
    )


def _explain_scheme(weights: Weights, dump: StageDump, run_report: EngineRunReport) -> str:
    """Explain a run of a quantised folder whose settings round activations; empty if they do not explain it."""
    if not isinstance(weights.source, QuantisedFolder):
        return ""
    try:
        rounded = weights.using(numerics=SCHEME)
    except FormatError:  # no scheme that llorch computes
        return ""
    if rounded.quantises_weights_only:
        return ""
    if all(finding.kind == "rounding" for finding in diagnose(rounded.astype(np.float64), dump).findings):
        return _SCHEME
    return _FLIPS if run_report.arithmetic.startswith(tuple(HALF)) and run_report.has_right_logits else ""

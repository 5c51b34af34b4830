"""The stages of a dump as rows of a verification: the engine that wrote it is the reference engine."""

import math
from collections.abc import Iterator

from llorch.diagnosis.diagnose import judge_stages
from llorch.diagnosis.dump_checker import Progress
from llorch.diagnosis.verdict import EARLIER_PASSES, StageResult
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights
from llorch.judging.judge import Comparison, judge_difference
from llorch.judging.runners.numpy import FLOAT64, GGML
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import BY_NAME


def dump_rows(
    weights: Weights, dump: StageDump, *, model: str, progress: Progress = lambda line: None
) -> tuple[list[Comparison], list[str]]:
    """Judge a dump, stage by stage.

    Args:
        weights: Weights of the model, in float64, or with ggml numerics if these are to be used.
        dump: Stages that the engine showed.
        model: The model's name.
        progress: Told what is being done.

    Returns:
        Two rows for each stage: isolated, fed the engine's own inputs, and chained, from llorch's run of the tokens.
        Also the reasons why stages were not run.
    """
    engine, backend = dump.features.engine or "dump", GGML if weights.numerics.rounds_activations else FLOAT64
    judge, results = judge_stages(weights, dump, progress)
    comparisons = [c for result in results for c in _rows_of(result, engine, model, backend)]
    names = ", ".join(dict.fromkeys(name for _, name in judge.not_run))
    return comparisons, [f"{names}: {EARLIER_PASSES}"] if names else []


def _rows_of(result: StageResult, engine: str, model: str, backend: str) -> Iterator[Comparison]:
    """Yield a result as isolated comparison and, if it has a total error, as chained one."""
    stage_ref = StageRef(BY_NAME[result.stage].checkpoint, result.stage, result.layer, f"pass {result.n_pass}")
    local, total = (result.local, result.tolerance), (result.total, result.total_limit)
    yield judge_difference(*local, stage_ref, "isolated", engine, model=model, backend=backend)
    if not math.isnan(result.total.error):
        yield judge_difference(*total, stage_ref, "chained", engine, model=model, backend=backend)

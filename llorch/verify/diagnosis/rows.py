"""The stages of a dump as rows of a verification: the engine that wrote it is the witness."""

import math
from collections.abc import Iterator

from llorch.dumps.stage_dump import StageDump
from llorch.files import Weights
from llorch.stages import BY_NAME
from llorch.verify.compare import Difference, Tolerance
from llorch.verify.diagnosis.judged import Judge, Say
from llorch.verify.diagnosis.replay import Replay
from llorch.verify.diagnosis.verdict import StageResult
from llorch.verify.judge import FAIL, PASS, Row
from llorch.verify.places import Place
from llorch.verify.runners.numpy import FLOAT64, GGML


def dump_rows(weights: Weights, dump: StageDump, *, model: str, say: Say = lambda line: None) -> Iterator[Row]:
    """Judge what a dump shows, stage by stage.

    Args:
        weights: Of the model, in float64, or for ggml numerics with them.
        dump: What the engine showed.
        model: The model's name.
        say: Told what is being done.

    Yields:
        Two rows for each stage: isolated, fed the engine's own inputs, and chained, from our own run of the tokens.
    """
    engine, backend = dump.features.engine or "dump", GGML if weights.numerics.rounds_activations else FLOAT64
    for result in Judge(Replay(weights, dump), say).results():
        yield _row(result, "isolated", result.local, result.limit, model=model, engine=engine, backend=backend)
        yield _row(result, "chained", result.total, result.total_limit, model=model, engine=engine, backend=backend)


def _row(
    result: StageResult, mode: str, found: Difference, limit: Tolerance, *, model: str, engine: str, backend: str
) -> Row:
    token_error, token_limit = found.nearest_token(limit)
    place = Place(BY_NAME[result.stage].checkpoint, result.stage, result.layer, f"pass {result.n_pass}")
    return Row(
        model=model,
        checkpoint=place.checkpoint,
        stage=result.stage,
        layer=result.layer,
        case=place.case,
        producer=engine,
        backend=backend,
        mode=mode,
        error=found.error,
        worst=found.worst,
        truth_error=math.nan,
        producer_error=math.nan,
        tolerance=limit.error,
        tolerance_worst=limit.worst,
        verdict=PASS if found.within(limit) else FAIL,
        note=found.fault or "",
        token_error=token_error,
        tolerance_token=token_limit,
        place=place,
    )

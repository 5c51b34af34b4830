"""The stages of a dump as rows of a verification: the engine that wrote it is the witness."""

from collections.abc import Iterator

from llorch.dumps.stage_dump import StageDump
from llorch.files import Weights
from llorch.stages import BY_NAME
from llorch.verify.diagnosis.judged import Judge, Say
from llorch.verify.diagnosis.replay import Replay
from llorch.verify.judge import Row, row_of
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
        place = Place(BY_NAME[result.stage].checkpoint, result.stage, result.layer, f"pass {result.n_pass}")
        local, total = (result.local, result.limit), (result.total, result.total_limit)
        yield row_of(*local, place, "isolated", engine, model=model, backend=backend)
        yield row_of(*total, place, "chained", engine, model=model, backend=backend)

"""Dumps of runs of our own pass with something planted: what a wrong engine would have written."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from helpers.stored_goldens import golden_of

from llorch.diagnosis.replay import UNCHANGED, Change, Past, Replay
from llorch.diagnosis.search.hypotheses import Hypothesis, known_mistakes
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights, open_weights
from llorch.runtime.builtin import builtin_path
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import keys

WHOLE: Callable[[str], bool] = lambda key: True  # noqa: E731
BLOCKS: Callable[[str], bool] = lambda key: key.endswith(("block_out", "logits"))  # noqa: E731


@cache
def float64_weights(model: str) -> Weights:
    return open_weights(builtin_path(model)).astype(np.float64, keep=True)


def mistake(name: str, model: str) -> Hypothesis:
    return mistake_in(name, float64_weights(model))


def mistake_in(name: str, weights: Weights) -> Hypothesis:
    return next(each for each in known_mistakes(weights.config) if each.name == name)


def everywhere(injected: Hypothesis, weights: Weights) -> Change:
    """A mistake in all stages and layers where it can be made."""
    return injected.change(injected.select_keys([name for name, _, _ in keys(weights.config)]))


def passes(model: str, *sizes: int, first_position: int = 0) -> list[Tokens]:
    """The prompt of a model cut into passes."""
    ids, start, found = golden_of(model).cases["near"].ids, 0, []
    for size in sizes or (len(ids),):
        found.append(Tokens(ids[start : start + size], first_position + start))
        start += size
    return found


def dump_run(
    model: str, tokens: Sequence[Tokens], change: Change = UNCHANGED, is_dumped: Callable[[str], bool] = WHOLE
) -> StageDump:
    """Every stage that is `shown` of a run of a micro model in float64, rounded to float32."""
    return dump_of(float64_weights(model), tokens, change, is_dumped)


def dump_of(
    weights: Weights, tokens: Sequence[Tokens], change: Change, is_dumped: Callable[[str], bool] = WHOLE
) -> StageDump:
    """The same of any model, its weights in float64."""
    replay, traces = Replay(weights, StageDump.of_arrays(tokens)), []
    past = Past(replay.config, np.float64)
    for number in range(len(tokens)):
        made: dict[str, np.ndarray] = {}
        with np.errstate(all="ignore"):
            replay.run(number, made.__setitem__, past, change, fed=False)
        past = past.next()
        traces.append({key: array.astype(np.float32) for key, array in made.items() if is_dumped(key)})
    return StageDump.of_arrays(tokens, *traces)

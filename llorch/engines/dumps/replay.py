"""Our own run of the tokens of a dump, as far as it is asked for."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from llorch.files import Weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.stages.stage_ref import Tokens


class _Enough(Exception):
    """Ends a run behind the last stage that somebody wants."""


def run_passes(weights: Weights, passes: Sequence[Tokens], observe: Callable[[int, str, np.ndarray], bool]) -> None:
    """Run passes one after the other into one cache; `observe` is shown every stage, and says whether to go on."""
    first, rounding = passes[0].first_position, weights.cache_rounding
    cache = KVCache(weights.config, weights.dtype, first_position=first, rounding=rounding)

    def keep(number: int, name: str, array: np.ndarray) -> np.ndarray:
        if not observe(number, name, array):
            raise _Enough
        return array

    with suppress(_Enough):
        for number, tokens in enumerate(passes):
            forward(np.array(tokens.ids), weights, cache, keep=partial(keep, number))


def our_stage(weights: Weights, passes: Sequence[Tokens], n_pass: int, key: str) -> np.ndarray:
    """Compute one stage of one pass; later stages are not computed."""
    found: list[np.ndarray] = []

    def observe(number: int, name: str, array: np.ndarray) -> bool:
        found.extend([array.copy()] if (number, name) == (n_pass, key) else [])
        return not found

    run_passes(weights, passes, observe)
    return found[0]

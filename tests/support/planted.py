"""Known mistakes planted in the goldens' own inputs: the situations that the tests of teeth go through."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from llorch.builtin import BUILTIN, builtin_path, goldens_folder
from llorch.files import Weights, open_weights
from llorch.stages import BY_NAME, Stage, StageInputs, key
from llorch.verify.compare import Tolerance
from llorch.verify.diagnose import Variants, reads_of, variants, wrong_compute
from llorch.verify.goldens import PRODUCERS, Golden, read
from llorch.verify.mistakes import Mistake
from llorch.verify.mistakes.cache import CACHES
from llorch.verify.replay import Pass, chained, cut

MICRO = tuple(name for name in BUILTIN if name.startswith("micro"))


@cache
def golden_of(model: str) -> Golden:
    return read(goldens_folder() / model)


@cache
def weights_of(model: str) -> Weights:
    weights = open_weights(builtin_path(model))
    weights.layer = cache(weights.layer)  # each of some ten thousand stages asks for its layer
    return weights


def models_of(mistake: Mistake) -> list[str]:
    """The micro models that the mistake can be made with, else the other built-in ones."""
    able = [model for model in BUILTIN if mistake.applies_to(weights_of(model).config)]
    return [model for model in able if model in MICRO] or able


@dataclass(frozen=True)
class Situation:
    """One stage of the first layer (or outside the layers) of one golden."""

    model: str
    case: str
    producer: str
    stage_name: str
    n_cached: int

    @property
    def stage(self) -> Stage:
        return BY_NAME[self.stage_name]

    @property
    def layer(self) -> int | None:
        return 0 if self.stage.in_layer else None

    @property
    def key(self) -> str:
        return key(self.stage_name, self.layer)

    @property
    def trace(self) -> dict[str, np.ndarray]:
        return dict(golden_of(self.model).evidence[self.producer].traces[self.case])

    @property
    def golden(self) -> np.ndarray:
        return cut(self.stage, self.trace[self.key], self.n_cached)

    @property
    def tolerance(self) -> Tolerance:
        return golden_of(self.model).tolerances[self.case]["isolated"][self.stage_name]

    @cache  # noqa: B019 (situations are few and equal ones share the entry)
    def made(self) -> Variants:
        whole = golden_of(self.model).cases[self.case]
        return variants(self.stage, self.layer, self.trace, weights_of(self.model), whole, n_cached=self.n_cached)


def n_cached(mistake: Mistake, whole: Pass) -> int:
    return len(whole.ids) // 2 if mistake.after_cached else 0


def situations(mistake: Mistake) -> Iterator[Situation]:
    """Wherever a mistake has to show: every model, case, producer and stage."""
    for model in models_of(mistake):
        config = weights_of(model).config
        for case in mistake.cases:
            cached = n_cached(mistake, golden_of(model).cases[case])
            for stage in (stage for stage in mistake.stages if BY_NAME[stage].applies_to(config)):
                for producer in PRODUCERS:
                    yield Situation(model, case, producer, stage, cached)


@cache
def first_part(model: str, case: str, n_tokens: int) -> dict[str, np.ndarray] | None:
    """Our own trace of the tokens that a second pass finds in the cache."""
    whole = golden_of(model).cases[case]
    return chained(weights_of(model), Pass(whole.ids[:n_tokens], whole.first_position)) if n_tokens else None


def chain(mistake: Mistake[StageInputs], model: str, case: str, stage: str) -> dict[str, np.ndarray]:
    """The whole table on our own results, with one stage done wrong; both caches together: their lengths must fit."""
    whole = golden_of(model).cases[case]
    cached = n_cached(mistake, whole)
    weights = weights_of(model)
    replaced = [name for name in mistake.stages if name == stage or {name, stage} == set(CACHES)]
    return chained(
        weights,
        whole.after(cached),
        past=first_part(model, case, cached),
        replace={name: wrong_compute(mistake, name) for name in replaced},
        reads=reads_of(mistake, weights.config),
    )

"""Known mistakes planted in the goldens' own inputs: the situations that the tests of teeth go through."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from llorch.builtin import BUILTIN, EVERY, builtin_path, goldens_folder
from llorch.cache import KVCache
from llorch.comparison import Tolerance, measure
from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.cache import CACHES
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, stage_inputs
from llorch.diagnosis.mistakes.variants import VISIBLE, Variants, made_wrong, variants
from llorch.families import forward
from llorch.files import Weights, open_weights
from llorch.places import Pass, part_of
from llorch.stages import BY_NAME, Stage, key, keys
from llorch.verify.expectations.forward import ForwardSuite
from llorch.verify.goldens import Golden, read
from llorch.verify.runners.numpy import run

MICRO = tuple(name for name in BUILTIN if name.startswith("micro"))
BOTH = ("micro-qwen3-next", "micro-qwen3.5-moe")  # experts and delta nets, each of which another model has alone


@cache
def golden_of(model: str) -> Golden:
    return read(goldens_folder() / model)


@cache
def cases_of(model: str) -> frozenset[str]:
    """Name the cases of a golden without its arrays, which take long to read."""
    return frozenset(json.loads((goldens_folder() / model / "golden.json").read_text(encoding="utf-8"))["cases"])


@cache
def weights_of(model: str) -> Weights:
    weights = open_weights(builtin_path(model))
    weights.layer = cache(weights.layer)  # each of some ten thousand stages asks for its layer
    return weights


@cache
def suite_of(model: str) -> ForwardSuite:
    golden = golden_of(model)
    return ForwardSuite(model, weights_of(model), golden.cases, golden.evidence, golden.truth)


@cache
def right(model: str, case: str, producer: str, n_cached: int) -> Mapping[str, np.ndarray]:
    """Every stage of our forward pass, made of a golden's inputs."""
    golden = golden_of(model)
    trace = golden.evidence[producer].traces[case]
    return run(weights_of(model), golden.cases[case], n_cached=n_cached, golden=trace)


def by_name(mistake: Mistake) -> str:
    return "_".join((*(f"checkpoint_{number}" for number in mistake.checkpoints), mistake.name))


def models_of(mistake: Mistake) -> list[str]:
    """The dense micro models whose goldens show the mistake, else those of others."""
    configs = {model: weights_of(model).config for model in EVERY}
    able = [
        model
        for model, config in configs.items()
        if mistake.applies_to(config)
        and any(BY_NAME[stage].applies_to(config) for stage in mistake.stages)
        and {*mistake.cases} <= cases_of(model)
    ]
    alone = [model for model in able if model not in BOTH]
    return [model for model in alone if model in MICRO] or alone or able


@dataclass(frozen=True)
class Situation:
    """One stage of a layer (or outside the layers) of one golden."""

    model: str
    case: str
    producer: str
    stage_name: str
    layer: int | None
    n_cached: int

    @property
    def stage(self) -> Stage:
        return BY_NAME[self.stage_name]

    @property
    def key(self) -> str:
        return key(self.stage_name, self.layer)

    @property
    def trace(self) -> dict[str, np.ndarray]:
        return dict(golden_of(self.model).evidence[self.producer].traces[self.case])

    @property
    def golden(self) -> np.ndarray:
        return part_of(self.stage, self.trace[self.key], self.n_cached, len(golden_of(self.model).cases[self.case].ids))

    @property
    def tolerance(self) -> Tolerance:
        return suite_of(self.model).limits(self.case).isolated(self.key)

    @cache  # noqa: B019 (situations are few and equal ones share the entry)
    def made(self) -> Variants:
        whole = golden_of(self.model).cases[self.case]
        alone = right(self.model, self.case, self.producer, self.n_cached)[self.key]
        return variants(
            self.stage, self.layer, self.trace, weights_of(self.model), whole, alone, n_cached=self.n_cached
        )


def named_by(observed: np.ndarray, made: Variants, tolerance: Tolerance) -> list[str]:
    """Mistakes that make just this, the nearest first; none where it is right, or where these inputs do not show it."""
    if measure(observed, made.right, masked=made.masked).within(tolerance):
        return []
    found = []
    for (mistake, wrong), effect in zip(made.wrong, made.effects, strict=True):
        left = measure(*_where_finite(observed, wrong, masked=made.masked), masked=made.masked)
        if effect.over(tolerance) >= VISIBLE and left.within(tolerance):
            found.append((left.error, mistake.name))
    return [name for _, name in sorted(found)]


def _where_finite(observed: np.ndarray, wrong: np.ndarray, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Leave out what neither has as a number, as `Beside.where_finite` of the diagnosis does."""
    if masked or observed.shape != wrong.shape:
        return observed, wrong
    nothing = ~np.isfinite(observed) & ~np.isfinite(wrong)
    return np.where(nothing, 0, observed), np.where(nothing, 0, wrong)


def n_cached(mistake: Mistake, whole: Pass) -> int:
    return len(whole.ids) // 2 if mistake.after_cached else 0


def situations(mistake: Mistake) -> Iterator[Situation]:
    """Wherever a mistake has to show: every model, case, producer and stage."""
    for model in models_of(mistake):
        config = weights_of(model).config
        for case in mistake.cases:
            cached = n_cached(mistake, golden_of(model).cases[case])
            for stage in (stage for stage in mistake.stages if BY_NAME[stage].applies_to(config)):
                for producer in golden_of(model).evidence:
                    yield Situation(model, case, producer, stage, mistake.first_layer(stage, config), cached)


def chain(mistake: Mistake[StageInputs], weights: Weights, whole: Pass, stage: str) -> dict[str, np.ndarray]:
    """Our forward pass on its own results, with one stage done wrong; both caches together: their lengths must fit."""
    n, trace, cache = n_cached(mistake, whole), dict[str, np.ndarray](), KVCache(weights.config, weights.dtype)
    cache._first_position = whole.first_position
    wrong = {name for name in mistake.stages if name == stage or {name, stage} == set(CACHES)}
    places = {name: (stage, layer) for name, stage, layer in keys(weights.config)}
    past: dict[str, np.ndarray] = {}

    def note(name: str, array: np.ndarray) -> np.ndarray:
        past[name] = array.copy()
        return array

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        here, layer = places[name]
        if here.name in wrong and (layer is None or mistake.in_layers(weights.config, layer)):
            inputs = stage_inputs(here, layer, weights, whole.after(n), trace, past or None, reads=mistake.reads)
            array = made_wrong(mistake, inputs, here.name)
        trace[name] = array
        return array

    ids = np.asarray(whole.ids)
    if n:
        forward(ids[:n], weights, cache, keep=note)
    forward(ids[n:], weights, cache, keep=keep)
    return trace


def first_failing(
    trace: Mapping[str, np.ndarray], suite: ForwardSuite, case: str, producer: str, n_cached: int
) -> tuple[str, int | None] | None:
    """The first stage of a pass that is not within the limits of its golden, and its layer."""
    limits, whole = suite.limits(case), suite.cases[case]
    for name, stage, layer in keys(suite.weights.config):
        want = part_of(stage, suite.evidence[producer].traces[case][name], n_cached, len(whole.ids))
        if not measure(trace[name], want, masked=stage.masked).within(limits.chained(name, n_cached)):
            return stage.name, layer
    return None

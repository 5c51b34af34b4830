"""Places where a known mistake has to show in a golden's inputs: a stage, a step of sampling, a quantised product."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from builders.families import MICRO
from helpers.stored_goldens import (
    cases_of,
    golden_of,
    quantised_golden,
    rounding_variant,
    suite_of,
    training_weights_of,
    weights_of,
)

from llorch.diagnosis.mistakes import QUANTISED, SAMPLING, Mistake, QuantisedInputs, SamplerInputs
from llorch.diagnosis.mistakes.cache import CACHES
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, stage_inputs
from llorch.diagnosis.mistakes.variants import (
    VISIBLE,
    Variants,
    apply_mistake,
    quantised_variants,
    sampler_variants,
    variants,
)
from llorch.files import Weights, open_weights
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType, decode
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens import training as training_goldens
from llorch.judging.goldens.forward import ENGINES, SAMPLINGS, sampler_inputs
from llorch.judging.runners.numpy import run
from llorch.judging.tolerances.forward import WORST
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.builtin import EVERY
from llorch.stages.comparison import EXACT, Tolerance, measure
from llorch.stages.stage_ref import Pass, part_of
from llorch.stages.table import BY_NAME, Stage, key, keys

BOTH = ("micro-qwen3-next", "micro-qwen3.5-moe")  # experts and delta nets, each of which another model has alone
PRODUCT = Tolerance(1e-6, WORST * 1e-6)  # the largest tolerance of a product alone
N_ORDINARY = 4  # blocks before those with edge cases, whose sizes would hide the others'


@cache
def right(model: str, case: str, engine: str, n_cached: int) -> Mapping[str, np.ndarray]:
    """Every stage of our forward pass, made of a golden's inputs."""
    golden = golden_of(model)
    trace = golden.engine_outputs[engine].traces[case]
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


def training_models_of(mistake: Mistake) -> list[str]:
    """Models with training goldens that can have a mistake; none of experts and delta nets, which no dense one has."""
    return [model for model in training_goldens.MODELS if mistake.applies_to(training_weights_of(model).config)]


@dataclass(frozen=True)
class Situation:
    """One stage of a layer (or outside the layers) of one golden."""

    model: str
    case: str
    engine: str
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
        return dict(golden_of(self.model).engine_outputs[self.engine].traces[self.case])

    @property
    def masked(self) -> bool:
        return self.stage.masked

    @property
    def expected(self) -> np.ndarray:
        return part_of(self.stage, self.trace[self.key], self.n_cached, len(golden_of(self.model).cases[self.case].ids))

    @property
    def tolerance(self) -> Tolerance:
        return suite_of(self.model).tolerances(self.case).isolated(self.key)

    @cache  # noqa: B019 (situations are few and equal ones share the entry)
    def make_variants(self) -> Variants:
        whole = golden_of(self.model).cases[self.case]
        alone = right(self.model, self.case, self.engine, self.n_cached)[self.key]
        return variants(
            self.stage, self.layer, self.trace, weights_of(self.model), whole, alone, n_cached=self.n_cached
        )


@dataclass(frozen=True)
class SamplerSituation:
    """One step from the logits to a distribution, of one golden."""

    model: str
    engine: str
    step: str
    case: str
    masked = False

    @property
    def tolerance(self) -> Tolerance:
        suite = suite_of(self.model)
        if self.step == "argmax":
            return EXACT
        return suite.softmax_limit() if self.step == "probabilities" else suite.tolerances("near").last_row()

    @property
    def expected(self) -> np.ndarray:
        return self._inputs_and_expected()[1]

    def make_variants(self) -> Variants:
        return sampler_variants(self.step, self._inputs_and_expected()[0], weights_of(self.model).config)

    def _inputs_and_expected(self) -> tuple[SamplerInputs, np.ndarray]:
        """Return the inputs of the step and the engine's output; at a tie it is the lowest id, as design.md states."""
        golden = golden_of(self.model)
        engine_output, ids = golden.engine_outputs[self.engine], golden.cases["near"].ids
        selected = engine_output.selected_logits
        if self.step == "selected_logits":
            return SamplerInputs(engine_output.traces["near"]["logits"], SAMPLINGS["all"], ids), selected
        if self.step == "argmax":
            row = selected.copy()
            best = int(np.argmax(row))
            if self.case == "tie":
                row[best + 1 :: 7] = row[best]
            return SamplerInputs(row[None], SAMPLINGS["all"], ids), np.asarray([best])
        logits, history = sampler_inputs(ids, selected.size)
        return SamplerInputs(logits[None], SAMPLINGS[self.case], history), engine_output.probabilities[self.case]


@dataclass(frozen=True)
class QuantisedSituation:
    """One step of a product with a matrix of one type."""

    step: str
    kind: GGMLType
    masked = False

    @property
    def tolerance(self) -> Tolerance:
        return PRODUCT if self.step == "product" else EXACT

    @cache  # noqa: B019 (situations are few and equal ones share the entry)
    def inputs_and_expected(self) -> tuple[QuantisedInputs, np.ndarray]:
        """The inputs of the step, and what ggml made of them."""
        return {"decode": _blocks, "rounding": _activations, "product": _product}[self.step](self.kind)

    @property
    def expected(self) -> np.ndarray:
        return self.inputs_and_expected()[1]

    @cache  # noqa: B019
    def make_variants(self) -> Variants:
        return quantised_variants(self.step, self.inputs_and_expected()[0])


def named_by(observed: np.ndarray, variants: Variants, tolerance: Tolerance) -> list[str]:
    """Mistakes that make just this, the nearest first; none where it is right, or where these inputs do not show it."""
    if measure(observed, variants.right, masked=variants.masked).within(tolerance):
        return []
    found = []
    for (mistake, wrong), effect in zip(variants.wrong, variants.effects, strict=True):
        left = measure(*_where_finite(observed, wrong, masked=variants.masked), masked=variants.masked)
        if effect.over(tolerance) >= VISIBLE and left.within(tolerance):
            found.append((left.error, mistake.name))
    return [name for _, name in sorted(found)]


def _where_finite(observed: np.ndarray, wrong: np.ndarray, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Leave out what neither has as a number, as `ArrayPair.where_finite` of the diagnosis does."""
    if masked or observed.shape != wrong.shape:
        return observed, wrong
    nothing = ~np.isfinite(observed) & ~np.isfinite(wrong)
    return np.where(nothing, 0, observed), np.where(nothing, 0, wrong)


def n_cached(mistake: Mistake, full_pass: Pass) -> int:
    return len(full_pass.ids) // 2 if mistake.after_cached else 0


def situations(mistake: Mistake) -> Iterator[Situation | SamplerSituation | QuantisedSituation]:
    """Wherever a mistake has to show: every model, case, engine and stage; or every step and type of a product."""
    if mistake in QUANTISED:
        yield from (QuantisedSituation(step, GGMLType[case]) for step, case in product(mistake.stages, mistake.cases))
    elif mistake in SAMPLING:
        (step,) = mistake.stages
        for model, engine, case in product(MICRO, ENGINES, mistake.cases):
            yield SamplerSituation(model, engine, step, case)
    else:
        yield from _of_stages(mistake)


def _of_stages(mistake: Mistake) -> Iterator[Situation]:
    for model in models_of(mistake):
        config = weights_of(model).config
        for case in mistake.cases:
            cached = n_cached(mistake, golden_of(model).cases[case])
            for stage in (stage for stage in mistake.stages if BY_NAME[stage].applies_to(config)):
                for engine in golden_of(model).engine_outputs:
                    yield Situation(model, case, engine, stage, mistake.first_layer(stage, config), cached)


def chain(mistake: Mistake[StageInputs], weights: Weights, full_pass: Pass, stage: str) -> dict[str, np.ndarray]:
    """Our forward pass on its own results, with one stage done wrong; both caches together: their lengths must fit."""
    n, trace, cache = n_cached(mistake, full_pass), dict[str, np.ndarray](), KVCache(weights.config, weights.dtype)
    cache._first_position = full_pass.first_position
    wrong = {name for name in mistake.stages if name == stage or {name, stage} == set(CACHES)}
    places = {name: (stage, layer) for name, stage, layer in keys(weights.config)}
    past: dict[str, np.ndarray] = {}

    def note(name: str, array: np.ndarray) -> np.ndarray:
        past[name] = array.copy()
        return array

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        here, layer = places[name]
        if here.name in wrong and (layer is None or mistake.in_layers(weights.config, layer)):
            inputs = stage_inputs(here, layer, weights, full_pass.after(n), trace, past or None, reads=mistake.reads)
            array = apply_mistake(mistake, inputs, here.name)
        trace[name] = array
        return array

    ids = np.asarray(full_pass.ids)
    if n:
        forward(ids[:n], weights, cache, keep=note)
    forward(ids[n:], weights, cache, keep=keep)
    return trace


def first_failing(
    trace: Mapping[str, np.ndarray], suite: ForwardExpectations, case: str, engine: str, n_cached: int
) -> tuple[str, int | None] | None:
    """The first stage of a pass that is not within the limits of its golden, and its layer."""
    tolerances, whole = suite.tolerances(case), suite.cases[case]
    for name, stage, layer in keys(suite.weights.config):
        expected = part_of(stage, suite.engine_outputs[engine].traces[case][name], n_cached, len(whole.ids))
        if not measure(trace[name], expected, masked=stage.masked).within(tolerances.chained(name, n_cached)):
            return stage.name, layer
    return None


def _blocks(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    blocks, values = (quantised_golden().blocks[f"{kind.name}.{part}"][:N_ORDINARY] for part in ("blocks", "values"))
    return QuantisedInputs(kind, blocks, values.shape, np.empty((0, 0), np.float32), rounding_variant()), values


def _activations(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    name = ACTIVATION_TYPE[kind]
    rows = quantised_golden().rounding[f"{name}.rows"]
    expected = decode(quantised_golden().rounding[f"{name}.{rounding_variant()}"], GGMLType[name], rows.shape)
    finite = np.isfinite(expected).all(axis=1)
    return QuantisedInputs(kind, np.empty((0, 0), np.uint8), (0, 0), rows[finite], rounding_variant()), expected[finite]


def _product(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    trace = quantised_golden().traces[kind.name]
    with tempfile.TemporaryDirectory() as folder:
        weights = open_weights(write_model(kind.name, Path(folder)))
        packed = weights.source.packed("blk.0.ffn_gate.weight")
        blocks = packed.raw.reshape(-1, BLOCK_SIZES[kind][1]).copy()
        weights.source.close()
    return QuantisedInputs(kind, blocks, packed.shape, trace["l0.ffn_norm"], rounding_variant()), trace["l0.ffn_gate"]

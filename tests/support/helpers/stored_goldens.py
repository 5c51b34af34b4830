"""Goldens of the repository with their models and suites, each read once in a process; nobody may change them."""

import json
from functools import cache

from llorch.files import Weights, open_weights
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.goldens import forward as goldens
from llorch.judging.goldens import quantised as quantised_goldens
from llorch.judging.goldens import training as training_goldens
from llorch.ops.rounding import VariantName
from llorch.runtime.builtin import builtin_path, goldens_folder


@cache
def golden_of(model: str) -> goldens.Golden:
    return goldens.read(goldens_folder() / model)


@cache
def training_golden_of(model: str) -> training_goldens.TrainingGolden:
    return training_goldens.read(goldens_folder() / model)


@cache
def quantised_golden() -> quantised_goldens.QuantisedGolden:
    """The golden of checkpoint 13."""
    return quantised_goldens.read(goldens_folder() / quantised_goldens.FOLDER)


@cache
def rounding_variant() -> VariantName:
    """The build of ggml that the golden of checkpoint 13 was made with."""
    return quantised_golden().provenance["rounding"]  # pyright: ignore[reportReturnType]


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
def training_weights_of(model: str) -> Weights:
    """Weights without a cache of layers, which copies with an adapter or in another dtype would share."""
    return open_weights(builtin_path(model))


@cache
def suite_of(model: str) -> ForwardExpectations:
    golden = golden_of(model)
    return ForwardExpectations(model, weights_of(model), golden.cases, golden.engine_outputs, golden.reference)


@cache
def suite_of_case(model: str, case: str, *engines: str) -> ForwardExpectations:
    """The suite of one case, with some of the reference engines or all."""
    golden = golden_of(model)
    engine_outputs = {name: output for name, output in golden.engine_outputs.items() if name in engines or not engines}
    return ForwardExpectations(model, weights_of(model), {case: golden.cases[case]}, engine_outputs, golden.reference)

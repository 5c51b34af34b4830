"""Products by ggml's kernels against llorch's own form of ggml numerics, in float32 and in float64.

llama.cpp calls the same kernels, so agreement with it does not show that they are right. The own form shares nothing
with them: `ops.rounding` rounds the inputs, `files.quant` decodes the weights, and NumPy multiplies. Its float64
product is the reference of both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from llorch.files import Weights
from llorch.judging.compare import judge
from llorch.judging.runners import Trace
from llorch.judging.runners.numpy import BY_KERNELS, show
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.tolerances.forward import ForwardTolerances
from llorch.judging.types import Comparison, Expectation
from llorch.stages.stage_ref import Pass, StageRef
from llorch.stages.table import keys

FLOAT32, FLOAT64 = "own-form", "own-form-float64"
CHECKPOINT = "13"


def compare_with_own_form(
    name: str, weights: Weights, inputs: Pass, golden: Trace, tolerances: ForwardTolerances, case: str = "near"
) -> Iterator[Comparison]:
    """Compare every product of a pass by ggml's kernels, each with the golden's inputs and its isolated tolerance."""
    own = weights.using(replace(weights.numerics, kernels="own"))
    passes = [partial(_products, w, inputs, golden) for w in (weights, own, own.astype(np.float64))]
    shares_layers = isinstance(weights, SharedWeights)
    actual, in_float32, reference = weights.together(passes) if shares_layers else [run() for run in passes]
    for engine, expected in ((FLOAT32, in_float32), (FLOAT64, reference)):
        for key, stage, layer in keys(weights.config):
            if key in expected:
                stage_ref, tolerance = StageRef(CHECKPOINT, stage.name, layer, case), tolerances.isolated(key)
                expectation = Expectation(
                    stage_ref, "isolated", engine, expected[key], tolerance, reference=reference[key], stage=stage
                )
                yield judge(expectation, actual[key].astype(expected[key].dtype), model=name, backend=BY_KERNELS)


def _products(weights: Weights, inputs: Pass, golden: Trace) -> Mapping[str, np.ndarray]:
    """Return the outputs of all matrix products, by key of their stage."""
    names = {key for key, stage, _ in keys(weights.config) if stage.matrix}
    products: dict[str, np.ndarray] = {}

    def observe(name: str, array: np.ndarray) -> None:
        if name in names:
            products[name] = array

    show(weights, inputs, observe, golden=golden)
    return products

"""Results of a stage on the same inputs, right and wrong in every known way; tests inject all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes import (
    QUANTISED,
    SAMPLING,
    STAGE_MISTAKES,
    Mistake,
    QuantisedInputs,
    SamplerInputs,
    quantised,
)
from llorch.diagnosis.mistakes.sampling import RIGHT
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.stages.comparison import Difference, measure
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME, Stage

VISIBLE = 10.0  # a mistake counts where it exceeds the tolerance by this factor


@dataclass(frozen=True)
class Variants:
    """Results of one stage on the same inputs, right and wrong.

    Attributes:
        right: Result of the right op.
        wrong: Results of each known mistake.
        masked: See `compare.measure`.
    """

    right: np.ndarray
    wrong: Sequence[tuple[Mistake[Any], np.ndarray]]
    masked: bool = False

    @cached_property
    def effects(self) -> list[Difference]:
        """Difference between each mistake and the right op on these inputs."""
        return [measure(wrong, self.right, masked=self.masked) for _, wrong in self.wrong]


def variants(
    stage: Stage,
    layer: int | None,
    golden: Mapping[str, np.ndarray],
    weights: Weights,
    whole: Pass,
    right: np.ndarray,
    *,
    n_cached: int = 0,
) -> Variants:
    """Make every known mistake of a stage on a golden's inputs; `right` is what the forward pass makes of them."""
    config, this = weights.config, whole.after(n_cached)
    now = part_of_trace(golden, config, n_cached, len(whole.ids))
    past = part_of_trace(golden, config, 0, n_cached) if n_cached else None
    wrong = []
    for mistake in mistakes_of(stage.name, config, layer, n_cached=n_cached):
        inputs = stage_inputs(stage, layer, weights, this, now, past, reads=mistake.reads)
        wrong.append((mistake, made_wrong(mistake, inputs, stage.name)))
    return Variants(right, wrong, stage.masked)


def sampler_variants(step: str, inputs: SamplerInputs, config: ModelConfig) -> Variants:
    """Run a step after the logits, right and wrong: `selected_logits`, `argmax` or `probabilities`."""
    known = [mistake for mistake in SAMPLING if step in mistake.stages and mistake.applies_to(config)]
    return Variants(RIGHT[step](inputs), [(mistake, mistake.result(inputs, step)) for mistake in known])


def quantised_variants(step: str, inputs: QuantisedInputs) -> Variants:
    """Run a part of a quantised product, right and wrong: `decode`, `rounding` or `product`."""
    known = [mistake for mistake in QUANTISED if step in mistake.stages and inputs.kind.name in mistake.cases]
    return Variants(quantised.RIGHT[step](inputs), [(mistake, mistake.result(inputs, step)) for mistake in known])


def mistakes_of(stage: str, config: ModelConfig, layer: int | None, *, n_cached: int) -> list[Mistake[StageInputs]]:
    """List the known mistakes of a stage that can be made in a layer of a model with `n_cached` tokens in the cache."""
    return [
        mistake
        for mistake in STAGE_MISTAKES
        if stage in mistake.stages
        and mistake.applies_to(config)
        and (n_cached or not mistake.after_cached)
        and (layer is None or mistake.in_layers(config, layer))
    ]


def made_wrong(mistake: Mistake[StageInputs], inputs: StageInputs, stage: str) -> np.ndarray:
    """Compute the wrong array, in the dtype of the run; ids are int64."""
    dtype = np.int64 if BY_NAME[stage].is_choice else inputs.dtype
    return np.ascontiguousarray(mistake.result(inputs, stage), dtype=dtype)

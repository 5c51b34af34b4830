"""Arrays of a stage on the same inputs, right and with every known mistake; tests use all of them."""

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

VISIBLE = 10.0  # smallest effect of a mistake, in tolerances, that counts as visible


@dataclass(frozen=True)
class Variants:
    """Arrays of one stage on the same inputs, right and wrong."""

    right: np.ndarray
    wrong: Sequence[tuple[Mistake[Any], np.ndarray]]  # each known mistake with its array
    masked: bool = False  # -inf marks masked entries, see `comparison.measure`

    @cached_property
    def effects(self) -> list[Difference]:
        """Difference between each mistake's array and the right one."""
        return [measure(wrong, self.right, masked=self.masked) for _, wrong in self.wrong]


def variants(
    stage: Stage,
    layer: int | None,
    golden: Mapping[str, np.ndarray],
    weights: Weights,
    all_tokens: Pass,
    right: np.ndarray,
    *,
    n_cached: int = 0,
) -> Variants:
    """Compute every known mistake of a stage on a golden's inputs, for the pass after `n_cached` of `all_tokens`.

    `right` is the forward pass's array of the stage.
    """
    config, last_pass = weights.config, all_tokens.after(n_cached)
    trace = part_of_trace(golden, config, n_cached, len(all_tokens.ids))
    past = part_of_trace(golden, config, 0, n_cached) if n_cached else None
    wrong = []
    for mistake in list_mistakes(stage.name, config, layer, n_cached=n_cached):
        inputs = stage_inputs(stage, layer, weights, last_pass, trace, past, reads=mistake.reads)
        wrong.append((mistake, apply_mistake(mistake, inputs, stage.name)))
    return Variants(right, wrong, stage.masked)


def sampler_variants(step: str, inputs: SamplerInputs, config: ModelConfig) -> Variants:
    """Compute a step after the logits, right and wrong: `selected_logits`, `argmax` or `probabilities`."""
    mistakes = [mistake for mistake in SAMPLING if step in mistake.stages and mistake.applies_to(config)]
    return Variants(RIGHT[step](inputs), [(mistake, mistake.result(inputs, step)) for mistake in mistakes])


def quantised_variants(step: str, inputs: QuantisedInputs) -> Variants:
    """Compute a part of a quantised product, right and wrong: `decode`, `rounding` or `product`."""
    mistakes = [mistake for mistake in QUANTISED if step in mistake.stages and inputs.kind.name in mistake.cases]
    return Variants(quantised.RIGHT[step](inputs), [(mistake, mistake.result(inputs, step)) for mistake in mistakes])


def list_mistakes(stage: str, config: ModelConfig, layer: int | None, *, n_cached: int) -> list[Mistake[StageInputs]]:
    """List the known mistakes of a stage that apply to a layer of a model with `n_cached` tokens in the cache."""
    return [
        mistake
        for mistake in STAGE_MISTAKES
        if stage in mistake.stages
        and mistake.applies_to(config)
        and (n_cached or not mistake.after_cached)
        and (layer is None or mistake.in_layers(config, layer))
    ]


def apply_mistake(mistake: Mistake[StageInputs], inputs: StageInputs, stage: str) -> np.ndarray:
    """Compute the wrong array, in the dtype of the run; ids are int64."""
    dtype = np.int64 if BY_NAME[stage].is_selection else inputs.dtype
    return np.ascontiguousarray(mistake.result(inputs, stage), dtype=dtype)

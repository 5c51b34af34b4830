"""Diagnosis: which known mistake makes the array that was observed.

Every wrong variant of the stage is run on the inputs that the right op got. One whose result equals the observed
array, to the tolerance that the right op is held to, is named; others are ranked by how near they come. Variants that
these inputs cannot tell from the right op are left out, so an honest result is never accused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.stages import BY_NAME, Stage, key
from llorch.verify.compare import Difference, Tolerance, measure
from llorch.verify.mistakes import (
    QUANTISED,
    SAMPLING,
    STAGE_MISTAKES,
    Mistake,
    QuantisedInputs,
    SamplerInputs,
    quantised,
)
from llorch.verify.mistakes.sampling import RIGHT
from llorch.verify.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.verify.places import Pass
from llorch.verify.runners.numpy import run

VISIBLE = 10.0  # a mistake counts where it exceeds the tolerance by this factor


@dataclass(frozen=True)
class Variants:
    """What one stage makes of the same inputs, done right and done wrong.

    Attributes:
        right: By the right op.
        wrong: By each known mistake.
        masked: See `compare.measure`.
    """

    right: np.ndarray
    wrong: Sequence[tuple[Mistake[Any], np.ndarray]]
    masked: bool = False

    @cached_property
    def effects(self) -> list[Difference]:
        """How far each mistake is from the right op on these inputs."""
        return [measure(wrong, self.right, masked=self.masked) for _, wrong in self.wrong]


@dataclass(frozen=True)
class Suspect:
    """One mistake, and how far the observed array is from what it makes.

    Attributes:
        mistake: The mistake.
        difference: Observed from its wrong variant.
        named: The two agree to the tolerance: this is what was done.
    """

    mistake: Mistake[Any]
    difference: Difference
    named: bool


def diagnose(
    stage: Stage,
    layer: int | None,
    golden: Mapping[str, np.ndarray],
    weights: Weights,
    whole: Pass,
    observed: np.ndarray,
    *,
    tolerance: Tolerance,
    n_cached: int = 0,
) -> list[Suspect]:
    """Say which mistake makes a stage's observed array from the golden's inputs.

    Args:
        stage: The stage.
        layer: Its layer, or None.
        golden: The trace that the inputs are taken from: a producer's, or the observed engine's own.
        weights: The model in float32.
        whole: The pass that the golden recorded.
        observed: The stage as the engine under test made it from those inputs.
        tolerance: What the right op is held to.
        n_cached: Tokens that were in the cache before the observed pass.

    Returns:
        Suspects, the nearest first; none when the observed array is right.
    """
    right = run(weights, whole, n_cached=n_cached, golden=golden)[key(stage.name, layer)]
    made = variants(stage, layer, golden, weights, whole, right, n_cached=n_cached)
    return rank(observed, made, tolerance=tolerance)


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
    for mistake in mistakes_of(stage.name, config, n_cached=n_cached):
        inputs = stage_inputs(stage, layer, weights, this, now, past, reads=reads_of(mistake, config))
        wrong.append((mistake, made_wrong(mistake, inputs, stage.name)))
    return Variants(right, wrong, stage.masked)


def sampler_variants(step: str, inputs: SamplerInputs, config: ModelConfig) -> Variants:
    """Run a step after the logits, right and wrong.

    Args:
        step: `selected_logits`, `argmax` or `probabilities`.
        inputs: What the step gets.
        config: The model.

    Returns:
        What it makes of them.
    """
    known = [mistake for mistake in SAMPLING if step in mistake.stages and mistake.applies_to(config)]
    return Variants(RIGHT[step](inputs), [(mistake, mistake.wrong(inputs, step)) for mistake in known])


def quantised_variants(step: str, inputs: QuantisedInputs) -> Variants:
    """Run a part of a quantised product, right and wrong.

    Args:
        step: `decode`, `rounding` or `product`.
        inputs: A matrix and what it is multiplied with.

    Returns:
        What it makes of them.
    """
    known = [mistake for mistake in QUANTISED if step in mistake.stages and inputs.kind.name in mistake.cases]
    return Variants(quantised.RIGHT[step](inputs), [(mistake, mistake.wrong(inputs, step)) for mistake in known])


def rank(observed: np.ndarray, made: Variants, *, tolerance: Tolerance) -> list[Suspect]:
    """Order mistakes by the distance of the observed array from what each of them makes.

    Args:
        observed: What was seen.
        made: What the right op and the mistakes make.
        tolerance: What counts as equal.

    Returns:
        Suspects, the nearest first; none when the observed array is right.
    """
    if measure(observed, made.right, masked=made.masked).within(tolerance):
        return []
    suspects = []
    for (mistake, wrong), effect in zip(made.wrong, made.effects, strict=True):
        if effect.over(tolerance) >= VISIBLE:
            difference = measure(observed, wrong, masked=made.masked)
            suspects.append(Suspect(mistake, difference, difference.within(tolerance)))
    return sorted(suspects, key=lambda suspect: (not suspect.named, suspect.difference.error))


def mistakes_of(stage: str, config: ModelConfig, *, n_cached: int) -> list[Mistake[StageInputs]]:
    """Known mistakes of a stage that can be made with a configuration, and with so many tokens in the cache."""
    return [
        mistake
        for mistake in STAGE_MISTAKES
        if stage in mistake.stages and mistake.applies_to(config) and (n_cached or not mistake.after_cached)
    ]


def reads_of(mistake: Mistake[Any], config: ModelConfig) -> tuple[str, ...]:
    """What a mistake reads beside the right op's inputs, as far as the model has it."""
    return tuple(name for name in mistake.reads if name not in BY_NAME or BY_NAME[name].applies_to(config))


def made_wrong(mistake: Mistake[StageInputs], inputs: StageInputs, stage: str) -> np.ndarray:
    """The wrong array, in the dtype of the run."""
    return np.ascontiguousarray(mistake.wrong(inputs, stage), dtype=inputs.dtype)

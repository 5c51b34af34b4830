"""Known mistakes in attention temperature, YaRN, and the layers of Llama 4; module `mistake` explains the fields.

Attention temperature multiplies a query by a factor that grows with its position.

Two plausible mistakes are absent, because they change nothing. A head norm without a gain gives the same before RoPE as
after it: a rotation preserves norms. A sigmoid before top-k keeps the order of the experts.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llorch.diagnosis.mistakes.in_stage import KEY, ROTATED, rotated_heads
from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig, YarnScaling
from llorch.families.layers import Temperature
from llorch.families.rope_scaling import yarn_gain
from llorch.ops.rope import frequencies, rope, scale_frequencies
from llorch.ops.routing import router_probs


def _tempers(config: ModelConfig) -> bool:
    """Tell if the model scales its queries by a temperature."""
    return config.temperature is not None


def _is_llama4(config: ModelConfig) -> bool:
    """Tell if the model's temperature adds 1 to positions, as Llama 4's does."""
    return config.temperature is not None and config.temperature.offset == 1


def _is_ministral(config: ModelConfig) -> bool:
    """Tell if the model's temperature takes positions as they are, as Ministral's does."""
    return config.temperature is not None and config.temperature.offset == 0


def _scales_inputs(config: ModelConfig) -> bool:
    """Tell if the expert weight multiplies each expert's input instead of its output."""
    return config.experts is not None and config.experts.scaled_inputs


def _pairs_neighbours(config: ModelConfig) -> bool:
    return config.interleaved_rope_hf


def _has_mscale_pair(config: ModelConfig) -> bool:
    """Tell if mscale and mscale_all_dim give YaRN an attention factor that is neither 1 nor the default."""
    yarn = config.rope_scaling
    return isinstance(yarn, YarnScaling) and yarn.attention_factor not in (1.0, yarn_gain(yarn.factor))


def _has_gain(config: ModelConfig) -> bool:
    """Tell if YaRN multiplies cosines and sines by an attention factor other than 1."""
    return isinstance(config.rope_scaling, YarnScaling) and config.rope_scaling.attention_factor != 1.0


def _queries(s: StageInputs) -> np.ndarray:
    """Return the queries that the temperature multiplies, the stage's only input, (seq, heads, head_dim)."""
    (x,) = (array for name, array in s.arrays.items() if name.startswith("q_"))
    return x.reshape(len(x), -1, s.config.head_dim)


def _queries_times(s: StageInputs, factor: np.ndarray) -> np.ndarray:
    return _queries(s) * factor[:, None, None].astype(s.dtype)


def _with_temperature(**changes: float) -> Wrong[StageInputs]:
    """Make the mistake of other temperature settings."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        assert s.config.temperature is not None
        temperature: Temperature = replace(s.config.temperature, **changes)
        return _queries_times(s, temperature.of(s.positions))

    return wrong


def not_floored(s: StageInputs, stage: str) -> np.ndarray:
    """Omit the floor before the logarithm of the position."""
    temperature = s.config.temperature
    assert temperature is not None
    return _queries_times(s, 1 + temperature.scale * np.log1p((s.positions + temperature.offset) / temperature.floor))


def _with_gain(gain: Callable[[YarnScaling], float]) -> Wrong[StageInputs]:
    """Make the mistake of another attention factor on cosines and sines."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        yarn = s.config.rope_scaling
        assert isinstance(yarn, YarnScaling)
        tables = s.tables(replace(yarn, attention_factor=gain(yarn)))
        return s.turn(rotated_heads(s, stage), *tables)

    return wrong


def _yarn_blended(config: ModelConfig, start: float, end: float) -> np.ndarray:
    """Keep frequencies up to pair `start`, interpolate them from pair `end` on, and blend in between."""
    yarn, inv_freq = config.rope_scaling, frequencies(config.rotated, config.rope_theta)
    assert isinstance(yarn, YarnScaling)
    ramp = np.clip((np.arange(len(inv_freq)) - start) / (end - start or 0.001), 0, 1)  # a step if both are equal
    return inv_freq * (1 - ramp) + inv_freq / yarn.factor * ramp


def _ramp_exchanged(config: ModelConfig) -> np.ndarray:
    """Exchange start and end of the ramp."""
    assert isinstance(config.rope_scaling, YarnScaling)
    return _yarn_blended(config, *config.rope_scaling.ramp(head_dim=config.rotated, theta=config.rope_theta)[::-1])


def _ramp_unrounded(config: ModelConfig) -> np.ndarray:
    """Use the bounds of the ramp without rounding them to pairs, but clipped to the head."""
    assert isinstance(config.rope_scaling, YarnScaling)
    start, end = config.rope_scaling.bounds(head_dim=config.rotated, theta=config.rope_theta)
    return _yarn_blended(config, max(start, 0), min(end, config.rotated - 1))


def _with_frequencies(make: Callable[[ModelConfig], np.ndarray]) -> Wrong[StageInputs]:
    """Make the mistake of other frequencies, with the model's attention factor."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        assert isinstance(s.config.rope_scaling, YarnScaling)
        angle, gain = s.positions[:, None] * make(s.config), s.config.rope_scaling.attention_factor
        return s.turn(rotated_heads(s, stage), np.cos(angle) * gain, np.sin(angle) * gain)

    return wrong


def _changes_frequencies(make: Callable[[ModelConfig], np.ndarray]) -> Callable[[ModelConfig], bool]:
    """Make the predicate for models with YaRN whose frequencies the mistake changes."""

    def is_changed(config: ModelConfig) -> bool:
        size = {"head_dim": config.rotated, "theta": config.rope_theta}
        inv_freq = frequencies(**size)
        return isinstance(config.rope_scaling, YarnScaling) and not np.allclose(
            make(config), scale_frequencies(inv_freq, config.rope_scaling, **size), rtol=1e-3
        )

    return is_changed


def keys_tempered(s: StageInputs, stage: str) -> np.ndarray:
    """Multiply new keys by the temperature of queries."""
    temperature = s.config.temperature
    assert temperature is not None
    new = s.heads(KEY) * temperature.of(s.positions)[:, None, None].astype(s.dtype)
    return np.concatenate([s["past_k"], new.swapaxes(0, 1)], axis=1)


def turned_as_halves(s: StageInputs, stage: str) -> np.ndarray:
    """Rotate the pairs (j, j + half), as in most Hugging Face files."""
    return rope(rotated_heads(s, stage), *s.tables(s.config.rope_scaling))


def divided_by_length(s: StageInputs, stage: str) -> np.ndarray:
    """Divide by the root of the sum of squares, as the name of transformers' class, L2Norm, suggests."""
    x = s[f"{stage[0]}_rope"]
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + s.dtype(s.config.rms_norm_eps))


def softmax_of_chosen(s: StageInputs, stage: str) -> np.ndarray:
    """Compute Qwen's expert weights: the softmax over all experts at the selected ones."""
    return np.take_along_axis(router_probs(s["router_logits"]), s["topk_ids"].astype(int), -1)


POSITIONS: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="temperature-missing", stages=("q_tempered",), cases=("far",), applies_to=_tempers,
        wrong=lambda s, _: _queries(s),
        diagnosis="Queries were not multiplied by 1 + scale * ln(1 + floor(position / floor)) of their position.",
    ),
    Mistake(
        name="temperature-one-position-late", stages=("q_tempered",), cases=("far",), applies_to=_is_llama4,
        wrong=_with_temperature(offset=0),
        diagnosis="The temperature of Llama 4 counts positions from 1; the + 1 before the division is missing.",
    ),
    Mistake(
        name="temperature-one-position-early", stages=("q_tempered",), cases=("near",), applies_to=_is_ministral,
        wrong=_with_temperature(offset=1),
        diagnosis="The temperature of Ministral 3 counts positions from 0; only Llama 4 has the + 1.",
    ),
    Mistake(
        name="temperature-not-floored", stages=("q_tempered",), applies_to=_tempers, wrong=not_floored, cases=("near",),
        diagnosis="The share of the position was not rounded down before the logarithm.",
    ),
    Mistake(
        name="temperature-of-another-scale", stages=("q_tempered",), cases=("far",), applies_to=_tempers,
        wrong=_with_temperature(scale=1.0),
        diagnosis="The logarithm was not multiplied by the scale of the configuration, 0.1.",
    ),
    Mistake(
        name="temperature-on-keys", stages=("k_cache",), cases=("far",), applies_to=_tempers, wrong=keys_tempered,
        in_layers=lambda config, layer: config.layer(layer).has_attention_temperature,
        diagnosis="Keys were multiplied by the temperature of their position; only queries are.",
    ),
    Mistake(
        name="yarn-ramp-exchanged", stages=ROTATED, applies_to=_changes_frequencies(_ramp_exchanged),
        wrong=_with_frequencies(_ramp_exchanged),
        diagnosis="YaRN kept the slow frequencies and interpolated the fast ones: the ends of its ramp were exchanged.",
    ),
    Mistake(
        name="yarn-ramp-not-rounded", stages=ROTATED, applies_to=_changes_frequencies(_ramp_unrounded),
        wrong=_with_frequencies(_ramp_unrounded),
        diagnosis="The ends of YaRN's ramp lay between pairs; its start is rounded down and its end up.",
    ),
    Mistake(
        name="yarn-gain-of-the-paper", stages=ROTATED, applies_to=_has_mscale_pair,
        wrong=_with_gain(lambda yarn: yarn_gain(yarn.factor)),
        diagnosis="Cosines were multiplied by 0.1 ln(factor) + 1; with mscale it is divided by that of mscale_all_dim.",
    ),
    Mistake(
        name="yarn-gain-forgotten", stages=ROTATED, applies_to=_has_gain, wrong=_with_gain(lambda yarn: 1.0),
        diagnosis="Cosines and sines were not multiplied by YaRN's attention factor.",
    ),
    Mistake(
        name="yarn-gain-squared", stages=ROTATED, applies_to=_has_gain,
        wrong=_with_gain(lambda yarn: yarn.attention_factor**2),
        diagnosis="YaRN's attention factor was multiplied in twice, into cosines and again into queries or keys.",
    ),
    Mistake(
        name="rope-frequencies-zero", stages=ROTATED, cases=("far",), applies_to=_has_gain,
        wrong=_with_frequencies(lambda config: np.zeros(config.rotated // 2)),
        diagnosis="Every inverse frequency was zero, as in a buffer that is never filled; YaRN's gain alone was there.",
    ),
    Mistake(
        name="rope-halves-for-neighbours", stages=ROTATED, applies_to=_pairs_neighbours, wrong=turned_as_halves,
        diagnosis="Pairs (j, j + half) were turned; Llama 4 turns neighbours, (2j, 2j + 1), in every file.",
    ),
    Mistake(
        name="head-norm-missing", stages=("q_head_norm", "k_head_norm"), wrong=lambda s, stage: s[f"{stage[0]}_rope"],
        applies_to=_pairs_neighbours,
        diagnosis="Rotated heads were not divided by their root mean square.",
    ),
    Mistake(
        name="head-norm-by-length", stages=("q_head_norm", "k_head_norm"), wrong=divided_by_length,
        applies_to=_pairs_neighbours,
        diagnosis="Heads were divided by their length; L2Norm of Llama 4 divides by the root mean square.",
    ),
    Mistake(
        name="experts-weighted-by-softmax", stages=("topk_weights",), applies_to=_scales_inputs,
        wrong=softmax_of_chosen,
        diagnosis="Weights are a softmax over all experts; Llama 4 takes the sigmoid of each chosen logit.",
    ),
    Mistake(
        name="experts-given-all", stages=("expert_in",), applies_to=_scales_inputs,
        wrong=lambda s, _: np.repeat(s["ffn_norm"][:, None], s["topk_weights"].shape[1], axis=1),
        diagnosis="The inputs of the experts were not weighted; the weight multiplies the input, not the output.",
    ),
    Mistake(
        name="experts-weighted-again", stages=("moe_out",), applies_to=_scales_inputs,
        wrong=lambda s, _: (s["topk_weights"][..., None] * s["expert_out"]).sum(axis=1) + s["shared_out"],
        diagnosis="The sum was weighted; Llama 4 applies the weights to the inputs of the experts.",
    ),
    Mistake(
        name="shared-expert-of-llama4-forgotten", stages=("moe_out",), applies_to=_scales_inputs,
        wrong=lambda s, _: s["expert_out"].sum(axis=1),
        diagnosis="The shared expert, which has the weight 1, is missing in the sum.",
    ),
)  # fmt: skip

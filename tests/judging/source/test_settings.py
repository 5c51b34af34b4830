"""Hyperparameters of a file against the source's: what is equal, what gives a note, and what is FAIL."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import random_tensors, write_folder

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.llamacpp_limits import cannot_express
from llorch.files.convert import convert
from llorch.files.opening import open_table
from llorch.judging.source.settings import compare_settings, incompatible
from llorch.judging.types import Comparison
from llorch.ops.rope import frequencies, llama3_factors
from llorch.runtime.builtin import EVERY, FOLDERS, builtin_path

Change = Callable[[ModelConfig], ModelConfig]
LLAMA_3_2 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@cache
def config_of(path: Path) -> ModelConfig:
    weights = open_table(path)
    weights.source.close()
    return weights.config


def builtin(name: str) -> ModelConfig:
    return config_of(builtin_path(name))


def rows(actual: ModelConfig, expected: ModelConfig) -> dict[str, Comparison]:
    comparisons = [*compare_settings(actual, expected, model="tested")]
    by_part = {comparison.stage_ref.part: comparison for comparison in comparisons}
    assert len(by_part) == len(comparisons)
    for comparison in comparisons:
        assert (comparison.model, comparison.engine, comparison.backend) == ("tested", "source", "file")
        assert (comparison.stage_ref.checkpoint, comparison.stage_ref.stage) == ("00", "settings")
    return by_part


def failures(actual: ModelConfig, expected: ModelConfig) -> dict[str, str]:
    return {part: row.note for part, row in rows(actual, expected).items() if row.verdict == "FAIL"}


def notes(actual: ModelConfig, expected: ModelConfig) -> dict[str, str]:
    return {part: row.note for part, row in rows(actual, expected).items() if row.note and row.verdict == "PASS"}


def fields(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def experts(**changes: Any) -> Change:
    return lambda config: replace(config, experts=replace(config.experts, **changes))  # type: ignore[type-var]


def net(**changes: Any) -> Change:
    return lambda config: replace(config, delta_net=replace(config.delta_net, **changes))  # type: ignore[type-var]


def scaling(**changes: Any) -> Change:
    return lambda config: replace(config, rope_scaling=replace(config.rope_scaling, **changes))  # type: ignore[type-var]


def temperature(**changes: Any) -> Change:
    return lambda config: replace(config, temperature=replace(config.temperature, **changes))  # type: ignore[type-var]


def in_layers(*indices: int, **changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        layers = [config.layer(index) for index in range(config.n_layers)]
        changed = [replace(layer, **changes) if index in indices else layer for index, layer in enumerate(layers)]
        return replace(config, layers=tuple(changed))

    return change


@pytest.mark.parametrize("name", EVERY)
def test_settings_of_a_model_equal_themselves(name: str):
    config = builtin(name)
    assert not failures(config, config)
    assert not notes(config, config)
    assert {"hidden_size", "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size", "no_rope_layers"} <= {
        *rows(config, config)
    }
    assert incompatible(config, config) is None


CONVERTIBLE = [name for name in EVERY if name not in FOLDERS or not cannot_express(builtin(name))]


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_settings_of_a_converted_model_equal_the_source(name: str, tmp_path: Path):
    source = builtin(name)
    target = tmp_path / ("model.gguf" if name in FOLDERS else "folder")
    convert(builtin_path(name), target)
    converted = config_of(target)
    for actual, expected in ((converted, source), (source, converted)):
        assert not failures(actual, expected)
        assert not notes(actual, expected)
        assert incompatible(actual, expected) is None


def test_settings_that_a_format_does_not_write_are_equal(tmp_path: Path):
    settings = {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}
    folder = write_folder(tmp_path / "folder", random_tensors("qwen2"), "qwen2", **settings)
    convert(folder, tmp_path / "model.gguf")
    source, converted = config_of(folder), config_of(tmp_path / "model.gguf")
    assert converted.rms_norm_eps != source.rms_norm_eps  # float32
    assert not failures(converted, source)
    assert not notes(converted, source)
    settings["use_sliding_window"] = True
    windowed = config_of(write_folder(tmp_path / "windowed", random_tensors("qwen2"), "qwen2", **settings))
    assert [*failures(converted, windowed)] == ["sliding_window"]


# Model, change of the file's configuration, key of the row, texts of the note.
WRONG = [
    ("micro-llama", fields(rms_norm_eps=1e-3), "rms_norm_eps", ("0.001", "RMSNorm")),
    ("micro-llama", fields(rope_theta=12345.0), "rope_theta", ("12345.0", "every position")),
    ("micro-llama", fields(rope_theta=10000.01), "rope_theta", ("10000.01", "every position")),
    ("micro-llama3", fields(rope_theta=12345.0), "rope_theta", ("12345.0", "every position")),
    ("micro-ministral3", fields(rope_theta=12345.0), "rope_theta", ("12345.0", "every position")),
    ("micro-mistral", fields(rope_theta=12345.0), "rope_theta", ("12345.0", "every position")),
    ("micro-llama", fields(rope_scaling=LinearScaling(factor=4.0)), "rope_scaling", ("factor=4.0", "none", "16 of 16")),
    ("micro-llama3", fields(rope_scaling=None), "rope_scaling", ("none in the file", "pairs of each head")),
    ("micro-ministral3", scaling(factor=15.0), "rope_scaling", ("factor=15.0", "pairs of each head")),
    ("micro-ministral3", scaling(attention_factor=1.1), "rope_scaling", ("cos and sin", "1.1, not 1.12175")),
    ("micro-mistral", scaling(low_freq_factor=1.5), "rope_scaling", ("1.5", "pairs of each head")),
    ("micro-qwen3.5", fields(rotary_dim=2), "partial_rotary_factor", ("0.25", "0.5", "part of each head")),
    ("micro-qwen2", fields(qkv_bias=False), "attention_bias", ("False", "True", "bias")),
    ("micro-llama", fields(o_bias=True), "attention_out_bias", ("True", "False", "bias")),
    ("micro-qwen3-moe", experts(n_experts_per_token=1), "num_experts_per_tok", ("1 in the file", "number of experts")),
    ("micro-qwen3-moe", experts(norm_topk_prob=False), "norm_topk_prob", ("False in the file", "weights")),
    ("micro-mistral", in_layers(0, 1, window=None), "sliding_window", ("none", "19", "other tokens", "layers: 0, 1)")),
    ("micro-mistral", in_layers(1, window=23), "sliding_window", ("23", "19", "other tokens", "layers: 1)")),
    ("micro-llama4", in_layers(0, chunk=None), "attention_chunk_size", ("none", "8192", "other tokens", "layers: 0)")),
    ("micro-llama4", in_layers(0, chunk=4096), "attention_chunk_size", ("4096", "8192", "other tokens")),
    ("micro-llama4", in_layers(0, head_norm=False), "use_qk_norm", ("none", "True", "layers: 0)")),
    ("micro-llama4", fields(interleaved_rope_hf=False), "no_rope_layers", ("(j, j + half)", "(2j, 2j + 1)")),
    ("micro-llama4", temperature(scale=0.2), "attn_temperature_tuning", ("0.2 ", "0.1 ", "queries")),
    ("micro-llama4", lambda config: fields(max_position_embeddings=8192)(temperature(scale=0.2)(config)),
     "attn_temperature_tuning", ("0.2 ", "0.1 ")),  # position 8191 has a factor
    ("micro-smollm3", in_layers(0, rope=False), "no_rope_layers", ("none in the file", "layers: 0)")),
    ("micro-smollm3", in_layers(3, rope=True), "no_rope_layers", ("none in the source", "layers: 3)")),
    ("micro-ministral3", temperature(floor=9), "attn_temperature_tuning", ("/ 9)", "/ 8)", "layers: 0, 1)")),
    ("micro-ministral3", in_layers(1, has_attention_temperature=False), "attn_temperature_tuning", ("layers: 1)",)),
    ("micro-llama", lambda config: replace(config, vocab_size=config.vocab_size + 2000), "vocab_size", ("token",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "part", "texts"), WRONG, ids=[f"{row[0]}-{row[2]}" for row in WRONG])
def test_a_wrong_setting_fails_in_its_row_with_its_effect(name: str, change: Change, part: str, texts: tuple[str, ...]):
    source = builtin(name)
    wrong = failures(change(source), source)
    assert [*wrong] == [part]
    assert wrong[part].startswith(f"{part}: ")
    for text in (*texts, "in the file", "in the source"):
        assert text in wrong[part]
    assert (incompatible(change(source), source) is None) == (part != "vocab_size")
    assert [*failures(source, change(source))] == [part]


def without_window(config: ModelConfig) -> ModelConfig:
    """The readers drop a window that is not shorter than the context."""
    return in_layers(0, 1, window=None)(replace(config, max_position_embeddings=19))


# Model, change that changes no number, keys of the notes.
HARMLESS: list[tuple[str, Change, list[str]]] = [
    ("micro-llama", fields(rms_norm_eps=1e-5), []),
    ("micro-llama", fields(rope_scaling=LinearScaling(factor=1.0)), []),
    ("micro-llama", fields(family="mistral"), []),
    ("micro-qwen2", fields(family="llama"), ["model_type"]),
    ("micro-llama", fields(tie_word_embeddings=not builtin("micro-llama").tie_word_embeddings), []),
    ("micro-llama", fields(max_position_embeddings=100), ["max_position_embeddings"]),
    ("micro-llama", lambda config: replace(config, vocab_size=config.vocab_size + 64), ["vocab_size"]),
    ("micro-qwen3-moe", fields(intermediate_size=7), []),
    ("micro-mistral", without_window, ["max_position_embeddings"]),
    ("micro-llama4", lambda config: fields(max_position_embeddings=8191)(in_layers(0, chunk=None)(
        temperature(scale=0.3)(config))), ["max_position_embeddings"]),
    ("micro-qwen3.5", fields(rope_sections=(1, 1, 0), part_of_whole=True), []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "parts"), HARMLESS)
def test_a_setting_that_changes_no_number_passes(name: str, change: Change, parts: list[str]):
    source = builtin(name)
    for actual, expected in ((change(source), source), (source, change(source))):
        assert not failures(actual, expected)
        assert [*notes(actual, expected)] == parts
        assert incompatible(actual, expected) is None


def test_a_base_rounded_to_float32_is_equal():
    source = replace(builtin("micro-llama"), rope_theta=500000.01)
    actual = replace(source, rope_theta=float(np.float32(source.rope_theta)))
    assert actual.rope_theta != source.rope_theta
    assert not failures(actual, source)
    assert not notes(actual, source)


def test_the_note_about_the_context_names_the_effect_on_the_file():
    source = builtin("micro-llama")
    longer = replace(source, max_position_embeddings=2 * source.max_position_embeddings)
    assert "allowed" in notes(longer, source)["max_position_embeddings"]
    assert "refused" in notes(source, longer)["max_position_embeddings"]


def llamacpp_factors(scaling: Llama3Scaling, *, head_dim: int, theta: float) -> tuple[float, ...]:
    """Compute the divisors in float32, operation by operation, as llama.cpp's converter does."""
    bases = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    width = scaling.high_freq_factor - scaling.low_freq_factor
    turns = scaling.original_max_position_embeddings / (np.float32(2 * np.pi) / bases)
    share = np.clip((turns - np.float32(scaling.low_freq_factor)) / np.float32(width), 0, 1)
    factors = 1 / ((1 - share) / np.float32(scaling.factor) + share)
    assert factors.dtype == np.float32
    return tuple(float(factor) for factor in factors)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_factors_and_their_scaling_are_equal(head_dim: int):
    source = replace(builtin("micro-llama"), head_dim=head_dim, rope_theta=5e5, rope_scaling=LLAMA_3_2)
    exact = llama3_factors(frequencies(head_dim, 5e5), LLAMA_3_2).astype(np.float32)
    for factors in (tuple(map(float, exact)), llamacpp_factors(LLAMA_3_2, head_dim=head_dim, theta=5e5)):
        converted = replace(source, rope_scaling=FactorScaling(factors=factors))
        for actual, expected in ((converted, source), (source, converted)):
            assert not failures(actual, expected)
            assert not notes(actual, expected)
        changed = list(factors)
        changed[20] *= 1.02
        wrong = failures(replace(source, rope_scaling=FactorScaling(factors=tuple(changed))), source)
        assert [*wrong] == ["rope_scaling"]
        assert f"1 of {head_dim // 2} pairs" in wrong["rope_scaling"]
        assert "pair 20" in wrong["rope_scaling"]
        assert [*failures(replace(source, rope_scaling=None), source)] == ["rope_scaling"]
        assert [*failures(replace(converted, rope_theta=1e4), source)] == ["rope_theta"]


def test_another_base_whose_factors_give_equal_frequencies_is_a_note():
    source = replace(builtin("micro-llama"), rope_theta=5e5)
    factors = frequencies(source.head_dim, 1e4) / frequencies(source.head_dim, 5e5)
    actual = replace(source, rope_theta=1e4, rope_scaling=FactorScaling(factors=tuple(map(float, factors))))
    assert not failures(actual, source)
    assert [*notes(actual, source)] == ["rope_theta"]


def test_yarn_is_compared_by_frequencies_and_attention_factor():
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=2048, attention_factor=1.1386294361119891)
    source = replace(builtin("micro-llama"), rope_scaling=yarn)
    bounds = yarn.bounds(head_dim=source.rotated, theta=source.rope_theta)
    assert bounds[0] % 1 > 0.01
    rounded = replace(yarn, attention_factor=float(np.float32(yarn.attention_factor)), beta_fast=32.001)
    assert not failures(replace(source, rope_scaling=rounded), source)  # the ramp has whole pairs as its ends
    both = replace(source, rope_scaling=replace(yarn, factor=8.0, attention_factor=1.2))
    note = failures(both, source)["rope_scaling"]
    assert "cos and sin" in note
    assert "pairs of each head" in note


# Model, change, texts of the sentence.
OTHER_MODELS = [
    ("micro-llama", lambda config: replace(config, n_layers=config.n_layers + 1), ("num_hidden_layers",)),
    ("micro-llama", fields(hidden_size=48), ("hidden_size", "48 in the file")),
    ("micro-llama", fields(intermediate_size=999), ("intermediate_size",)),
    ("micro-llama", lambda config: replace(config, n_heads=2 * config.n_heads), ("num_attention_heads",)),
    ("micro-llama", fields(n_kv_heads=1), ("num_key_value_heads",)),
    ("micro-llama", lambda config: replace(config, vocab_size=config.vocab_size + 5000), ("vocab_size",)),
    ("micro-llama", fields(qk_norm=True), ("layer_types", "qk_norm")),
    ("micro-qwen3-moe", experts(n_experts=99), ("num_experts", "99")),
    ("micro-qwen3-moe", experts(expert_size=99), ("moe_intermediate_size", "99")),
    ("micro-qwen2-moe", experts(shared_size=99), ("shared_expert_intermediate_size", "99")),
    ("micro-qwen2-moe", experts(shared_gate=False), ("layer_types", "shared_gate")),
    ("micro-qwen3.5", in_layers(0, mixer="attention"), ("layer_types", "delta_net", "(layers: 0)")),
    ("micro-qwen3.5", fields(attention_gate=False), ("layer_types", "gate")),
    ("micro-qwen3.5", net(conv_kernel=3), ("linear_conv_kernel_dim", "3 in the file")),
    ("micro-llama", fields(head_dim=16), ("head_dim", "16 in the file")),
    ("micro-qwen3.5", net(n_key_heads=1), ("linear_num_key_heads", "1 in the file")),
    ("micro-qwen3.5", net(key_head_dim=99), ("linear_key_head_dim", "99 in the file")),
    ("micro-qwen3.5", net(n_value_heads=8), ("linear_num_value_heads", "8 in the file")),
    ("micro-qwen3.5", net(value_head_dim=99), ("linear_value_head_dim", "99 in the file")),
]


@pytest.mark.parametrize(("name", "change", "texts"), OTHER_MODELS)
def test_other_blocks_or_shapes_are_incompatible(name: str, change: Change, texts: tuple[str, ...]):
    source = builtin(name)
    sentence = incompatible(change(source), source)
    assert sentence is not None
    assert sentence.startswith("the file and its source cannot be two forms of one model: ")
    for text in texts:
        assert text in sentence
    assert failures(change(source), source)


def test_two_builtin_models_are_incompatible_for_three_reasons():
    sentence = incompatible(builtin("micro-llama"), builtin("micro-qwen3.5-moe"))
    assert sentence is not None
    assert sentence.count("in the file") == 3

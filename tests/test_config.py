"""ModelConfig from a Hugging Face config.json: what is read, and every refusal by name and numbers."""

import dataclasses
import math
from typing import Any

import pytest

from llorch.config import FAMILIES, FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.errors import FormatError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=256, attention_factor=0.1 * math.log(4) + 1)


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_huggingface({**LLAMA, **changes}, path="config.json")


def refusal(**changes: object) -> str:
    with pytest.raises(FormatError) as caught:
        read(**changes)
    return str(caught.value)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_a_llama_config_is_read_field_by_field():
    assert read(tie_word_embeddings=True) == ModelConfig(
        family="llama", hidden_size=48, intermediate_size=80, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8,
        vocab_size=100, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, max_position_embeddings=256,
        qkv_bias=False, o_bias=False, qk_norm=False, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "attention_bias", "contents"),
    [
        ("llama", False, (False, False, False)),
        ("llama", True, (True, True, False)),
        ("qwen2", True, (True, False, False)),
        ("qwen3", False, (False, False, True)),
        ("qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms_follow_the_family(family, attention_bias, contents):
    config = read(model_type=family, attention_bias=attention_bias, head_dim=16)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == contents
    assert config.family == family


def test_head_dim_of_the_file_wins_over_the_split():
    config = read(head_dim=32)
    assert (config.head_dim, config.q_width, config.kv_width, config.group_size) == (32, 192, 64, 3)


@pytest.mark.parametrize(
    ("family", "defaults"), [("llama", (64, 8, 2048)), ("qwen2", (32, 8, 32768)), ("qwen3", (32, 128, 32768))]
)
def test_what_config_json_leaves_out_is_what_transformers_puts_in(family, defaults):
    gone = ("num_key_value_heads", "max_position_embeddings")
    values = {key: LLAMA[key] for key in LLAMA if key not in gone}
    values |= {"model_type": family, "num_attention_heads": 64, "hidden_size": 512}
    config = ModelConfig.from_huggingface(values, path="config.json")
    assert (config.n_kv_heads, config.head_dim, config.max_position_embeddings) == defaults
    if family == "qwen2":  # whose 32 must divide the query heads
        with pytest.raises(FormatError, match="multiple of n_kv_heads, got n_heads=8 n_kv_heads=32"):
            ModelConfig.from_huggingface(values | {"num_attention_heads": 8}, path="config.json")
    values["num_key_value_heads"] = None  # null is no missing key: as many as there are query heads
    assert ModelConfig.from_huggingface(values, path="config.json").n_kv_heads == 64


def test_head_dim_of_the_file_needs_no_even_split():
    assert read(hidden_size=50, head_dim=16).head_dim == 16
    assert read(hidden_size=50, model_type="qwen3").head_dim == 128


def test_defaults_are_those_of_transformers():
    config = ModelConfig.from_huggingface(without("rope_theta") | {"head_dim": None, "rope_scaling": None}, path="c")
    assert (config.rope_theta, config.head_dim) == (10000.0, 8)
    assert (config.tie_word_embeddings, config.qkv_bias) == (False, False)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        *(({name: "linear", "factor": 2}, LinearScaling(factor=2.0)) for name in ("type", "rope_type")),
        *(({name: "default"}, None) for name in ("type", "rope_type")),
        (LLAMA3, Llama3Scaling(**{name: value for name, value in LLAMA3.items() if name != "rope_type"})),
        ({"type": "yarn", "factor": 4.0}, YARN),  # with the gain of its paper
        (
            {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "attention_factor": 1.5}
            | {"beta_fast": 16, "beta_slow": 2, "truncate": True},
            YarnScaling(factor=8, original_max_position_embeddings=64, attention_factor=1.5, beta_fast=16, beta_slow=2),
        ),
    ],
)
def test_scaling_is_read_under_every_name(key, scaling, want):
    assert read(**{key: scaling}).rope_scaling == want


def test_theta_of_transformers_5_is_read_from_rope_parameters():
    config = read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 123456.0})
    assert config.rope_theta == 123456.0
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert read(rope_parameters={"rope_type": "default"}).rope_theta == 500000.0


@pytest.mark.parametrize("key", sorted({*LLAMA} - {"num_key_value_heads", "rope_theta", "max_position_embeddings"}))
def test_a_missing_key_is_refused_by_name(key):
    with pytest.raises(FormatError, match=rf"^config.json: Missing: {key}: expected an? \w+, got nothing$"):
        ModelConfig.from_huggingface(without(key), path="config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "n_heads must be a multiple of n_kv_heads, got n_heads=6 n_kv_heads=4"),
        ({"hidden_size": 50}, "hidden_size 50 is no multiple of n_heads 6 and head_dim is not given"),
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be between 0 and 1, got 0.0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be between 0 and 1, got -1e-05"),
        ({"rms_norm_eps": 1}, "rms_norm_eps must be between 0 and 1, got 1.0"),
        ({"rope_theta": 0}, "rope_theta must be above 1 and finite, got 0.0"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1 and finite, got 1.0"),
        ({"num_hidden_layers": 0}, "n_layers must be from 1 to 512, got 0"),
        ({"num_hidden_layers": 513}, "n_layers must be from 1 to 512, got 513"),
        ({"intermediate_size": 0}, "intermediate_size must be from 1 to 16777216, got 0"),
        ({"head_dim": 0}, "head_dim must be from 1 to 65536, got 0"),
        ({"vocab_size": 2**24 + 1}, "vocab_size must be from 1 to 16777216, got 16777217"),
        ({"hidden_size": 2**20 + 2}, "hidden_size must be from 1 to 1048576, got 1048578"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings must be from 1 to 134217728, got 2147483647"),
    ],
)
def test_values_that_no_model_has_are_refused_with_their_numbers(changes, message):
    changes = {"head_dim": 8} | changes if changes.get("hidden_size") == 2**20 + 2 else changes
    assert refusal(**changes) == f"config.json: OutOfRange: config: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, f"architecture 'gemma3': llorch reads {', '.join(FAMILIES)}"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or 'swish', got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"is_causal": False}, "is_causal: expected True, got False"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config: expected None, got {'0': {}}"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types: expected full_attention for every layer, got "
            "['full_attention', 'sliding_attention', 'full_attention']",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types: expected full_attention for every layer, got ['full_attention']",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "full_attention: expected one set of RoPE parameters for all layers, got {'rope_theta': 5.0}",
        ),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 or None, got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None, got {'bits': 4}"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings: expected None, got 64"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type: expected default, linear, llama3 or yarn, got 'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: expected 1 or None, got 0.25"),
        ({"rope_scaling": {"type": "yarn", "truncate": False}}, "truncate: expected True, got False"),
    ],
)
def test_variants_that_llorch_lacks_are_refused_by_name(changes, message):
    assert refusal(**changes) == f"config.json: Unsupported: {message}"


def test_layers_that_are_all_full_attention_are_read():
    assert read(layer_types=["full_attention"] * 3) == read()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        *[
            (key, {key: None})
            for key in ("attention_bias", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias")
        ],
        *[(key, {key: None}) for key in ("rope_theta", "tie_word_embeddings", "use_sliding_window")],
        *[
            (key, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, key: None}})
            for key in ("rope_theta", "rope_type", "type", "original_max_position_embeddings", "truncate")
        ],
        ("head_dim", {"model_type": "qwen2", "head_dim": None}),
        ("head_dim", {"model_type": "qwen3", "head_dim": None}),
    ],
)
def test_null_is_refused_where_it_is_not_the_default(key, changes):
    assert refusal(**changes) == f"config.json: Malformed: {key}: expected a value or no such key, got None"


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [({"beta_fast": 0.1, "beta_slow": 512}, "pairs 2 to 1"), ({"rope_theta": 1.01}, "pairs 1211 to 7")],
)
def test_a_yarn_ramp_that_ends_before_it_starts_is_refused_as_the_engines_differ(changes, pairs):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    got = refusal(rope_parameters=scaling | changes)
    assert got.startswith(
        f"config.json: OutOfRange: config: the ramp of yarn must end behind its start, got {pairs}"
    ), got
    assert got.endswith("transformers and llama.cpp compute different frequencies from it")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "Missing: factor: expected a number, got nothing"),
        ({"type": "linear", "factor": 0.5}, "OutOfRange: factor: expected at least 1.0, got 0.5"),
        ({"type": "yarn", "factor": math.inf}, "OutOfRange: factor: expected at least 1.0, got inf"),
        ({"type": "yarn", "factor": 2, "attention_factor": 0}, "attention_factor: expected at least 1e-06, got 0"),
        (
            {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0},
            "original_max_position_embeddings: expected at least 1, got 0",
        ),
        ({"type": "yarn", "factor": 2, "beta_slow": 0}, "OutOfRange: beta_slow: expected at least 1e-06, got 0"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor: expected at least 1.0, got 0.5"),
        (LLAMA3 | {"low_freq_factor": 0}, "OutOfRange: low_freq_factor: expected at least 1e-06, got 0"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings: expected at least 1"),
        (LLAMA3 | {"factor": "8"}, "Malformed: factor: expected a number, got '8'"),
        (LLAMA3 | {"rope_type": 3}, "Malformed: rope_type: expected a string, got 3"),
        ([1], "Malformed: rope_scaling: expected an object, got [1]"),
    ],
)
def test_scaling_with_a_value_out_of_place_is_refused(scaling, message):
    assert message in refusal(rope_scaling=scaling)


def test_two_different_scalings_in_one_file_are_refused():
    default = {"rope_type": "default", "rope_theta": 1e6}
    assert refusal(rope_parameters=default, rope_scaling=LLAMA3).startswith(
        "config.json: Inconsistent: rope_scaling: expected no other values than rope_parameters, got {'rope_type': "
    )
    assert read(rope_parameters=LLAMA3, rope_scaling=LLAMA3).rope_scaling == read(rope_scaling=LLAMA3).rope_scaling


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().n_layers = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((1.0, 2.0), r"rope_freqs.weight must have head_dim / 2 = 4 factors, got 2"),
        ((1.0, 2.0, 0.0, 1.0), r"rope_freqs.weight: every factor must be positive and finite"),
        ((1.0, 2.0, math.nan, 1.0), r"rope_freqs.weight: every factor must be positive and finite"),
    ],
)
def test_frequency_factors_must_fit_the_head(factors, message):
    with pytest.raises(FormatError, match=rf"^OutOfRange: config: {message}$"):
        dataclasses.replace(read(), rope_scaling=FactorScaling(factors=factors))

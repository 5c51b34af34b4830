"""ModelConfig from a Hugging Face config.json: what is read, and every refusal by name and numbers."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import Refusal, refuses, row

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.read_huggingface import config_from_huggingface
from llorch.families.table import FAMILIES
from llorch.files.export_huggingface import huggingface_config
from llorch.files.quant import GGMLType

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GONE = ("head_dim", "num_key_value_heads")
SEED = {key: LLAMA[key] for key in LLAMA if key not in GONE} | {
    "model_type": "seed_oss", "hidden_size": 128, "num_attention_heads": 16,
}  # fmt: skip
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=256, attention_factor=0.1 * math.log(4) + 1)


def read(**changes: object) -> ModelConfig:
    return config_from_huggingface({**LLAMA, **changes}, path="config.json")


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


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (True, False)), ({"attention_bias": False}, (False, False)), ({"attention_out_bias": True}, (True, True)),
        ({"attention_bias": False, "attention_out_bias": True}, (False, True)),
    ],
)  # fmt: skip
def test_family_may_have_a_separate_key_for_the_o_proj_bias(changes, biases):
    config = read(model_type="seed_oss", **changes)
    assert (config.qkv_bias, config.o_bias) == biases
    written = huggingface_config(config, GGMLType.F32, path=Path("config.json"))
    assert (written["attention_bias"], written["attention_out_bias"]) == biases


def test_null_may_differ_from_an_absent_key():
    absent, null = (config_from_huggingface(values, path="c") for values in (SEED, SEED | {key: None for key in GONE}))
    assert (absent.head_dim, absent.n_kv_heads) == (128, 8)
    assert (null.head_dim, null.n_kv_heads) == (8, 16)


def test_head_dim_of_the_file_overrides_the_default():
    config = read(head_dim=32)
    assert (config.head_dim, config.q_width, config.kv_width, config.group_size) == (32, 192, 64, 3)


@pytest.mark.parametrize(
    ("family", "defaults"), [("llama", (64, 8, 2048)), ("qwen2", (32, 8, 32768)), ("qwen3", (32, 128, 32768))]
)
def test_config_json_missing_keys_get_transformers_defaults(family, defaults):
    gone = ("num_key_value_heads", "max_position_embeddings")
    values = {key: LLAMA[key] for key in LLAMA if key not in gone}
    values |= {"model_type": family, "num_attention_heads": 64, "hidden_size": 512}
    config = config_from_huggingface(values, path="config.json")
    assert (config.n_kv_heads, config.head_dim, config.max_position_embeddings) == defaults
    if family == "qwen2":  # whose 32 must divide the query heads
        with refuses("OutOfRange", "n_kv_heads", got=("n_heads=8", "n_kv_heads=32")):
            config_from_huggingface(values | {"num_attention_heads": 8}, path="config.json")
    values["num_key_value_heads"] = None  # null is no missing key: as many as there are query heads
    assert config_from_huggingface(values, path="config.json").n_kv_heads == 64


def test_head_dim_of_the_file_needs_no_even_split():
    assert read(hidden_size=50, head_dim=16).head_dim == 16
    assert read(hidden_size=50, model_type="qwen3").head_dim == 128


def test_defaults_are_those_of_transformers():
    config = config_from_huggingface(without("rope_theta") | {"head_dim": None, "rope_scaling": None}, path="c")
    assert (config.rope_theta, config.head_dim) == (10000.0, 8)
    assert (config.tie_word_embeddings, config.qkv_bias) == (False, False)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "expected"),
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
def test_scaling_is_read_under_every_name(key, scaling, expected):
    assert read(**{key: scaling}).rope_scaling == expected


def test_theta_of_transformers_5_is_read_from_rope_parameters():
    config = read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 123456.0})
    assert config.rope_theta == 123456.0
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert read(rope_parameters={"rope_type": "default"}).rope_theta == 500000.0


@pytest.mark.parametrize("key", sorted({*LLAMA} - {"num_key_value_heads", "rope_theta", "max_position_embeddings"}))
def test_a_missing_key_is_refused_by_name(key):
    with refuses("Missing", where=("config.json", key), got="nothing"):
        config_from_huggingface(without(key), path="config.json")


def read_later(**changes: object) -> Callable[[], ModelConfig]:
    return lambda: read(**changes)


def out_of_range(changes: dict[str, Any], *facts: object, **fields: object) -> Any:
    """A row, named by what is changed."""
    ((key, value), *_) = changes.items()
    return row(f"{key}={value}", read_later(**changes), "OutOfRange", "config.json", *facts, **fields)


NO_MODEL_HAS = [
    out_of_range({"num_key_value_heads": 4}, "multiple", got=("n_heads=6", "n_kv_heads=4")),
    out_of_range({"hidden_size": 50}, "hidden_size 50", "n_heads 6", where="head_dim"),
    out_of_range({"head_dim": 7}, "even", where="head_dim", got=7),
    out_of_range({"rms_norm_eps": 0}, 0, 1, where="rms_norm_eps", got=0.0),
    out_of_range({"rms_norm_eps": -1e-5}, 0, 1, where="rms_norm_eps", got=-1e-05),
    out_of_range({"rms_norm_eps": 1}, 0, 1, where="rms_norm_eps", got=1.0),
    out_of_range({"rope_theta": 0}, "above 1", "finite", where="rope_theta", got=0.0),
    out_of_range({"rope_theta": 1.0}, "above 1", "finite", where="rope_theta", got=1.0),
    out_of_range({"num_hidden_layers": 0}, 1, 512, where="n_layers", got=0),
    out_of_range({"num_hidden_layers": 513}, 1, 512, where="n_layers", got=513),
    out_of_range({"intermediate_size": 0}, 1, 16777216, where="intermediate_size", got=0),
    out_of_range({"head_dim": 0}, 1, 65536, where="head_dim", got=0),
    out_of_range({"vocab_size": 2**24 + 1}, 1, 16777216, where="vocab_size", got=16777217),
    out_of_range({"hidden_size": 2**20 + 2, "head_dim": 8}, 1, 1048576, where="hidden_size", got=1048578),
    out_of_range({"max_position_embeddings": 2**31 - 1}, 1, 134217728, where="max_position_embeddings", got=2147483647),
]


def option_row(changes: dict[str, Any], expected: object, actual: object, fault: str = "") -> Any:
    """A row, named by the key that is changed; `where` names another key at fault."""
    (key,) = changes
    name, fault = f"{key}: {fault or actual}", fault or key
    return row(name, read_later(**changes), "Unsupported", expected=expected, got=actual, where=("config.json", fault))


SLIDING = ["full_attention", "sliding_attention", "full_attention"]
LACKING = [
    row("model_type", read_later(model_type="gemma3"), "Unsupported", *FAMILIES, where=("config.json", "'gemma3'")),
    option_row({"hidden_act": "gelu"}, ("'silu'", "'swish'"), "'gelu'"),
    option_row({"mlp_bias": True}, False, True),
    option_row({"is_causal": False}, True, False),
    option_row({"per_layer_config": {"0": {}}}, None, {"0": {}}),
    option_row({"layer_types": SLIDING}, "full_attention", SLIDING),
    option_row({"layer_types": ["full_attention"]}, "full_attention", ["full_attention"]),
    option_row(
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "one", {"rope_theta": 5.0}, "full_attention"
    ),
    option_row({"use_sliding_window": True}, False, True),
    option_row({"partial_rotary_factor": 0.5}, (1, None), 0.5),
    option_row({"original_max_position_embeddings": 64}, None, 64),
    option_row(
        {"rope_scaling": {"type": "dynamic"}}, ("default", "linear", "llama3", "yarn"), "'dynamic'", "rope_type"
    ),
    option_row({"rope_parameters": {"partial_rotary_factor": 0.25}}, (1, None), 0.25, "partial_rotary_factor"),
    option_row({"rope_scaling": {"type": "yarn", "truncate": False}}, True, False, "truncate"),
]


def test_layers_that_are_all_full_attention_are_read():
    assert read(layer_types=["full_attention"] * 3) == read()


NOT_NULL = (
    "attention_bias", "hidden_act", "is_causal", "max_position_embeddings", "mlp_bias", "rope_theta",
    "tie_word_embeddings", "use_sliding_window",
)  # fmt: skip
NOT_NULL_OF_ROPE = ("rope_theta", "rope_type", "type", "original_max_position_embeddings", "truncate")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        *((key, {key: None}) for key in NOT_NULL),
        *((key, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, key: None}}) for key in NOT_NULL_OF_ROPE),
        ("head_dim", {"model_type": "qwen2", "head_dim": None}),
        ("head_dim", {"model_type": "qwen3", "head_dim": None}),
    ],
)
def test_null_is_refused_where_it_is_not_the_default(key, changes):
    with refuses("Malformed", where=("config.json", key), got=None):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [({"beta_fast": 0.1, "beta_slow": 512}, "pairs 2 to 1"), ({"rope_theta": 1.01}, "pairs 1211 to 7")],
)
def test_a_yarn_ramp_that_ends_before_it_starts_is_refused_as_the_engines_differ(changes, pairs):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    with refuses("OutOfRange", "config.json", "yarn", "transformers", "llama.cpp", got=pairs):
        read(rope_parameters=scaling | changes)


def rope_row(scaling: object, code: str, fault: str, expected: object, actual: object) -> Any:
    """A row, named by the key at fault and what stands there."""
    return row(f"{fault}: {actual}", read_later(rope_scaling=scaling), code, expected=expected, got=actual, where=fault)


OUT_OF_PLACE = [
    rope_row({"type": "linear"}, "Missing", "factor", "number", "nothing"),
    rope_row({"type": "linear", "factor": 0.5}, "OutOfRange", "factor", 1.0, 0.5),
    rope_row({"type": "yarn", "factor": math.inf}, "OutOfRange", "factor", 1.0, math.inf),
    rope_row({"type": "yarn", "factor": 2, "attention_factor": 0}, "OutOfRange", "attention_factor", 1e-06, 0),
    rope_row({"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}, "OutOfRange",
             "original_max_position_embeddings", 1, 0),
    rope_row({"type": "yarn", "factor": 2, "beta_slow": 0}, "OutOfRange", "beta_slow", 1e-06, 0),
    rope_row(LLAMA3 | {"high_freq_factor": 0.5}, "OutOfRange", "high_freq_factor", 1.0, 0.5),
    rope_row(LLAMA3 | {"low_freq_factor": 0}, "OutOfRange", "low_freq_factor", 1e-06, 0),
    rope_row(LLAMA3 | {"original_max_position_embeddings": 0}, "OutOfRange", "original_max_position_embeddings", 1, 0),
    rope_row(LLAMA3 | {"factor": "8"}, "Malformed", "factor", "number", "'8'"),
    rope_row(LLAMA3 | {"rope_type": 3}, "Malformed", "rope_type", "string", 3),
    rope_row([1], "Malformed", "rope_scaling", "object", [1]),
]  # fmt: skip


@pytest.mark.parametrize("refusal", [*NO_MODEL_HAS, *LACKING, *OUT_OF_PLACE])
def test_read_refuses(refusal: Refusal):
    refusal.check()


def test_two_different_scalings_in_one_file_are_refused():
    default = {"rope_type": "default", "rope_theta": 1e6}
    with refuses("Inconsistent", "config.json", where="rope_scaling", expected="rope_parameters", got="{'rope_type': "):
        read(rope_parameters=default, rope_scaling=LLAMA3)
    assert read(rope_parameters=LLAMA3, rope_scaling=LLAMA3).rope_scaling == read(rope_scaling=LLAMA3).rope_scaling


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().n_layers = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("factors", "facts"),
    [
        ((1.0, 2.0), ("head_dim / 2 = 4", 2)),
        ((1.0, 2.0, 0.0, 1.0), ("positive", "finite")),
        ((1.0, 2.0, math.nan, 1.0), ("positive", "finite")),
    ],
)
def test_frequency_factors_must_fit_the_head(factors, facts):
    with refuses("OutOfRange", *facts, where="rope_freqs.weight"):
        dataclasses.replace(read(), rope_scaling=FactorScaling(factors=factors))

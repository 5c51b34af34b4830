"""ModelConfig from GGUF metadata: what is read, as llama.cpp reads it, and every refusal by name and numbers."""

import math
from typing import Any

import numpy as np
import pytest
from helpers.refusals import Refusal, refuses, row

from llorch.families.config import FactorScaling, LinearScaling, ModelConfig, YarnScaling
from llorch.families.read_gguf import config_from_gguf
from llorch.families.table import BY_GGUF

TIED = frozenset({"token_embd.weight"})
UNTIED = TIED | {"output.weight"}
LLAMA = {
    "block_count": 3, "context_length": 256, "embedding_length": 48, "feed_forward_length": 80,
    "attention.head_count": 6, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0, "rope.dimension_count": 8,
}  # fmt: skip


def read(
    *, arch: Any = "llama", tensor_names: Any = UNTIED, rope_factors: Any = None, drop: Any = (), **changes: object
) -> ModelConfig:
    values = {**LLAMA, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata: dict[str, object] = {f"{arch}.{key}": value for key, value in values.items() if key not in drop}
    metadata["general.architecture"] = arch
    return config_from_gguf(
        metadata, tensor_names=tensor_names, vocab_size=100, rope_factors=rope_factors, path="x.gguf"
    )


def test_llama_metadata_is_read_field_by_field():
    assert read() == ModelConfig(
        family="llama", hidden_size=48, intermediate_size=80, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8,
        vocab_size=100, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, max_position_embeddings=256,
        qkv_bias=False, o_bias=False, qk_norm=False, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "biases", "contents"),
    [
        ("llama", (), (False, False, False)),
        ("llama", ("blk.0.attn_q.bias",), (True, False, False)),
        ("llama", ("blk.0.attn_q.bias", "blk.0.attn_output.bias"), (True, True, False)),
        ("qwen2", (), (True, False, False)),
        ("qwen3", (), (False, False, True)),
        ("qwen3", ("blk.0.attn_q.bias",), (True, False, True)),
        ("qwen3", ("blk.0.attn_q.bias", "blk.0.attn_output.bias"), (True, False, True)),  # then one tensor too many
    ],
)
def test_biases_and_norms_follow_family_and_tensors(arch, biases, contents):
    config = read(arch=arch, tensor_names=UNTIED | set(biases))
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == contents
    assert config.family == arch


def test_key_length_overrides_the_default_head_dim():
    lengths = {"attention__key_length": 32, "attention__value_length": 32, "rope__dimension_count": 32}
    assert read(**lengths).head_dim == 32
    assert read(**lengths, embedding_length=50).head_dim == 32


def test_defaults_are_those_of_llama_cpp():
    config = read(drop=("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"))
    assert (config.n_kv_heads, config.rope_theta, config.head_dim) == (6, 10000.0, 8)


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
WRITTEN = {  # by llama.cpp, and without effect
    "rope__scaling__yarn_ext_factor": -1.0, "rope__scaling__yarn_attn_factor": 1.0,
    "rope__scaling__yarn_beta_fast": 32.0, "rope__scaling__yarn_beta_slow": 1.0,
    "rope__scaling__yarn_log_multiplier": 0.0,
}  # fmt: skip
GAIN = 1 + 0.1 * math.log(4)


def yarn(context: int, gain: float) -> YarnScaling:
    return YarnScaling(factor=4.0, original_max_position_embeddings=context, attention_factor=gain)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        *(
            (scaling, LinearScaling(factor=4.0))
            for scaling in (
                {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
                {"rope__scaling__factor": 4.0},  # no type is linear
                {"rope__scale_linear": 4.0},  # the key before there were types
                {"rope__scale_linear": 7.0, "rope__scaling__factor": 4.0},
            )
        ),
        *(
            (scaling, None)
            for scaling in (
                {},
                {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},  # llama.cpp does not scale then
                {"rope__scaling__type": "linear", "rope__scaling__factor": 0.0},  # llama.cpp writes 0 for no scaling
                {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
                {"rope__scaling__type": "linear"},
                {"rope__scaling__attn_factor": 1.0},
            )
        ),
        ({"rope_factors": np.array([1, 1, 2.5, 8], np.float32)}, FactorScaling(factors=(1.0, 1.0, 2.5, 8.0))),
        (YARN | {"rope__scaling__original_context_length": 64}, yarn(64, GAIN)),  # the gain of its paper
        (YARN | {"rope__scaling__attn_factor": 0.5}, yarn(256, 0.5 * GAIN)),  # which comes on top
        (YARN | WRITTEN, yarn(256, GAIN)),
    ],
)
def test_scaling_is_read_as_llama_cpp_reads_it(scaling, expected):
    assert read(**scaling).rope_scaling == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("yarn_ext_factor", ("1.0", "-1.0")), ("yarn_attn_factor", "1.0"), ("yarn_beta_fast", "32.0"),
        ("yarn_beta_slow", "1.0"), ("yarn_log_multiplier", "0.0"),
    ],
)  # fmt: skip
def test_yarn_keys_that_llama_cpp_ignores_are_refused(key, expected):
    with refuses("Unsupported", "x.gguf", where=f"llama.rope.scaling.{key}", expected=expected, got=0.75):
        read(**YARN, **{f"rope__scaling__{key}": 0.75})


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "feed_forward_length"])
def test_a_missing_key_is_refused_by_name(key):
    with refuses("Missing", "x.gguf", where=f"llama.{key}", expected="integer", got="nothing"):
        read(drop=(key,))


def test_a_file_without_architecture_or_eps_is_refused():
    with refuses("Missing", "x.gguf", where="llama.attention.layer_norm_rms_epsilon", expected="number", got="nothing"):
        read(drop=("attention.layer_norm_rms_epsilon",))
    with refuses("Missing", "x.gguf", where="general.architecture", expected="string"):
        config_from_gguf({}, tensor_names=TIED, vocab_size=3, rope_factors=None, path="x.gguf")


def test_equal_numbers_for_every_layer_are_one_number():
    listed = {"attention__head_count": 6, "attention__head_count_kv": 2, "feed_forward_length": 80}
    assert read(**{key: np.array([value] * 3, np.int32) for key, value in listed.items()}) == read(**listed)


def gguf_row(changes: dict[str, Any], code: str, fault: str, expected: object, actual: object) -> Any:
    """A row, named by what is changed."""
    name = " ".join(f"{key}={value!s:.20}" for key, value in changes.items())
    return row(name, lambda: read(**changes), code, "x.gguf", where=fault, expected=expected, got=actual)


PAIRS = ("pairs 97 to 7", "beta_fast=32.0", "beta_slow=1.0", "original_max_position_embeddings=256", "rope_theta=1.01",
         "transformers", "llama.cpp")  # fmt: skip
WRONG = [
    gguf_row({"arch": "gemma2"}, "Unsupported", "'gemma2'", (*BY_GGUF,), ()),
    gguf_row({"arch": "x" * 300_000}, "Unsupported", "300002 characters", (*BY_GGUF,), ()),
    gguf_row({"vocab_size": 0}, "OutOfRange", "llama.vocab_size", 1, 0),
    gguf_row({"vocab_size": -1}, "OutOfRange", "llama.vocab_size", 1, -1),
    gguf_row({"vocab_size": "x"}, "Malformed", "llama.vocab_size", "integer", "'x'"),
    gguf_row({"vocab_size": 99}, "Inconsistent", "llama.vocab_size", 100, 99),
    gguf_row({"nextn_predict_layers": 1}, "Unsupported", "llama.nextn_predict_layers", 0, 1),
    gguf_row({"expert_count": 8}, "Unsupported", "llama.expert_count", 0, 8),
    gguf_row({"attention__causal": False}, "Unsupported", "llama.attention.causal", True, False),
    gguf_row({"attention__value_length": 16}, "Unsupported", "llama.attention.value_length", 8, 16),
    gguf_row({"rope__dimension_count": 4}, "OutOfRange", "rope.dimension_count", "head_dim = 8", 4),
    gguf_row({"block_count": 513}, "OutOfRange", "n_layers", (1, 512), 513),
    gguf_row({"attention__head_count": 0}, "OutOfRange", "llama.attention.head_count", 1, 0),
    gguf_row({"attention__head_count_kv": 0}, "OutOfRange", "llama.attention.head_count_kv", 1, 0),
    gguf_row({"attention__head_count_kv": 4}, "OutOfRange", "n_heads", "multiple", ("n_heads=6", "n_kv_heads=4")),
    gguf_row({"embedding_length": 64}, "OutOfRange", "hidden_size 64", "n_heads 6", "head_dim"),
    gguf_row({"context_length": 0}, "OutOfRange", "max_position_embeddings", (1, 134217728), 0),
    gguf_row({"rope__freq_base": 0.0}, "OutOfRange", "rope_theta", (1, "finite"), 0.0),
    gguf_row({"attention__layer_norm_rms_epsilon": math.nan}, "OutOfRange", "llama.attention.layer_norm_rms_epsilon",
             "finite", math.nan),
    gguf_row({"attention__head_count": np.array([6, 6])}, "Inconsistent", "llama.attention.head_count", 3, 2),
    gguf_row({"attention__head_count_kv": np.array([3, 6, 3])}, "Unsupported", "llama.attention.head_count_kv", "same",
             "[3, 6, 3]"),
    gguf_row({"feed_forward_length": np.array([80.0] * 3)}, "Unsupported", "llama.feed_forward_length", "integer",
             "80.0"),
    gguf_row({"feed_forward_length": np.array([80] * 3), "block_count": np.array([3, 3])}, "Malformed",
             "llama.block_count", "integer", "[3, 3]"),
    *(
        gguf_row(YARN | {f"rope__scaling__yarn_beta_{end}": 0.0, "arch": "mistral3"}, "OutOfRange",
                 f"mistral3.rope.scaling.yarn_beta_{end}", "1e-06", 0.0)
        for end in ("fast", "slow")
    ),
    gguf_row({"rope__scaling__type": "longrope"}, "Unsupported", "llama.rope.scaling.type", ("none", "linear", "yarn"),
             "'longrope'"),
    gguf_row({"rope__scaling__factor": 0.5}, "OutOfRange", "llama.rope.scaling.factor", 1.0, 0.5),
    gguf_row(YARN | {"rope__scaling__factor": 0.5}, "OutOfRange", "llama.rope.scaling.factor", 1.0, 0.5),
    gguf_row(YARN | {"rope__freq_base": 1.01}, "OutOfRange", "yarn", (), PAIRS),
    gguf_row({"rope__scaling__attn_factor": 1.2}, "Unsupported", "llama.rope.scaling.attn_factor", 1.0, 1.2),
    gguf_row({"rope_factors": np.ones(4)} | YARN, "Unsupported", "llama.rope.scaling.type",
             ("none", "rope_freqs.weight"), "'yarn'"),
    gguf_row({"rope_factors": np.ones(3)}, "OutOfRange", "rope_freqs.weight", "head_dim / 2 = 4", 3),
    gguf_row({"rope_factors": np.ones(4), "arch": "qwen2"}, "Unexpected", "qwen2.rope_freqs.weight", "llama",
             "'qwen2'"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", WRONG)
def test_unsupported_files_are_refused(refusal: Refusal):
    refusal.check()

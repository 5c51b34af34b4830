"""What both formats say of the families that are not dense, every refusal, and what llama.cpp has a constant for."""

from typing import Any

import numpy as np
import pytest
from helpers.refusals import Refusal, assert_tells, row

from llorch.engines.interface import unrotated_pairs, unsupported_reason
from llorch.families.config import ModelConfig, YarnScaling
from llorch.families.layers import DeltaNet, Experts, Layer, Temperature
from llorch.families.llamacpp_limits import cannot_express
from llorch.families.read_gguf import config_from_gguf
from llorch.families.read_huggingface import config_from_huggingface

DENSE: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 56}
NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LLAMA4 = {"num_local_experts": 5, "intermediate_size": 40, "intermediate_size_mlp": 80}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": 8}, "qwen2_moe": EXPERTS | SHARED | {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "qwen3_next": EXPERTS | SHARED | NET, "qwen3_5_text": NET, "qwen3_5_moe_text": EXPERTS | SHARED | NET,
    "qwen2_5_vl_text": {"head_dim": 8}, "mistral": {}, "smollm3": {},
    "ministral3": {"rope_parameters": YARN}, "llama4_text": LLAMA4,
}  # fmt: skip


def read(kind: str, **changes: Any) -> ModelConfig:
    values = DENSE | FAMILIES[kind] | {"model_type": kind} | changes
    return config_from_huggingface({key: v for key, v in values.items() if v is not ...}, path="config.json")


def windows(config: ModelConfig) -> list[int | None]:
    return [config.layer(i).window for i in range(config.n_layers)]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 9}, [9, 9, 9, 9]),
        ("mistral", {"sliding_window": 1}, [1, 1, 1, 1]),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 256}, [None] * 4),  # as long as the context
        ("ministral3", {"sliding_window": 9}, [9, 9, 9, 9]),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, [None] * 4),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2, "use_sliding_window": True}, [None, None, 9, 9]),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True,
                   "layer_types": ["sliding_attention", *["full_attention"] * 3]}, [9, None, None, None]),
        ("qwen2_moe", {"sliding_window": 9, "max_window_layers": 3, "use_sliding_window": True}, [9, None, 9, None]),
        ("qwen2_moe", {"sliding_window": 9, "max_window_layers": 2, "use_sliding_window": True}, [9, None, None, None]),
        ("qwen2_moe", {"sliding_window": 9, "max_window_layers": 0, "use_sliding_window": True}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}, [9, 9, 9, 9]),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, [None, None, None, 9]),
    ],
)  # fmt: skip
def test_windows_are_in_the_layers_of_transformers(kind, changes, expected):
    assert windows(read(kind, **changes)) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen2", {}, range(28, 84)),
        ("qwen2_moe", {}, range(0, 28, 2)),
        ("qwen2_5_vl_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, range(80, 84)),
    ],
)
def test_default_window_layers_equal_transformers(kind, changes, expected):
    found = windows(read(kind, **changes, num_hidden_layers=84, sliding_window=9, use_sliding_window=True))
    assert [at for at, window in enumerate(found) if window is not None] == [*expected]


def test_experts_are_in_the_configured_layers():
    config = read("qwen3_moe", mlp_only_layers=[2], decoder_sparse_step=1)
    assert [config.layer(i).experts for i in range(4)] == [True, True, False, True]
    assert config.experts == Experts(n_experts=7, n_experts_per_token=3, expert_size=40)
    assert [read("qwen2_moe", decoder_sparse_step=2).layer(i).experts for i in range(4)] == [False, True, False, True]
    moe = read("qwen2_moe")
    assert moe.experts is not None
    assert (moe.experts.norm_topk_prob, moe.experts.shared_size, moe.experts.shared_gate) == (False, 56, True)
    assert (moe.qkv_bias, read("qwen2_moe", qkv_bias=False).qkv_bias) == (True, False)


def test_hybrids_have_delta_nets_gates_and_partial_rotation():
    config = read("qwen3_next")
    assert [config.layer(i).mixer for i in range(4)] == ["delta_net"] * 3 + ["attention"]
    net = DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=6, key_head_dim=12, value_head_dim=12)
    assert config.delta_net == net
    assert (config.rotary_dim, config.attention_gate, config.qk_norm, config.q_rows) == (4, True, True, 192)
    assert read("qwen3_5_text", partial_rotary_factor=0.5).rotary_dim == 8
    assert read("qwen3_5_text", full_attention_interval=2).layer(1).mixer == "attention"
    moe = read("qwen3_5_moe_text", intermediate_size=...)
    assert moe.experts is not None
    assert (moe.experts.norm_topk_prob, moe.intermediate_size) == (True, 40)


def test_text_part_of_a_multimodal_config_is_read():
    text = DENSE | FAMILIES["qwen3_5_text"] | {"model_type": "qwen3_5_text"}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}, "tie_word_embeddings": True}
    config = config_from_huggingface(whole, path="config.json")
    assert (config.family, config.tie_word_embeddings, config.n_layers) == ("qwen3_5", True, 4)


def test_layers_of_llama_4_and_ministral_3():
    config = read("llama4_text", interleave_moe_layer_step=2, attention_chunk_size=64)
    rotated = Layer(head_norm=True, chunk=64)
    assert config.layers[0] == rotated
    assert config.layers[1] == Layer(head_norm=True, chunk=64, experts=True)
    assert config.layers[3] == Layer(rope=False, has_attention_temperature=True, experts=True)
    assert config.temperature == Temperature(scale=0.1, floor=8192, offset=1)
    assert (config.intermediate_size, config.interleaved_rope_hf) == (80, True)
    assert read("llama4_text", attn_temperature_tuning=False).temperature is None
    config = read("ministral3")
    assert config.rope_scaling == YarnScaling(factor=8.0, original_max_position_embeddings=32, attention_factor=1.0)
    assert config.temperature == Temperature(scale=0.1, floor=32, offset=0)
    assert config.layer(0).has_attention_temperature is True
    assert [read("smollm3").layer(i).rope for i in range(4)] == [True, True, True, False]
    assert read("smollm3", no_rope_layers=[0, 1, 1, 1]).layer(0).rope is False


def test_layers_without_rope_are_counted_by_the_interval_and_not_by_the_number_of_layers():
    config = read("smollm3", num_hidden_layers=6, no_rope_layers=None, layer_types=None)
    assert [layer.rope for layer in config.layers] == [True, True, True, False, True, True]


def json_row(kind: str, changes: dict[str, Any], code: str, fault: str, expected: object, actual: object) -> Any:
    """A row, named by what is changed."""
    ((key, value),) = changes.items()
    name = f"{kind}: {key}={value}"
    return row(name, lambda: read(kind, **changes), code, "config.json", where=fault, expected=expected, got=actual)


FULL = ["full_attention"] * 4
SLIDING = ["sliding_attention"] * 4
UNFIT = [
    json_row("qwen3_moe", {"num_experts_per_tok": 8}, "OutOfRange", "experts per token", (1, 7), 8),
    json_row("qwen3_moe", {"num_experts": -1}, "OutOfRange", "num_experts", 0, -1),
    json_row("qwen3_moe", {"moe_intermediate_size": ...}, "Missing", "moe_intermediate_size", "integer", "nothing"),
    json_row("qwen3_moe", {"mlp_only_layers": "0"}, "Malformed", "mlp_only_layers", "integers", "'0'"),
    json_row("qwen3_moe", {"layer_types": SLIDING}, "Unsupported", "layer_types", "full_attention",
             "'sliding_attention'"),
    json_row("qwen3_next", {"layer_types": ["full_attention"]}, "Inconsistent", "layer_types", 4, 1),
    json_row("qwen3_next", {"layer_types": ["mamba"] * 4}, "Unsupported", "layer_types",
             ("linear_attention", "full_attention"), "'mamba'"),
    json_row("qwen3_next", {"layer_types": "full"}, "Malformed", "layer_types", "names", "'full'"),
    json_row("qwen3_next", {"linear_num_value_heads": 5}, "OutOfRange", "value heads", "key heads",
             ("5 value", "2 key")),
    json_row("qwen3_next", {"linear_conv_kernel_dim": 1}, "OutOfRange", "convolution", 2, 1),
    json_row("qwen3_next", {"linear_key_head_dim": 0}, "OutOfRange", "key_head_dim", (1, 65536), 0),
    json_row("qwen3_next", {"partial_rotary_factor": 1.5}, "OutOfRange", "partial_rotary_factor", (0, 1), 1.5),
    json_row("qwen3_next", {"partial_rotary_factor": 0.2}, "OutOfRange", "rotary_dim", ("even", "head_dim = 16"), 3),
    json_row("qwen3_5_text", {"attn_output_gate": False}, "Unsupported", "attn_output_gate", True, False),
    json_row("qwen3_5_moe_text", {"norm_topk_prob": False}, "Unsupported", "norm_topk_prob", True, False),
    json_row("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "Unsupported", "mlp_only_layers", "transformers", [1]),
    json_row("qwen3_moe", {"routed_scaling_factor": 2.5}, "Unsupported", "routed_scaling_factor", (None, 1.0), 2.5),
    json_row("smollm3", {"no_rope_layers": [1]}, "Inconsistent", "no_rope_layers", (0, 1, 4), [1]),
    json_row("llama4_text", {"moe_layers": [4]}, "Inconsistent", "moe_layers", (0, 3), [4]),
    json_row("llama4_text", {"attention_chunk_size": None}, "Malformed", "attention_chunk_size", "value", None),
    json_row("mistral", {"layer_types": FULL}, "Unsupported", "layer_types", "sliding_attention", FULL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "facts"),
    [
        ("qwen3_moe", {}, ()), ("qwen2_moe", {}, ()), ("qwen3_next", {}, ()), ("qwen3_5_text", {}, ()),
        ("llama4_text", {}, ()), ("ministral3", {}, ()), ("smollm3", {}, ()), ("mistral", {"sliding_window": 256}, ()),
        ("mistral", {"sliding_window": 9}, ("sliding_window", "mistral", 9)),
        ("qwen3_moe", {"norm_topk_prob": False}, ("norm_topk_prob", "qwen3_moe", "false")),
        ("qwen2_moe", {"norm_topk_prob": True}, ("norm_topk_prob", "qwen2_moe", "true")),
        ("qwen2_moe", {"tie_word_embeddings": True}, ("output", "qwen2_moe", "tie_word_embeddings")),
        ("qwen2_moe", {"head_dim": 16}, ("heads", "qwen2_moe", 96)),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ("qwen3_moe", "mlp_only_layers", "decoder_sparse_step")),
        ("qwen3_moe", {"attention_bias": True}, ("attn_output", "llama", "qwen3_moe")),
        ("qwen3_next", {"linear_value_head_dim": 8}, ("linear_key_head_dim is 12", "linear_value_head_dim 8")),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, ("fourth", "smollm3", "no_rope_layers")),
        ("llama4_text", {"attention_chunk_size": 64}, ("attention_chunk_size", 8192, 64)),
        ("llama4_text", {"max_position_embeddings": 9000, "attention_chunk_size": 9000},
         ("attention_chunk_size", 8192, "none")),
        ("llama4_text", {"num_local_experts": 128}, ("128 experts", "use_qk_norm")),
        ("llama4_text", {"moe_layers": [0, 3]}, ("n-th", "experts", "moe_layers")),
        ("llama4_text", {"floor_scale": 16}, ("floor_scale 8192", "attn_scale 0.1")),
    ],
)  # fmt: skip
def test_keys_hard_coded_by_llamacpp_are_named(kind, changes, facts):
    found = cannot_express(read(kind, **changes))
    assert_tells(found, *facts)
    assert bool(facts) == bool(found)


HYBRID: dict[str, Any] = {
    "block_count": 3, "context_length": 256, "embedding_length": 48, "attention.head_count": 6,
    "feed_forward_length": 80,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 16,
    "attention.value_length": 16, "rope.dimension_count": 4, "rope.dimension_sections": np.array([1, 1, 0, 0]),
    "ssm.conv_kernel": 4, "ssm.state_size": 12, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 72,
    "attention.recurrent_layers": np.array([True, False, True]), "expert_count": 7, "expert_used_count": 3,
    "expert_feed_forward_length": 40,
}  # fmt: skip


def from_gguf(arch: str = "qwen35moe", **changes: Any) -> ModelConfig:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{arch}.{key}": value for key, value in (HYBRID | named).items() if value is not ...}
    metadata["general.architecture"] = arch
    names = {"output.weight"}
    return config_from_gguf(metadata, tensor_names=names, vocab_size=99, rope_factors=None, path="x.gguf")


def test_gguf_missing_keys_get_the_values_of_llamacpp():
    config = from_gguf()
    assert [layer.mixer for layer in config.layers] == ["delta_net", "attention", "delta_net"]
    assert config.experts is not None
    assert (config.experts.norm_topk_prob, config.experts.shared_size) == (True, 80)
    assert from_gguf(attention__recurrent_layers=..., full_attention_interval=3).layers[2].mixer == "attention"
    assert from_gguf(block_count=5, nextn_predict_layers=2, attention__recurrent_layers=...).n_layers == 3
    plain = {"rope__dimension_count": 16, "attention__recurrent_layers": ...}
    old = from_gguf("qwen2moe", **plain, expert_feed_forward_length=..., rope__dimension_sections=...)
    assert old.experts is not None
    assert (old.experts.norm_topk_prob, old.experts.expert_size, old.experts.shared_size) == (False, 80 // 3, 80)


def gguf_row(changes: dict[str, Any], code: str, fault: str, expected: object, actual: object) -> Any:
    """A row, named by what is changed."""
    key, value = next(iter(changes.items()))
    make = lambda: from_gguf(**changes)  # noqa: E731
    return row(f"{key}={value}", make, code, "x.gguf", where=fault, expected=expected, got=actual)


SECTIONS = "qwen35moe.rope.dimension_sections"
UNREAD = [
    gguf_row({"expert_used_count": 8}, "OutOfRange", "experts per token", (1, 7), 8),
    gguf_row({"expert_count": ...}, "Missing", "qwen35moe.expert_count", "integer", "nothing"),
    gguf_row({"expert_weights_norm": False}, "Unsupported", "qwen35moe.expert_weights_norm", True, False),
    gguf_row({"expert_gating_func": 2}, "Unsupported", "qwen35moe.expert_gating_func", (0, 1), 2),
    gguf_row({"ssm__state_size": ...}, "Missing", "qwen35moe.ssm.state_size", "integer", "nothing"),
    gguf_row({"ssm__inner_size": 70}, "Inconsistent", "qwen35moe.ssm.inner_size", "time_step_rank = 6", 70),
    gguf_row({"attention__recurrent_layers": np.array([True])}, "Inconsistent", "qwen35moe.attention.recurrent_layers",
             3, 1),
    gguf_row({"rope__dimension_sections": ...}, "Missing", SECTIONS, "numbers", "nothing"),
    gguf_row({"rope__dimension_sections": np.array([1.5, 1, 1, 0])}, "Malformed", SECTIONS, "integers",
             "array([1.5, 1."),
    gguf_row({"rope__dimension_sections": np.array([0, 0, 0, 0])}, "Malformed", SECTIONS, ("three", "four"), [0] * 4),
    gguf_row({"nextn_predict_layers": 3}, "Inconsistent", "qwen35moe.nextn_predict_layers", "block_count = 3", 3),
    gguf_row({"block_count": 10**9, "attention__recurrent_layers": ...}, "OutOfRange", "n_layers", (1, 512), 10**9),
]  # fmt: skip


@pytest.mark.parametrize("refusal", [*UNFIT, *UNREAD])
def test_invalid_config_is_refused_by_key(refusal: Refusal):
    refusal.check()


TEXT_OF_QWEN2_5_VL = {
    "attention.recurrent_layers": ..., "expert_count": ..., "expert_feed_forward_length": ..., "expert_used_count": ...,
    "feed_forward_length": 80, "rope.dimension_count": ...,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "sections", "turned"),
    [  # 8 pairs; what reaches none has the position 0 in llama.cpp, while transformers turns it
        ("qwen3vl", [3, 3, 2, 0], True), ("qwen3vl", [1, 1, 1, 0], True), ("qwen3vl", [4, 2, 2, 0], False),
        ("qwen3vl", [8, 0, 0, 0], False), ("qwen3vl", [2, 0, 0, 0], False),
        ("qwen2vl", [4, 2, 2, 0], True), ("qwen2vl", [2, 0, 0, 0], True), ("qwen2vl", [0, 4, 4, 0], True),
        ("qwen2vl", [4, 4, 0, 1], True), ("qwen2vl", [4, 3, 0, 1], False),
        ("qwen3vl", [0, 0, 0, 2], False),
    ],
)  # fmt: skip
def test_llamacpp_is_unsupported_exactly_if_a_pair_is_not_rotated(arch, sections, turned):
    config = from_gguf(arch, **TEXT_OF_QWEN2_5_VL | {"rope.dimension_sections": np.array(sections)})
    assert (unrotated_pairs(config) == []) == turned
    assert turned or arch == "qwen2vl" or "does not rotate" in unsupported_reason("llamacpp", config, 20)
    assert unsupported_reason("transformers", config, 20) == ""

"""What both formats say of the families that are not dense, every refusal, and what llama.cpp has a constant for."""

from typing import Any

import numpy as np
import pytest

from llorch.architecture import DeltaNet, Experts, Layer, Temperature
from llorch.config import ModelConfig, YarnScaling
from llorch.config.llamacpp import cannot_express
from llorch.errors import FormatError
from llorch.verify.witnesses.abilities import cannot_judge, unturned

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
    "mistral": {}, "smollm3": {}, "ministral3": {"rope_parameters": YARN}, "llama4_text": LLAMA4,
}  # fmt: skip


def read(kind: str, **changes: Any) -> ModelConfig:
    values = DENSE | FAMILIES[kind] | {"model_type": kind} | changes
    return ModelConfig.from_huggingface({key: v for key, v in values.items() if v is not ...}, path="config.json")


def windows(config: ModelConfig) -> list[int | None]:
    return [config.layer(i).window for i in range(config.n_layers)]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 9}, [9, 9, 9, 9]),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 256}, [None] * 4),  # as long as the context
        ("ministral3", {"sliding_window": 9}, [9, 9, 9, 9]),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, [None] * 4),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2, "use_sliding_window": True}, [None, None, 9, 9]),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True,
                   "layer_types": ["sliding_attention", *["full_attention"] * 3]}, [9, None, None, None]),
        ("qwen2_moe", {"sliding_window": 9, "max_window_layers": 3, "use_sliding_window": True}, [9, None, 9, None]),
        ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}, [9, 9, 9, 9]),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, [None, None, None, 9]),
    ],
)  # fmt: skip
def test_windows_are_in_the_layers_in_which_transformers_has_them(kind, changes, expected):
    assert windows(read(kind, **changes)) == expected


def test_experts_are_in_the_layers_that_the_configuration_says():
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
    assert config.delta_net == DeltaNet(
        conv_kernel=4, n_key_heads=2, n_value_heads=6, key_head_dim=12, value_head_dim=12
    )
    assert (config.rotary_dim, config.attention_gate, config.qk_norm, config.q_rows) == (4, True, True, 192)
    assert read("qwen3_5_text", partial_rotary_factor=0.5).rotary_dim == 8
    assert read("qwen3_5_text", full_attention_interval=2).layer(1).mixer == "attention"
    moe = read("qwen3_5_moe_text", intermediate_size=...)
    assert moe.experts is not None
    assert (moe.experts.norm_topk_prob, moe.intermediate_size) == (True, 40)


def test_the_text_part_of_a_model_that_sees_is_read():
    text = DENSE | FAMILIES["qwen3_5_text"] | {"model_type": "qwen3_5_text"}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}, "tie_word_embeddings": True}
    config = ModelConfig.from_huggingface(whole, path="config.json")
    assert (config.family, config.tie_word_embeddings, config.n_layers) == ("qwen3_5", True, 4)
    with pytest.raises(FormatError, match="quantization_config: expected None"):
        ModelConfig.from_huggingface(whole | {"quantization_config": {"bits": 8}}, path="config.json")


def test_layers_of_llama_4_and_ministral_3():
    config = read("llama4_text", interleave_moe_layer_step=2, attention_chunk_size=64)
    rotated = Layer(head_norm=True, chunk=64)
    assert config.layers[0] == rotated
    assert config.layers[1] == Layer(head_norm=True, chunk=64, experts=True)
    assert config.layers[3] == Layer(rope=False, tempered=True, experts=True)
    assert config.temperature == Temperature(scale=0.1, floor=8192, offset=1)
    assert (config.intermediate_size, config.adjacent_pairs) == (80, True)
    assert read("llama4_text", attn_temperature_tuning=False).temperature is None
    config = read("ministral3")
    assert config.rope_scaling == YarnScaling(factor=8.0, original_max_position_embeddings=32, attention_factor=1.0)
    assert (config.temperature, config.layer(0).tempered) == (Temperature(scale=0.1, floor=32, offset=0), True)
    assert [read("smollm3").layer(i).rope for i in range(4)] == [True, True, True, False]
    assert read("smollm3", no_rope_layers=[0, 1, 1, 1]).layer(0).rope is False


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 8}, "experts per token must be from 1 to the 7 that there are, got 8"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts: expected at least 0, got -1"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size: expected an integer, got nothing"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers: expected a list of integers, got '0'"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types: expected full_attention for every"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types: expected 4 entries, one for each layer, got"),
        ("qwen3_next", {"layer_types": ["mamba"] * 4}, "layer_types: expected linear_attention or full_attention, got"),
        ("qwen3_next", {"layer_types": "full"}, "layer_types: expected a list of names, got 'full'"),
        ("qwen3_next", {"linear_num_value_heads": 5}, "multiple of its key heads, got 5 value and 2 key heads"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "convolution of a delta net must see 2 tokens or more, got 1"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "key_head_dim must be from 1 to 65536, got 0"),
        ("qwen3_next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected above 0, at most 1, got 1.5"),
        ("qwen3_next", {"partial_rotary_factor": 0.2}, "rotary_dim must be even, at most head_dim = 16, got 3"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate: expected True, got False"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob: expected True, got False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers: expected no dense layer, as transformers has"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor: expected None or 1.0, got 2.5"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 0 or 1 for each of 4 layers, got [1]"),
        ("llama4_text", {"moe_layers": [4]}, "moe_layers: expected layers from 0 to 3, got [4]"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size: expected a value or no such key"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types: expected sliding_attention for every layer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_key(kind, changes, message):
    with pytest.raises(FormatError) as caught:
        read(kind, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3_moe", {}, ""), ("qwen2_moe", {}, ""), ("qwen3_next", {}, ""), ("qwen3_5_text", {}, ""),
        ("llama4_text", {}, ""), ("ministral3", {}, ""), ("smollm3", {}, ""), ("mistral", {"sliding_window": 256}, ""),
        ("mistral", {"sliding_window": 9}, "it reads no sliding_window of mistral; the configuration says 9"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob of qwen3_moe; the configuration says false"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob of qwen2_moe; the configuration says true"),
        ("qwen2_moe", {"tie_word_embeddings": True}, "it reads an output matrix of qwen2_moe; tie_word_embeddings"),
        ("qwen2_moe", {"head_dim": 16}, "heads of qwen2_moe that are as wide as the model together; they are 96 wide"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers or decoder_sparse_step say otherwise"),
        ("qwen3_moe", {"attention_bias": True}, "it reads a bias of attn_output for the llama family only"),
        ("qwen3_next", {"linear_value_head_dim": 8}, "linear_key_head_dim is 12, linear_value_head_dim 8"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "every fourth layer of smollm3; no_rope_layers says otherwise"),
        ("llama4_text", {"attention_chunk_size": 64}, "its attention_chunk_size is 8192; the configuration says 64"),
        ("llama4_text", {"max_position_embeddings": 9000, "attention_chunk_size": 9000}, "configuration says none"),
        ("llama4_text", {"num_local_experts": 128}, "it normalises heads unless there are 128 experts; use_qk_norm"),
        ("llama4_text", {"moe_layers": [0, 3]}, "it gives every n-th layer experts; moe_layers says otherwise"),
        ("llama4_text", {"floor_scale": 16}, "its floor_scale is 8192 and its attn_scale 0.1"),
    ],
)  # fmt: skip
def test_what_llamacpp_has_a_constant_for_is_said_by_key(kind, changes, reason):
    found = cannot_express(read(kind, **changes))
    assert reason in found
    assert bool(reason) == bool(found)


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
    return ModelConfig.from_gguf(metadata, tensor_names=names, vocab_size=99, rope_factors=None, path="x.gguf")


def test_what_a_gguf_file_leaves_unsaid_is_what_llamacpp_computes():
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 8}, "experts per token must be from 1 to the 7 that there are, got 8"),
        ({"expert_count": ...}, "qwen35moe.expert_count: expected an integer, got nothing"),
        ({"expert_weights_norm": False}, "qwen35moe.expert_weights_norm: expected True, got False"),
        ({"expert_gating_func": 2}, "qwen35moe.expert_gating_func: expected 0 or 1, got 2"),
        ({"ssm__state_size": ...}, "qwen35moe.ssm.state_size: expected an integer, got nothing"),
        ({"ssm__inner_size": 70}, "qwen35moe.ssm.inner_size: expected a multiple of time_step_rank = 6, got 70"),
        ({"attention__recurrent_layers": np.array([True])}, "recurrent_layers: expected 3 entries, one for each block"),
        ({"rope__dimension_sections": ...}, "qwen35moe.rope.dimension_sections: expected numbers, got nothing"),
        (
            {"rope__dimension_sections": np.array([1.5, 1, 1, 0])},
            "rope.dimension_sections: expected integers, got array",
        ),
        ({"rope__dimension_sections": np.array([0, 0, 0, 0])}, "sections: expected three or four numbers, got"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers: expected fewer than block_count = 3, got 3"),
        ({"block_count": 10**9, "attention__recurrent_layers": ...}, "n_layers must be from 1 to 512, got 1000000000"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_key(changes, message):
    with pytest.raises(FormatError) as caught:
        from_gguf(**changes)
    assert message in str(caught.value)


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
def test_llamacpp_is_no_witness_where_and_only_where_it_leaves_a_pair_unturned(arch, sections, turned):
    config = from_gguf(arch, **TEXT_OF_QWEN2_5_VL | {"rope.dimension_sections": np.array(sections)})
    assert (unturned(config) == []) == turned
    assert turned or arch == "qwen2vl" or "unturned" in cannot_judge("llamacpp", config, 20)
    assert cannot_judge("transformers", config, 20) == ""

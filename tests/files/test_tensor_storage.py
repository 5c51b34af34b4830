"""Weights that are no tensors of their own in a file: experts, delta nets, gains less one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers.refusals import refuses

from llorch.families.layers import DeltaNet
from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.files.tensor_storage import Layout, fused_layout, in_gguf

NET = DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=6, key_head_dim=4, value_head_dim=5)
RNG = np.random.default_rng(3)
HIDDEN, SIZE, EXPERTS = 8, 6, 5
CONFIG: dict[str, object] = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9, "rms_norm_eps": 1e-6,
    "moe_intermediate_size": SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
LAYER = "model.layers.0."
MLP = f"{LAYER}mlp"


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape, np.float32)


PARTS = {
    "gate": random(EXPERTS, SIZE, HIDDEN), "up": random(EXPERTS, SIZE, HIDDEN), "down": random(EXPERTS, HIDDEN, SIZE)
}  # fmt: skip
ATTENTION = {
    "model.embed_tokens.weight": random(9, HIDDEN), "lm_head.weight": random(9, HIDDEN),
    "model.norm.weight": random(HIDDEN), LAYER + "input_layernorm.weight": random(HIDDEN),
    LAYER + "post_attention_layernorm.weight": random(HIDDEN), LAYER + "self_attn.q_proj.weight": random(8, HIDDEN),
    LAYER + "self_attn.k_proj.weight": random(4, HIDDEN), LAYER + "self_attn.v_proj.weight": random(4, HIDDEN),
    LAYER + "self_attn.o_proj.weight": random(HIDDEN, 8), LAYER + "self_attn.q_norm.weight": random(4),
    LAYER + "self_attn.k_norm.weight": random(4),
}  # fmt: skip
QWEN = ATTENTION | {LAYER + "mlp.gate.weight": random(EXPERTS, HIDDEN)}
EACH = {
    f"{LAYER}mlp.experts.{e}.{part}_proj.weight": np.ascontiguousarray(stack[e])
    for part, stack in PARTS.items()
    for e in range(EXPERTS)
}
GATE_UP = np.concatenate([PARTS["gate"], PARTS["up"]], 1)
FUSED = {f"{LAYER}mlp.experts.gate_up_proj": GATE_UP, f"{LAYER}mlp.experts.down_proj": PARTS["down"]}
LLAMA4 = {name: array for name, array in ATTENTION.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))} | {
    f"{LAYER}feed_forward.router.weight": random(EXPERTS, HIDDEN),
    **{
        f"{LAYER}feed_forward.shared_expert.{part}_proj.weight": np.ascontiguousarray(stack[0])
        for part, stack in PARTS.items()
    },
    f"{LAYER}feed_forward.experts.gate_up_proj": np.ascontiguousarray(GATE_UP.swapaxes(1, 2)),
    f"{LAYER}feed_forward.experts.down_proj": np.ascontiguousarray(PARTS["down"].swapaxes(1, 2)),
}
OF_LLAMA4: dict[str, object] = CONFIG | {
    "model_type": "llama4_text", "num_local_experts": EXPERTS, "intermediate_size": SIZE, "intermediate_size_mlp": 16,
}  # fmt: skip
# Of Qwen3-VL-MoE transformers 4 wrote the turned form, transformers 5 writes the other.
OF_VL: dict[str, object] = {"model_type": "qwen3_vl_moe", "text_config": CONFIG | {"model_type": "qwen3_vl_moe_text"}}
TURNED = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in FUSED.items()}
VL, VL_TURNED = (
    {name.replace("model.", "model.language_model."): array for name, array in (QWEN | experts).items()}
    for experts in (FUSED, TURNED)
)


def folder(path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, object] = CONFIG) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(dict(tensors), path / "model.safetensors")
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("tensors", "config"),
    [(QWEN | EACH, CONFIG), (QWEN | FUSED, CONFIG), (LLAMA4, OF_LLAMA4), (VL_TURNED, OF_VL), (VL, OF_VL)],
    ids=["one for each", "one for all", "turned", "turned beside eyes", "beside eyes"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_experts_are_the_same_matrices_however_they_are_stored(tmp_path: Path, tensors, config, dtype, packed):
    stored = {name: array.astype(dtype) for name, array in tensors.items()}
    weights = open_weights(folder(tmp_path, stored, config)).using(packed=packed)
    x = random(3, SIZE)
    for part, stack in PARTS.items():
        whole, name = stack.astype(dtype).astype(np.float32), f"experts_{part}_proj"
        assert np.array_equal(weights.array(f"layers.0.{name}"), whole)
        experts = weights.layer(0)[name]
        assert (len(experts), experts.shape) == (EXPERTS, stack.shape)
        one = experts[3]
        if packed and dtype is np.float16:
            assert one.packed.ggml_type is GGMLType.F16
            assert np.array_equal(one.dequantize(), whole[3])
        else:
            assert np.array_equal(one, whole[3])
        if part == "down" and packed and dtype is np.float16:
            np.testing.assert_allclose(one.forward(x), x @ whole[3].T, rtol=1e-5, atol=1e-5)
    assert weights.stored_bytes("layers.0.experts_up_proj") == PARTS["up"].size * np.dtype(dtype).itemsize


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("size", [HIDDEN, HIDDEN // 2], ids=["square down", "square gate and up"])
def test_one_square_tensor_of_experts_has_the_order_of_the_other(tmp_path: Path, size: int, *, turned: bool):
    gate, up, down = random(EXPERTS, size, HIDDEN), random(EXPERTS, size, HIDDEN), random(EXPERTS, HIDDEN, size)
    joined_up, order = np.concatenate([gate, up], 1), (0, 2, 1) if turned else (0, 1, 2)
    stacks = {"gate_up_proj": joined_up, "down_proj": down}
    experts = {f"{MLP}.experts.{name}": np.ascontiguousarray(array.transpose(order)) for name, array in stacks.items()}
    text = CONFIG | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": size}
    weights = open_weights(folder(tmp_path, QWEN | experts, text))
    for part, stack in (("gate", gate), ("up", up), ("down", down)):
        assert np.array_equal(weights.array(f"layers.0.experts_{part}_proj"), stack)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_no_other_family_has_experts_of_both_orders(tmp_path: Path, family: str):
    if family == "llama4_text":  # the order of the other one, each
        straight = {name: np.ascontiguousarray(a.swapaxes(1, 2)) if a.ndim == 3 else a for name, a in LLAMA4.items()}
        source = folder(tmp_path, straight, OF_LLAMA4)
    else:
        source = folder(tmp_path, QWEN | TURNED)
    mlp = "feed_forward" if family == "llama4_text" else "mlp"
    with refuses("Shape", f"{LAYER}{mlp}.experts.down_proj", where=source):
        open_weights(source)


def test_only_experts_that_are_asked_for_are_decoded(tmp_path: Path):
    weights = open_weights(folder(tmp_path, QWEN | EACH))
    weights.layer(0)["experts_up_proj"][2]
    assert [*weights._loaded] == ["layers.0.experts_up_proj.2"]
    with refuses(IndexError, "from 0 to 4", where="layers.0.experts_up_proj", got=5):
        weights.layer(0)["experts_up_proj"][5]


@pytest.mark.parametrize(
    ("tensors", "changes", "code", "facts"),
    [
        (QWEN | EACH, {"num_experts": 6}, "Missing",
         ("3 Missing", f"{MLP}.experts.5.down_proj.weight", "Shape", f"{MLP}.gate.weight")),
        (QWEN | EACH, {"num_experts": 4}, "Unexpected", ("3 Unexpected", f"{MLP}.experts.4.down_proj.weight")),
        (QWEN | FUSED, {"num_experts": 4}, "Shape",
         ("3 Shape", f"{MLP}.experts.down_proj", "expected (4, 8, 6)", "got (5, 8, 6)")),
        (QWEN | EACH, {"num_experts_per_tok": 6}, "OutOfRange", ("experts per token", "from 1 to 5", "got 6")),
        (QWEN, {"num_experts": 300}, "Missing", ("900 Missing", f"{MLP}.experts.0.down_proj.weight", "897 more")),
    ],
)  # fmt: skip
def test_wrong_numbers_of_experts_are_one_line(
    tmp_path: Path, tensors: dict[str, np.ndarray], changes: dict[str, int], code: str, facts: tuple[str, ...]
):
    with refuses(code, *facts) as caught:
        open_weights(folder(tmp_path, tensors, CONFIG | changes))
    assert "\n" not in str(caught.value)


def test_value_heads_of_qwen_3_5_files_are_dealt_out_to_the_key_heads_in_turn():
    # Head v reads key head v // 3 in Hugging Face; in the file head t reads key head t % 2.
    tiled = in_gguf("dt_bias", NET, HIDDEN, tiled=True).extract(np.array([0, 3, 1, 4, 2, 5]), (6,))
    assert tiled.tolist() == [0, 1, 2, 3, 4, 5]
    columns = in_gguf("out_proj", NET, HIDDEN, tiled=True).extract(np.arange(60).reshape(2, 30), (2, 30))
    assert columns[0].tolist() == [5 * head + i for head in (0, 2, 4, 1, 3, 5) for i in range(5)]
    rows = in_gguf("in_qkv", NET, HIDDEN, tiled=True).extract(np.arange(46), (46,))
    assert rows[:26].tolist() == [*range(21), *range(26, 31)]
    same = DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=2, key_head_dim=4, value_head_dim=5)
    assert in_gguf("in_z", same, HIDDEN, tiled=True) == Layout()


def test_queries_keys_values_and_gates_of_qwen3_next_lie_head_after_head():
    matrix = np.array([f"{part}{head}.{i}" for head in range(2) for part, n in zip("qkvz", (4, 4, 15, 15), strict=True)
                       for i in range(n)])  # fmt: skip
    taken = fused_layout("in_qkv", NET, HIDDEN).extract(matrix, (46,))
    assert [*taken[[0, 4, 8, 12, 16, 31]]] == ["q0.0", "q1.0", "k0.0", "k1.0", "v0.0", "v1.0"]
    assert fused_layout("in_z", NET, HIDDEN).extract(matrix, (30,))[[0, 14, 15]].tolist() == ["z0.0", "z0.14", "z1.0"]
    pairs = np.array(["b0", "b1", "b2", "a0", "a1", "a2", "b3", "b4", "b5", "a3", "a4", "a5"])
    assert fused_layout("in_a", NET, HIDDEN).extract(pairs, (6,)).tolist() == ["a0", "a1", "a2", "a3", "a4", "a5"]


@pytest.mark.parametrize("short", ["in_qkv", "in_z", "in_b", "out_proj", "conv", "decay"])
@pytest.mark.parametrize("tiled", [False, True])
def test_weights_round_trip_through_their_stored_tensor(short: str, tiled: bool):
    shapes = {
        "in_qkv": (46, HIDDEN), "in_z": (30, HIDDEN), "in_b": (6, HIDDEN), "out_proj": (HIDDEN, 30), "conv": (46, 4),
        "decay": (6,),
    }  # fmt: skip
    layout, weight = in_gguf(short, NET, HIDDEN, tiled=tiled), random(*shapes[short])
    tensor = np.zeros(layout.shape or weight.shape, np.float32)
    layout.put(weight, tensor)
    assert np.array_equal(layout.extract(tensor, weight.shape), weight)


def test_gains_and_logarithms_are_made_once_in_the_dtype_that_is_asked_for():
    stored = np.array([0.1, -0.3, 1e-9], np.float32)
    assert np.array_equal(Layout(form="less_one").compute(stored, np.float64), 1 + stored.astype(np.float64))
    logarithm = np.array([-3, 0.5, 2.7], np.float32)
    decay = Layout(form="logarithm").compute(logarithm, np.float32)
    assert np.array_equal(decay, (-np.exp(logarithm.astype(np.float64))).astype(np.float32))
    back = np.empty(3, np.float32)
    Layout(form="logarithm").put(decay, back)
    assert np.array_equal(Layout(form="logarithm").compute(back, np.float32), decay)

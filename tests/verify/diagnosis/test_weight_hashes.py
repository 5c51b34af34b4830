"""Weights of an engine beside ours: the same numbers are recognised in every layout, other ones refused."""

import numpy as np
import pytest
from raw_dumps import weights_of

from llorch.dumps.raw import digest
from llorch.errors import GuardFailed
from llorch.files.names import interleave, undo_interleave
from llorch.ops.rounding import round_activations
from llorch.verify.diagnosis.weight_hashes import check_weights

NAME = "micro-llama"
WEIGHTS = weights_of(NAME)


def bf16(array: np.ndarray) -> np.ndarray:
    return round_activations(array, "BF16")


def f16(array: np.ndarray) -> np.ndarray:
    return round_activations(array, "F16")


def weight(name: str) -> np.ndarray:
    return WEIGHTS.array(f"layers.1.{name}")


Q, K, UP = "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_k.weight", "model.layers.1.mlp.up_proj.weight"
HEADS, KV_HEADS = WEIGHTS.config.n_heads, WEIGHTS.config.n_kv_heads


@pytest.mark.parametrize(
    ("name", "array", "note"),
    [
        (Q, interleave(weight("q_proj"), HEADS), "is ours with neighbouring pairs"),
        (K, interleave(weight("k_proj"), KV_HEADS), "is ours with neighbouring pairs"),
        (K, undo_interleave(weight("k_proj"), KV_HEADS), "is ours with pairs undone twice"),
        (UP, weight("up_proj").T, "is ours transposed"),
        (UP, weight("gate_proj"), "is our layers.1.gate_proj"),
        (UP, WEIGHTS.array("layers.0.up_proj"), "is our layers.0.up_proj"),
        ("blocks.1.w3", weight("up_proj"), "is our layers.1.up_proj"),
        ("model.layers.1.input_layernorm.weight", weight("attn_norm") + 1, "is ours plus 1"),
        (UP, bf16(weight("up_proj")), "is ours rounded to bfloat16"),
        ("rope.freqs", np.ones(3), "is not compared: neither name nor hash are those of a weight"),
    ],
)  # fmt: skip
def test_the_same_numbers_in_another_layout_or_place_are_noted(name: str, array: np.ndarray, note: str):
    found = check_weights(WEIGHTS, {name: digest(array)}, source="mine", dtype="bfloat16")
    assert found == [f"weights: {name} {note}"]


def test_keys_that_were_permuted_with_the_number_of_query_heads_are_recognised():
    story = weights_of("story")
    told = digest(interleave(story.array("layers.0.k_proj"), story.config.n_heads))
    notes = check_weights(story, {"blk.0.attn_k.weight": told}, source="mine", dtype="")
    assert notes == ["weights: blk.0.attn_k.weight is ours with neighbouring pairs of as many heads as q has"]


def test_tensors_of_a_kind_are_told_together():
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    hashes = {name: digest(interleave(WEIGHTS.array(f"layers.{i}.q_proj"), HEADS)) for i, name in enumerate(names)}
    hashes |= {f"freqs.{i}": digest(np.full(2, i)) for i in range(5)}
    assert check_weights(WEIGHTS, hashes, source="mine", dtype="") == [
        f"weights: {', '.join(names)} is ours with neighbouring pairs",
        "weights: freqs.0, freqs.1, freqs.2 and 2 more is not compared: neither name nor hash are those of a weight",
    ]


@pytest.mark.parametrize(
    ("array", "how"),
    [
        (bf16(weight("up_proj")), "is ours rounded to bfloat16"),
        (f16(weight("up_proj")), "is ours rounded to float16"),
        (bf16(weight("up_proj")).T, "is ours transposed rounded to bfloat16"),
        (1.01 * weight("up_proj"), "has other numbers in every layout that is known"),
    ],
)
def test_other_numbers_are_refused(array: np.ndarray, how: str):
    hashes = {UP: digest(array), Q: digest(weight("q_proj"))}
    message = f"^mine: weights: expected the numbers of .*{NAME}.gguf, got others in 1 of 2 tensors: {UP} {how}; give"
    with pytest.raises(GuardFailed, match=message) as caught:
        check_weights(WEIGHTS, hashes, source="mine", dtype="float32")
    assert caught.value.guard == "weights"

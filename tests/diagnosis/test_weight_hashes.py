"""Weights of an engine beside ours: the same numbers are recognised in every layout, other ones refused."""

from collections.abc import Mapping

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, tensors_of
from builders.raw_dumps import weights_of
from faults.wrong_readers import READERS
from helpers.refusals import assert_tells, refuses

from llorch.diagnosis.mistakes import QUANTISED_FOLDERS
from llorch.diagnosis.weight_hashes import check_weights
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.stage_dump import Misread
from llorch.files import Weights, open_weights
from llorch.files.tensor_names import interleave, undo_interleave
from llorch.ops.rounding import round_activations
from llorch.runtime.errors import GuardFailed

NAME = "micro-llama"
WEIGHTS = weights_of(NAME)


def bf16(array: np.ndarray) -> np.ndarray:
    return round_activations(array, "BF16")


def weight(name: str) -> np.ndarray:
    return WEIGHTS.array(f"layers.1.{name}")


Q, K, UP = "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_k.weight", "model.layers.1.mlp.up_proj.weight"
HEADS, KV_HEADS = WEIGHTS.config.n_heads, WEIGHTS.config.n_kv_heads
GUISES: dict[str, tuple[str, np.ndarray, str]] = {  # a name, what is under it, what the note tells of it
    "q of neighbouring pairs": (Q, interleave(weight("q_proj"), HEADS), "neighbouring pairs"),
    "k of neighbouring pairs": (K, interleave(weight("k_proj"), KV_HEADS), "neighbouring pairs"),
    "k undone twice": (K, undo_interleave(weight("k_proj"), KV_HEADS), "twice"),
    "transposed": (UP, weight("up_proj").T, "transposed"),
    "another matrix": (UP, weight("gate_proj"), "layers.1.gate_proj"),
    "another layer": (UP, WEIGHTS.array("layers.0.up_proj"), "layers.0.up_proj"),
    "another name": ("blocks.1.w3", weight("up_proj"), "layers.1.up_proj"),
    "plus 1": ("model.layers.1.input_layernorm.weight", weight("attn_norm") + 1, "plus 1"),
    "rounded": (UP, bf16(weight("up_proj")), "bfloat16"),
    "no weight": ("rope.freqs", np.ones(3), "not compared"),
}


@pytest.mark.parametrize(("name", "array", "layout"), GUISES.values(), ids=GUISES)
def test_the_same_numbers_in_another_layout_or_place_are_noted(name: str, array: np.ndarray, layout: str):
    (note,), _ = check_weights(WEIGHTS, {name: digest(array)}, source="mine", dtype="bfloat16")
    assert_tells(note, f"weights: {name}", layout)
    others = {told for _, _, told in GUISES.values()} - {layout}
    assert not any(other in note for other in others)


def test_keys_that_were_permuted_with_the_number_of_query_heads_are_recognised():
    story = weights_of("story")
    told = digest(interleave(story.array("layers.0.k_proj"), story.config.n_heads))
    (note,), _ = check_weights(story, {"blk.0.attn_k.weight": told}, source="mine", dtype="")
    assert_tells(note, "weights: blk.0.attn_k.weight", "neighbouring pairs", "heads", "q")


def test_tensors_of_a_kind_are_told_together():
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    hashes = {name: digest(interleave(WEIGHTS.array(f"layers.{i}.q_proj"), HEADS)) for i, name in enumerate(names)}
    hashes |= {f"freqs.{i}": digest(np.full(2, i)) for i in range(5)}
    (turned, unknown), _ = check_weights(WEIGHTS, hashes, source="mine", dtype="")
    assert_tells(turned, f"weights: {', '.join(names)}", "neighbouring pairs")
    assert_tells(unknown, "weights: freqs.0, freqs.1, freqs.2", 2, "not compared")
    assert "freqs.3" not in unknown


OTHERS: dict[str, tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]] = {  # what is told, and what is not
    "bfloat16": (bf16(weight("up_proj")), ("bfloat16",), ("transposed", "other numbers")),
    "float16": (round_activations(weight("up_proj"), "F16"), ("float16",), ("transposed", "other numbers")),
    "bfloat16 transposed": (bf16(weight("up_proj")).T, ("transposed", "bfloat16"), ("other numbers",)),
    "other numbers": (1.01 * weight("up_proj"), ("other numbers",), ("transposed", "float16")),
}


@pytest.mark.parametrize(("array", "message_parts", "absent_words"), OTHERS.values(), ids=OTHERS)
def test_other_numbers_are_refused(array: np.ndarray, message_parts: tuple[str, ...], absent_words: tuple[str, ...]):
    hashes = {UP: digest(array), Q: digest(weight("q_proj"))}
    actual = ("1 of 2", UP, *message_parts)
    with refuses(GuardFailed, expected=WEIGHTS.path, got=actual, where="mine: weights") as caught:
        check_weights(WEIGHTS, hashes, source="mine", dtype="float32")
    assert not any(word in str(caught.value) for word in absent_words)
    assert caught.value.guard == "weights"


@pytest.mark.parametrize(
    ("mistake", "folder"),
    [
        ("awq-plain-order", "awq-gemm"),
        ("gptq-first-version-as-second", "gptq-4bit"),
        ("global-scale-turned", "ct-nvfp4"),
        ("nested-offset-dropped", "bnb-nf4-double"),
    ],
)
def test_a_mistake_of_reading_a_quantised_folder_is_named_and_the_reader_is_to_be_mended(mistake: str, folder: str):
    tensors = tensors_of(FOLDERS / folder)
    read, weights = READERS[mistake](tensors), open_weights(FOLDERS / folder)
    notes, misread = checked(weights, read)
    assert notes == []
    assert misread is not None
    assert [*misread.mistakes] == [mistake]
    facts = (weights.path, f"{len(read)} of {len(read)}", f"and {len(read) - 3} more are read", mistake, "mend")
    assert_tells(misread.sentence, *facts)
    assert "give the file" not in misread.sentence


def checked(weights: Weights, arrays: Mapping[str, np.ndarray]) -> tuple[list[str], Misread | None]:
    hashes = {name: digest(array) for name, array in arrays.items()}
    return check_weights(weights, hashes, source="mine", dtype="float32")


FIRST_UP = UP.replace("layers.1", "layers.0")
EMBEDDING = "model.embed_tokens.weight"


def test_quantised_matrices_alone_with_other_numbers_make_the_reader_the_suspect():
    weights = open_weights(FOLDERS / "awq-gemm")
    wrong, embedding = {FIRST_UP: 1.01 * weights.array("layers.0.up_proj")}, weights.array("embed_tokens")
    notes, misread = checked(weights, wrong | {EMBEDDING: embedding})
    assert (notes, misread is not None and misread.mistakes) == ([], {})
    assert misread is not None
    assert_tells(misread.sentence, "1 of 2", f"{FIRST_UP} has other", "only quantised", "suspect")
    with refuses(GuardFailed, expected=weights.path, got=f"{FIRST_UP}, {EMBEDDING} have other"):
        checked(weights, wrong | {EMBEDDING: 1.01 * embedding, "model.norm.weight": weights.array("final_norm")})


def test_one_named_mistake_proves_the_folder_though_another_matrix_has_unknown_numbers():
    read = READERS["awq-plain-order"](tensors_of(FOLDERS / "awq-gemm"))
    _, misread = checked(open_weights(FOLDERS / "awq-gemm"), read | {FIRST_UP: 1.01 * read[FIRST_UP]})
    assert misread is not None
    assert_tells(misread.sentence, "awq-plain-order", f"{FIRST_UP} has other", "mend the reader")
    assert not misread.mistakes


def test_weights_of_a_quantised_folder_that_no_known_mistake_reads_get_no_name():
    weights = open_weights(FOLDERS / "awq-gemm")
    with refuses(GuardFailed, expected=weights.path, got="other numbers", where="mine: weights") as caught:
        checked(weights, {FIRST_UP: 1.01 * weights.array("layers.0.up_proj")})
    assert not any(mistake.name in str(caught.value) for mistake in QUANTISED_FOLDERS)

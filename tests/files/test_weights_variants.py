"""Variants of open weights: other numerics, packed matrices, another dtype; what they hand out and what they keep."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tiny_models import GGUF_METADATA, gguf_tensors, random_tensors, write_file, write_folder

from llorch.errors import FormatError
from llorch.files import Weights, open_weights
from llorch.files.matrix import Matrix
from llorch.numerics import EXACT, GGML, Numerics
from llorch.verify.quantised_models import write_model

MATRIX = "layers.1.q_proj"  # with rows in pairs in the file
IDS = np.array([3, 90, 3])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("Q8_0", tmp_path_factory.mktemp("model"))


@pytest.fixture
def weights(path: Path) -> Weights:
    return open_weights(path)


def folder_of(dtype: type, tmp_path: Path) -> Weights:
    tensors = {name: array.astype(dtype) for name, array in random_tensors("llama").items()}
    return open_weights(write_folder(tmp_path, tensors))


def test_a_variant_keeps_what_is_not_named(weights: Weights):
    both = weights.using(GGML, packed=True)
    assert both.using(EXACT).packed
    assert both.using(packed=False).numerics == GGML
    assert (both.using().numerics, both.using().packed) == (GGML, True)
    assert (weights.numerics, weights.packed) == (EXACT, False)


def test_a_matrix_is_made_once_and_anew_for_another_variant(weights: Weights):
    rounding = weights.using(GGML)
    first = rounding[MATRIX]
    assert rounding[MATRIX] is first
    assert first.activations == "Q8_0"
    assert rounding.using(EXACT, packed=True)[MATRIX].activations == "F32"
    assert isinstance(rounding.using(EXACT)[MATRIX], np.ndarray)
    assert rounding["embed_tokens"].rows(IDS).dtype == np.float32
    assert rounding.astype(np.float64)["embed_tokens"].rows(IDS).dtype == np.float64


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_an_array_is_the_same_in_every_variant_and_has_its_dtype(weights: Weights, packed: bool):
    variant = weights.using(GGML, packed=packed)
    for name in (MATRIX, "embed_tokens", "final_norm"):
        np.testing.assert_array_equal(variant.array(name), weights[name], strict=True)
        for _ in range(2):
            wide = variant.astype(np.float64).array(name)
            np.testing.assert_array_equal(wide, weights[name].astype(np.float64), strict=True)
    np.testing.assert_array_equal(variant[MATRIX].dequantize(), weights[MATRIX], strict=True)


def test_what_is_decoded_lies_in_memory_once_for_all_variants(weights: Weights):
    array = weights.using(GGML).array(MATRIX)
    assert weights.array(MATRIX) is array
    assert weights.using(GGML)[MATRIX].dequantize() is array
    assert weights.using(GGML).astype(np.float64)[MATRIX].dequantize() is array


def test_a_packed_matrix_is_decoded_anew_and_all_else_is_kept(weights: Weights):
    packed = weights.using(packed=True)
    assert packed[MATRIX].dequantize() is not packed[MATRIX].dequantize()
    assert packed.array(MATRIX) is not packed.array(MATRIX)
    assert packed["final_norm"] is packed["final_norm"]


@pytest.mark.parametrize(("dtype", "numerics"), [(np.float32, GGML), (np.float32, EXACT), (np.float64, EXACT)])
def test_matrices_of_float32_and_float64_are_never_packed(tmp_path: Path, dtype: type, numerics: Numerics):
    variant = folder_of(dtype, tmp_path).using(numerics, packed=True)
    assert variant.packed
    assert all(isinstance(array, np.ndarray) for array in variant.values())


def test_vectors_of_float16_are_arrays_whatever_the_variant(tmp_path: Path):
    variant = folder_of(np.float16, tmp_path).using(GGML, packed=True)
    kinds = {len(variant.shape(name)): type(variant[name]) for name in variant}
    assert kinds == {1: np.ndarray, 2: Matrix}


def tied(tmp_path: Path, embedding: np.ndarray, output: np.ndarray) -> Weights:
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    return open_weights(write_folder(tmp_path, random_tensors("llama") | both, tie_word_embeddings=True))


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_a_tied_matrix_that_differs_is_found_in_every_variant(tmp_path: Path, packed: bool):
    embedding = random_tensors("llama")["model.embed_tokens.weight"].astype(np.float16)
    other = embedding.copy()
    other[-1, -1] += 1
    tied(tmp_path, embedding, embedding.copy()).using(GGML, packed=packed)["embed_tokens"]
    with pytest.raises(FormatError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but their numbers"):
        tied(tmp_path, embedding, other).using(GGML, packed=packed)["embed_tokens"]


def test_tied_tensors_are_compared_as_numbers_and_not_as_bytes(tmp_path: Path):
    half = random_tensors("llama")["model.embed_tokens.weight"].astype(np.float16)
    assert np.array_equal(tied(tmp_path, half, half.astype(np.float32))["embed_tokens"], half)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file) | {"lm_head.weight": half}
    safetensors.numpy.save_file(tensors, file)
    content = file.read_bytes()
    start = content.index(b'"lm_head.weight"')
    # The same bytes, said to be bfloat16: one more letter, one space less of padding.
    header = content[start:].replace(b'"F16"', b'"BF16"', 1)
    size = int.from_bytes(content[:8], "little")
    assert content[size + 7 : size + 8] == b" ", "the header has room"
    file.write_bytes(content[:start] + header[: 8 + size - start] + content[8 + size :])
    with pytest.raises(FormatError, match="but their numbers differ"):
        open_weights(tmp_path)["embed_tokens"]


def test_a_vector_that_llama_cpp_would_abort_at_has_no_ggml_numerics(tmp_path: Path):
    tensors = gguf_tensors()
    tensors["blk.1.ffn_norm.weight"] = tensors["blk.1.ffn_norm.weight"].astype(np.float16)
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    with pytest.raises(
        FormatError, match=r"Unsupported: blk.1.ffn_norm.weight is F16, but llama.cpp takes vectors in F32"
    ):
        weights.using(GGML)
    assert weights.using(packed=True).array("layers.1.ffn_norm").dtype == np.float32

"""GGUF files of quantised folders: matrices that stay packed have the numbers of the folder, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES

from llorch.files import open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import gguf_size
from llorch.files.export_blocks import find_blocks
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import interleave, inventory
from llorch.model.cache import KVCache
from llorch.model.forward import forward
from llorch.runtime.builtin import builtin_path

IDS = np.array([1, 5, 9, 2, 17, 11, 3])
EXPECTED = {
    "gptq-2bit-asym": {"Q4_0"}, "gptq-3bit": {"Q4_0"}, "gptq-4bit-channel": {"Q4_0"}, "gptq-4bit-asym": {"Q5_0"},
    "awq-gemm": {"Q5_0"}, "ct-w8a8": {"Q8_0"}, "ct-mxfp4": {"MXFP4"}, "mlx-4bit": {"Q4_1"}, "mlx-5bit": {"Q5_1"},
    "ct-mixed": {"Q4_0"}, "bnb-nf4": set(), "ct-fp8-block": set(), "gptq-4bit-act-order": set(),
}  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of float32; a zero without its sign, since MXFP4 of ggml has one zero."""
    return (array.astype(np.float32) + np.float32(0)).view(np.uint32)


def tensors_by_gguf(path: Path) -> Mapping[str, tuple[str, np.ndarray]]:
    """Type and numbers of every tensor, read and decoded by the gguf package."""
    tensors = gguf.GGUFReader(path).tensors
    return {one.name: (one.tensor_type.name, gguf.dequantize(one.data, one.tensor_type)) for one in tensors}


@pytest.mark.parametrize("name", NAMES)
def test_gguf_of_quantised_folder_has_the_numbers_of_the_folder_in_the_gguf_package(name: str, tmp_path: Path):
    done = convert(FOLDERS / name, tmp_path / "m.gguf")
    weights, made = open_weights(FOLDERS / name), tensors_by_gguf(tmp_path / "m.gguf")
    for weight in inventory(weights.config).values():
        kind, numbers = made[weight.gguf]
        wanted = weights.array(weight.name)
        wanted = interleave(wanted, weight.interleaved_heads) if weight.interleaved_heads else wanted
        assert kind == done.kept.get(weight.name, "F32")
        assert np.array_equal(bits(numbers), bits(wanted)), weight.name
    assert done.kept.keys().isdisjoint(done.decoded)


@pytest.mark.parametrize("name", EXPECTED)
def test_gguf_of_quantised_folder_keeps_every_matrix_that_a_type_of_ggml_holds(name: str, tmp_path: Path):
    done = convert(FOLDERS / name, tmp_path / "m.gguf")
    assert {*done.kept.values()} == EXPECTED[name]
    assert bool(done.decoded) == (name == "ct-mixed" or not EXPECTED[name])
    one, other = open_weights(FOLDERS / name).astype(np.float64), open_weights(tmp_path / "m.gguf").astype(np.float64)
    logits = [forward(IDS, weights, KVCache(weights.config, weights.dtype)) for weights in (one, other)]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6, atol=1e-6)  # epsilon is a float32 in GGUF files


def test_gguf_of_quantised_folder_has_the_predicted_size_and_the_type_of_most_numbers(tmp_path: Path):
    done = convert(FOLDERS / "gptq-4bit", tmp_path / "m.gguf")
    weights = open_weights(FOLDERS / "gptq-4bit")
    with open_gguf(tmp_path / "m.gguf") as file:
        stored = sum(info.n_bytes for info in file.tensors.values())
        assert file.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert stored == gguf_size(weights.config, GGMLType.F32, find_blocks(weights).kept)
    assert done.ggml_type is GGMLType.Q4_0
    assert stored < 0.3 * gguf_size(weights.config, GGMLType.F32)


def test_gguf_of_quantised_folder_with_a_type_asked_for_has_that_type_alone(tmp_path: Path):
    done = convert(FOLDERS / "gptq-4bit", tmp_path / "m.gguf", ggml_type=GGMLType.F16)
    assert (done.kept, done.decoded, done.ggml_type) == ({}, {}, GGMLType.F16)
    assert {kind for kind, _ in tensors_by_gguf(tmp_path / "m.gguf").values()} == {"F16", "F32"}


def test_find_blocks_of_a_file_that_is_no_quantised_folder_is_empty(tmp_path: Path):
    for path in (builtin_path("micro-llama"), convert(FOLDERS / "mlx-4bit", tmp_path / "m.gguf").target):
        found = find_blocks(open_weights(path))
        assert (found.kept, found.decoded) == ({}, {})

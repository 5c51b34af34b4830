"""Files that other tools write and that both engines read: models in several parts, other names, shapes and values."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders.gguf_bytes import ARRAY, I32, STRING, U32, array, entry, gguf, row, string, u32
from builders.tiny_models import GGUF_METADATA, finish, gguf_tensors, random_tensors, write_file, write_folder
from gguf import GGUFWriter
from helpers.refusals import refuses

from llorch.files import Weights, open_weights
from llorch.files.folder import SafetensorsFolder
from llorch.files.gguf import GGUFFile, open_gguf


def same(a: Weights, b: Weights) -> bool:
    return a.config == b.config and all(np.array_equal(a.array(name), b.array(name)) for name in a)


@pytest.fixture
def expected_weights(tmp_path: Path) -> Weights:
    return open_weights(write_file(tmp_path / "whole.gguf", gguf_tensors(), GGUF_METADATA))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three files, as gguf-py writes it."""
    writer = GGUFWriter(tmp_path / "parts.gguf", "llama", split_max_tensors=9)
    for key, value in GGUF_METADATA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)  # type: ignore[arg-type]
    finish(writer, gguf_tensors())
    return sorted(tmp_path.glob("parts-*.gguf"))


def test_a_model_in_parts_opens_from_any_of_them(expected_weights: Weights, parts: list[Path]):
    assert [path.name for path in parts] == [f"parts-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in parts:
        weights = open_weights(path)
        assert same(weights, expected_weights)
        assert len(weights.source.fingerprint) == 3
        weights.source.close()
        with pytest.raises(ValueError, match="closed"):
            weights.source.array("output.weight")


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("value", [[], [1], [1, 2], "1"])
def test_a_count_of_parts_of_another_type_is_refused_by_its_key(key: str, value: object, tmp_path: Path):
    for number in range(2):
        split: dict[str, object] = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        if number == (key != "split.tensors.count"):
            split[key] = np.array(value, np.int32) if isinstance(value, list) else value
        entries = [written(name, one) for name, one in split.items()]
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        path.write_bytes(gguf(entries, [row(b"%d" % number, [1])], b"\0" * 4))
    with refuses(ValueError, key):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def written(key: str, value: object) -> bytes:
    """An entry of a GGUF file with a number, a text or numbers."""
    if isinstance(value, int):
        return entry(key.encode(), U32, u32(value))
    if isinstance(value, str):
        return entry(key.encode(), STRING, string(value.encode()))
    assert isinstance(value, np.ndarray)
    return entry(key.encode(), ARRAY, array(I32, len(value), value.tobytes()))


def test_parts_that_are_missing_renamed_or_of_another_model_are_refused(parts: list[Path]):
    renamed = parts[1].rename(parts[1].with_name("b.gguf"))
    with refuses("Missing", "3 parts", parts[1].name, where=parts[0]):
        open_gguf(parts[0])
    with refuses("Inconsistent", "part 2 of 3", "-00002-of-00003.gguf", "got b.gguf", where=renamed):
        open_gguf(renamed)
    renamed.rename(parts[1])
    parts[1].write_bytes(parts[2].read_bytes())
    with refuses("Inconsistent", "split.no", expected=(1, 3), got=(2, 3), where=parts[1]):
        open_gguf(parts[0])


def test_a_part_that_has_a_tensor_of_another_or_too_few_is_refused(tmp_path: Path):
    tensors = gguf_tensors()
    halves = [dict(list(tensors.items())[:10]), dict(list(tensors.items())[9:])]
    for number, half in enumerate(halves):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        write_file(tmp_path / f"m-0000{number + 1}-of-00002.gguf", half, GGUF_METADATA | split)
    with refuses("Duplicate", "two parts", where="m-00002-of-00002.gguf"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")
    del halves[1][next(iter(halves[1]))], halves[1][next(iter(halves[1]))]
    split = {"split.no": 1, "split.count": 2, "split.tensors.count": len(tensors)}
    write_file(tmp_path / "m-00002-of-00002.gguf", halves[1], GGUF_METADATA | split)
    with refuses("Inconsistent", "split.tensors.count", expected=len(tensors), got=len(tensors) - 1):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(("number", "count"), [(3, 3), (0, 1 << 20)])
def test_numbers_of_parts_without_meaning_are_refused(tmp_path: Path, number: int, count: int):
    path = write_file(tmp_path / "m.gguf", gguf_tensors(), {"split.no": number, "split.count": count})
    with refuses("OutOfRange", "split.no, split.count", got=(number, count), where=path):
        open_gguf(path)


def test_norms_with_axes_of_length_one_are_read(tmp_path: Path, expected_weights: Weights):
    tensors = {name: array[None, None] if array.ndim == 1 else array for name, array in gguf_tensors().items()}
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert weights.source.tensors["output_norm.weight"].shape[:2] == (1, 1)
    assert same(weights, expected_weights)


def test_text_that_is_not_utf8_matters_only_where_it_is_needed(tmp_path: Path):
    path = write_file(tmp_path / "m.gguf", gguf_tensors(), GGUF_METADATA | {"general.author": "Ren?"})
    path.write_bytes(path.read_bytes().replace(b"Ren?", b"Ren\xe9"))
    weights = open_weights(path)
    assert isinstance(weights.source, GGUFFile)
    assert weights.source.metadata["general.author"] == b"Ren\xe9"
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llam\xff"))
    with refuses("Malformed", "general.architecture", expected="string", got="llam\\xff"):
        open_weights(path)


def test_a_folder_of_the_base_model_alone_has_names_without_model(tmp_path: Path):
    tensors = random_tensors("llama")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    full = open_weights(write_folder(tmp_path / "full", tensors, tie_word_embeddings=True))
    assert same(open_weights(write_folder(tmp_path / "bare", bare, tie_word_embeddings=True)), full)


def test_a_tied_folder_may_store_the_output_matrix_alone(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    full = open_weights(write_folder(tmp_path / "full", tensors, tie_word_embeddings=True))
    del tensors["model.embed_tokens.weight"]
    assert same(open_weights(write_folder(tmp_path / "alone", tensors, tie_word_embeddings=True)), full)


def test_one_file_beside_an_index_is_the_model_unless_the_shards_are_there(tmp_path: Path):
    folder = write_folder(tmp_path / "m", random_tensors("llama"))
    index = '{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert open_weights(folder).config.n_layers == 2
    safetensors.numpy.save_file({"model.norm.weight": np.ones(3)}, folder / "model-00001-of-00001.safetensors")
    with refuses("Inconsistent", "one model", "model.safetensors", "model.safetensors.index.json", where=folder):
        open_weights(folder)


def test_a_folder_that_holds_a_gguf_file_is_refused_with_the_path_of_that_file(tmp_path: Path):
    path = write_file(tmp_path / "m.gguf", gguf_tensors(), GGUF_METADATA)
    with refuses("Missing", "config.json", path, where=tmp_path):
        open_weights(tmp_path)
    with refuses("Missing", "model.safetensors", path, where=tmp_path):
        SafetensorsFolder(tmp_path)

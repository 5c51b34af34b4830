import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders.safetensors_bytes import safetensors_bytes, tensor
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.files import SafetensorsFolder, open_safetensors
from llorch.files.safetensors import tensor_bytes, tensors_from

ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
ONE_AND_TWO = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
TWO = {"b": np.array([0.5, -2.0], np.float16), "c": np.array([[1.0], [2.5]])}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    safetensors.numpy.save_file(ONE, tmp_path / "model-1.safetensors")
    safetensors.numpy.save_file(TWO, tmp_path / "model-2.safetensors")
    write_index(tmp_path, ONE_AND_TWO)
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_files_of_the_safetensors_package_read_back(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ONE | TWO, path, metadata={"format": "np"})
    with open_safetensors(path) as file:
        assert file.metadata == {"format": "np"}
        for name, values in (ONE | TWO).items():
            actual = file.array(name)
            assert actual.dtype == np.float32
            assert np.array_equal(actual, values.astype(np.float32))


def test_float32_tensors_are_read_only_views_of_the_map(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ONE, path)
    with open_safetensors(path) as file:
        values = file.array("a")
        assert np.shares_memory(values, file.raw("a"))
    assert not values.flags.writeable
    assert values[1, 2] == 5


EMPTY = json.dumps({"a": tensor(shape=[0, 3], offsets=[0, 0])}).encode()
UNUSUAL = {  # header, data, and what is read
    "an odd address": ({"byte": tensor("U8", [1], [0, 1]), "a": tensor("F32", [2], [1, 9])},
                       b"\0" + np.array([1.5, -2], "<f4").tobytes(), np.array([1.5, -2], np.float32)),
    "bfloat16": ({"a": tensor("BF16", [3], [0, 6])}, np.array([0x3F80, 0xBE20, 0x0001], "<u2").tobytes(),
                 np.array([1, -0.15625, 2.0**-133], np.float32)),  # the smallest subnormal
    "spaces around the header": (b"   " + EMPTY + b"   ", b"", np.zeros((0, 3), np.float32)),
    "white space around the header": (b"\n\t" + EMPTY + b"\n\t", b"", np.zeros((0, 3), np.float32)),
}  # fmt: skip


@pytest.mark.parametrize(("header", "data", "expected"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors_are_read_exactly_at_even_addresses(
    tmp_path: Path, header: object, data: bytes, expected: np.ndarray
):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(header, data))
    with open_safetensors(path) as file:
        np.testing.assert_array_equal(file.array("a"), expected, strict=True)
        assert file.array("a").flags.aligned


def test_an_unknown_tensor_is_missing(sharded: Path):
    with open_safetensors(sharded / "model-1.safetensors") as file, refuses("Missing", "'x'"):
        file.array("x")
    with SafetensorsFolder(sharded) as folder, refuses("Missing", "'x'", where=sharded):
        folder.array("x")


def test_the_shards_of_an_index_are_one_set_of_tensors(sharded: Path):
    with SafetensorsFolder(sharded) as folder:
        assert folder.tensors.keys() == {"a", "b", "c"}
        assert folder.array("b").tolist() == [0.5, -2.0]
        assert folder.array("a").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("place", ["models--x/blobs", "blobs/12"], ids=["of the repository", "that several share"])
def test_the_links_of_a_download_cache_to_its_blobs_are_followed(tmp_path: Path, place: str):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / place
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True)
    safetensors.numpy.save_file(ONE, blobs / "1234")
    (snapshot / "model.safetensors").symlink_to(blobs / "1234")
    with SafetensorsFolder(snapshot) as folder:
        assert folder.tensors.keys() == {"a"}


def with_link_out(sharded: Path) -> SafetensorsFolder:
    folder = sharded / "inner"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(sharded / "model-1.safetensors")
    return SafetensorsFolder(folder)


def with_one_name_twice(sharded: Path) -> SafetensorsFolder:
    safetensors.numpy.save_file(TWO | ONE, sharded / "model-2.safetensors")
    return SafetensorsFolder(sharded)


def without_weights(sharded: Path, *names: str) -> SafetensorsFolder:
    folder = sharded / "other"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"\x80\x04N.")
    return SafetensorsFolder(folder)


FOLDERS = [
    row("a link elsewhere", with_link_out, "Unsafe", "link", "copy", "model.safetensors", where="inner"),
    row("one name in two shards", with_one_name_twice, "Duplicate", "'a'", "two shards"),
    row("no weights", without_weights, "Missing", "model.safetensors", "model.safetensors.index.json", where="other"),
    row("a pickle", lambda sharded: without_weights(sharded, "pytorch_model.bin"), "Unsafe", "pickle",
        where="pytorch_model.bin"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", FOLDERS)
def test_a_folder_that_is_no_model_is_refused(sharded: Path, refusal: Refusal):
    refusal.check(sharded)


@pytest.mark.parametrize(
    ("weight_map", "code", "facts"),
    [
        *(({"a": name}, "Unsafe", (f"got {name!r}",)) for name in ("../x.safetensors", "/x", "a\\b", "")),
        ({"a": "model-9.safetensors"}, "Missing", ("model-9.safetensors",)),
        (ONE_AND_TWO | {"b": "model-1.safetensors"}, "Missing", ("1 tensors", "index", ": b")),
        *((weight_map, "Malformed", ("weight_map",)) for weight_map in (None, ["a"], {"a": 1})),
    ],
)
def test_an_index_that_does_not_fit_the_shards_is_refused(
    sharded: Path, weight_map: object, code: str, facts: tuple[str, ...]
):
    write_index(sharded, weight_map)
    with refuses(code, *facts):
        SafetensorsFolder(sharded)


def test_tensors_that_the_index_does_not_list_are_refused_unless_they_are_ignored(
    sharded: Path, caplog: pytest.LogCaptureFixture
):
    write_index(sharded, {name: ONE_AND_TWO[name] for name in ("a", "b")})
    with SafetensorsFolder(sharded) as folder:
        with refuses("Unexpected", "1 tensors", ": c", where="model.safetensors.index.json"):
            folder.require_listed({"a"})
        assert not caplog.messages
        folder.require_listed({"c"})
    (message,) = caplog.messages
    assert_tells(message, "model.safetensors.index.json", "1 tensors", "c")


WHERE = Path("snapshot.safetensors")


def file_of(header: object, data: bytes) -> np.ndarray:
    text = json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8)


def test_odd_sizes_before_wide_types_leave_all_tensors_aligned():
    tensors = {"a": np.arange(3, dtype=np.uint8), "b/c": np.arange(5, dtype=np.float64), "d": np.array(7)}
    found = tensors_from(np.frombuffer(b"".join(map(bytes, tensor_bytes(tensors))), np.uint8), WHERE)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
        assert found[name].flags.aligned


def test_views_and_transposed_arrays_are_written_by_value():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    data = np.frombuffer(b"".join(map(bytes, tensor_bytes({"t": array.T, "s": array[:, ::2]}))), np.uint8)
    found = tensors_from(data, WHERE)
    np.testing.assert_array_equal(found["t"], array.T, strict=True)
    np.testing.assert_array_equal(found["s"], array[:, ::2], strict=True)


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"1234"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, b"12345678"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, b"12345678"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, b"1234"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, b"1234"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, b"1234"),
        ({"dtype": "F32", "shape": [1]}, b"1234"),
        ([], b""),
    ],
)
def test_a_tensor_that_does_not_fit_the_file_is_refused(entry: object, data: bytes):
    with refuses("Malformed", where=(WHERE, "x"), got=entry):
        tensors_from(file_of({"x": entry}, data), WHERE)


HEADERS = [
    row("a list", lambda: tensors_from(file_of([], b""), WHERE), "Malformed", "header", where=WHERE, got="list"),
    row("513 bytes of 9", lambda: tensors_from(np.frombuffer(b"\1\2" + bytes(7), np.uint8), WHERE), "Truncated",
        "513 bytes", "has 9", where=WHERE),
    row("0 bytes of 3", lambda: tensors_from(np.zeros(3, np.uint8), WHERE), "Truncated", "0 bytes", "has 3",
        where=WHERE),
]  # fmt: skip


@pytest.mark.parametrize("refusal", HEADERS)
def test_a_header_that_is_no_object_or_ends_outside_is_refused(refusal: Refusal):
    refusal.check()

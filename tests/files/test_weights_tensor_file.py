"""The safetensors files of snapshots: aligned, byte-stable, read strictly."""

import json
from pathlib import Path

import numpy as np
import pytest

from llorch.errors import FormatError
from llorch.files.tensor_file import tensor_bytes, tensors_from

WHERE = Path("snapshot.safetensors")


def file_of(header: object, data: bytes) -> np.ndarray:
    text = json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8)


def test_odd_sizes_before_wide_types_leave_all_tensors_aligned():
    tensors = {"a": np.arange(3, dtype=np.uint8), "b/c": np.arange(5, dtype=np.float64), "d": np.array(7)}
    data = np.frombuffer(b"".join(map(bytes, tensor_bytes(tensors))), np.uint8)
    found = tensors_from(data, WHERE)
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
    with pytest.raises(FormatError, match="Malformed: x: expected a tensor inside the file, got"):
        tensors_from(file_of({"x": entry}, data), WHERE)


def test_a_header_that_is_no_object_or_ends_outside_is_refused():
    with pytest.raises(FormatError, match="Malformed: the header must be an object, got list"):
        tensors_from(file_of([], b""), WHERE)
    with pytest.raises(FormatError, match="Truncated: the header claims 513 bytes, the file has 9"):
        tensors_from(np.frombuffer(b"\1\2" + bytes(7), np.uint8), WHERE)
    with pytest.raises(FormatError, match="Truncated: the header claims 0 bytes, the file has 3"):
        tensors_from(np.zeros(3, np.uint8), WHERE)

"""Table 2c of the reliability page: each row is a file, the code it is refused with, and a second at most."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders.safetensors_bytes import safetensors_bytes, tensor
from helpers.refusals import refuses
from helpers.work_limit import work_limit

from llorch.files import open_safetensors
from llorch.files.strict_json import parse_json, read_json
from llorch.runtime.errors import FormatError

EIGHT = bytes(8)
SOUND = json.dumps({"a": tensor()}).encode()


def single_tensor(data: bytes = EIGHT, **fields: object) -> bytes:
    return safetensors_bytes({"a": tensor(**fields)}, data)


def tensor_named(name: str) -> bytes:
    return safetensors_bytes({name: tensor()}, EIGHT)


def two_tensors(first: tuple[int, int], second: tuple[int, int], size: int) -> bytes:
    header = {"a": tensor("U8", [first[1] - first[0]], first), "b": tensor("U8", [second[1] - second[0]], second)}
    return safetensors_bytes(header, bytes(size))


def two_keys(first: str, second: str) -> bytes:
    return f"{{{first},{second}}}".encode()


TENSOR = json.dumps(tensor())

EXPECTED: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {  # large files are made where they are used
    "7 bytes": ("Truncated", bytes(7)),
    "header over 100 MB": ("TooLarge", safetensors_bytes(b"{}", length=100_000_001)),
    "header length 2^63": ("TooLarge", safetensors_bytes(b"{}", length=2**63)),
    "header past the end": ("Truncated", safetensors_bytes(b"{}", length=3)),
    "header not UTF-8": ("Malformed", safetensors_bytes(b'{"\xff": 1}')),
    "header in UTF-16": ("Malformed", safetensors_bytes("{}".encode("utf-16"))),
    "bad JSON": ("Malformed", safetensors_bytes(b"{")),
    "list header": ("Malformed", safetensors_bytes([])),
    "NUL padding": ("Malformed", safetensors_bytes(SOUND + b"\0", EIGHT)),
    "metadata value not a string": ("Malformed", safetensors_bytes({"__metadata__": {"a": 1}})),
    "metadata not an object": ("Malformed", safetensors_bytes({"__metadata__": "a"})),
    "duplicate __metadata__": ("Malformed", safetensors_bytes(two_keys('"__metadata__":{}', '"__metadata__":{}'))),
    "duplicate inner field": (
        "Malformed",
        safetensors_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    ),
    "duplicate tensor name": ("Malformed", safetensors_bytes(two_keys(f'"a":{TENSOR}', f'"a":{TENSOR}'), EIGHT)),
    "overlap": ("Malformed", two_tensors((0, 8), (4, 12), 12)),
    "shared range": ("Malformed", two_tensors((0, 8), (0, 8), 8)),
    "hole": ("Malformed", two_tensors((0, 4), (8, 12), 12)),
    "first offset not 0": ("Malformed", single_tensor(bytes(12), offsets=[4, 12])),
    "end before begin": ("Malformed", single_tensor(offsets=[8, 0])),
    "negative offset": ("Malformed", single_tensor(offsets=[-8, 0])),
    "float offset": ("Malformed", single_tensor(offsets=[0, 8.0])),
    "bool offset": ("Malformed", single_tensor(offsets=[False, 8])),
    "offset 2^64": ("Malformed", single_tensor(offsets=[2**64, 2**64 + 8])),
    "three offsets": ("Malformed", single_tensor(offsets=[0, 4, 8])),
    "offsets not a list": ("Malformed", single_tensor(offsets="08")),
    "size is not shape times dtype": ("Malformed", single_tensor(shape=[3])),
    "shape overflows": ("TooLarge", single_tensor(shape=[2**40, 2**40])),
    "shape overflows beside a zero": ("TooLarge", single_tensor(b"", shape=[0, 2**40, 2**40], offsets=[0, 0])),
    "negative dimension": ("Malformed", single_tensor(shape=[-2])),
    "4,000 dimensions": ("Malformed", single_tensor(shape=[1] * 4000, offsets=[0, 4])),
    "unknown dtype": ("Unsupported", single_tensor(dtype="F31")),
    "lower-case dtype": ("Unsupported", single_tensor(dtype="f32")),
    "dtype not a string": ("Unsupported", single_tensor(dtype=["F32"])),
    "trailing data": ("Malformed", single_tensor(bytes(9))),
    "missing data": ("Truncated", single_tensor(bytes(7))),
    "JSON 10,000 deep": ("Malformed", safetensors_bytes(b"[" * 10_000 + b"]" * 10_000)),
    "JSON 100,000 deep": ("Malformed", safetensors_bytes(b'{"a":' + b"[" * 100_000)),
    "JSON 34 deep": ("Malformed", safetensors_bytes(b"[" * 34 + b"]" * 34)),
    "unknown inner field": ("Malformed", safetensors_bytes({"a": tensor() | {"x": 1}}, EIGHT)),
    "inner field absent": ("Malformed", safetensors_bytes({"a": {"dtype": "F32"}}, EIGHT)),
    "entry not an object": ("Malformed", safetensors_bytes({"a": 1})),
    "empty name": ("Malformed", tensor_named("")),
    "name with NUL": ("Malformed", tensor_named("a\0b")),
    "name ..": ("Malformed", tensor_named("..")),
    "70,000 tensors": (
        "TooLarge",
        lambda: safetensors_bytes({f"t{index}": tensor("U8", [0], [0, 0]) for index in range(70_000)}),
    ),
    "70,000 entries of something else": (
        "TooLarge",
        lambda: safetensors_bytes({f"t{index}": 1 for index in range(70_000)}),
    ),
    "two million numbers": ("TooLarge", lambda: safetensors_bytes(b"[" + b"1," * 2_000_000 + b"1]")),
    "NaN in the header": ("Malformed", safetensors_bytes(b'{"a": NaN}')),
    "Infinity in the header": ("Malformed", safetensors_bytes(b'{"a": -Infinity}')),
    "1e400 in the header": ("Malformed", safetensors_bytes(b'{"a": 1e400}')),
    "5,000-digit integer": ("Malformed", safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}")),
    "5,000-digit float": ("Malformed", safetensors_bytes(b'{"a": 0.' + b"9" * 5000 + b"}")),
    "lone surrogate": ("Malformed", safetensors_bytes(b'{"\\ud800": 1}')),
    "two million empty lists": ("TooLarge", lambda: safetensors_bytes(b"[" + b"[]," * 2_000_000 + b"[]]")),
}

MOST_LINES = 2_000_000  # of Python; the costliest file takes a third of it


@pytest.mark.nightly_cases("70,000 entries of something else", "70,000 tensors")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_file_is_refused_by_code_with_little_work(tmp_path: Path, name: str):
    code, data = EXPECTED[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data() if callable(data) else data)
    with work_limit(MOST_LINES), refuses(code, where=path) as caught:
        open_safetensors(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "size"), [("BOOL", 1), ("I32", 4), ("F8_E4M3", 1), ("C64", 8)])
def test_tensor_that_is_no_weight_is_refused_when_read(tmp_path: Path, dtype: str, size: int):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": tensor(dtype, [1], [0, size])}, b"\2" * size))
    with open_safetensors(path) as file, refuses("DType", where="a", got=dtype):
        file.array("a")


def test_a_file_cut_while_open_is_an_error_not_a_dead_process(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(single_tensor())
    with open_safetensors(path) as file:
        path.write_bytes(single_tensor()[:20])
        with refuses("Truncated", len(single_tensor()), 20, where=path):
            file.array("a")


def test_mutants_are_read_or_refused_with_format_error_only(tmp_path: Path):
    rng = np.random.default_rng(0)
    sound = safetensors_bytes({"__metadata__": {"k": "v"}, "a": tensor(), "b": tensor("F16", [2], [8, 12])}, bytes(12))
    accepted = 0
    for index in range(2000):
        data = bytearray(sound)
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(len(data)))
            data[place : place + int(rng.integers(2))] = rng.bytes(int(rng.integers(1, 4)))
        path = tmp_path / f"{index}.safetensors"
        path.write_bytes(data)
        try:
            with open_safetensors(path) as file:
                [file.array(name) for name in file.tensors]
            accepted += 1
        except FormatError:
            pass
        path.unlink()
    assert 0 < accepted < 2000


def test_json_of_32_levels_and_whole_surrogate_pairs_are_read():
    text = b"[" * 32 + b'"\\ud83d\\ude00"' + b"]" * 32
    value = parse_json(text, what="the text", path="x.json")
    for _ in range(32):
        assert isinstance(value, list)
        value = value[0]
    assert value == "\N{GRINNING FACE}"


def test_a_json_file_has_a_size_limit_and_holds_an_object(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1.5}')
    assert read_json(path, limit=10) == {"a": 1.5}
    with refuses("TooLarge", "9 bytes", where=path):
        read_json(path, limit=9)
    path.write_text("[1]")
    with refuses("Malformed", expected="object", got="list", where=path):
        read_json(path, limit=9)

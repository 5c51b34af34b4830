"""Dumps that are broken or mean harm: each is refused by its code in one line, at once and in little memory."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.work_limit import work_limit

from llorch.engines.dumps.index import open_raw
from llorch.runtime.errors import FormatError

Q = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
HEADER = '{"llorch_dump": 1}\n'
PASS = '{"pass": 0, "ids": [9, 4, 7], "first_position": 5}\n'


def entry(**fields: object) -> str:
    return json.dumps({"name": "q", "dtype": "f32", "shape": [3, 4], "file": "x.bin"} | fields) + "\n"


def header(**fields: object) -> str:
    return json.dumps({"llorch_dump": 1} | fields) + "\n" + entry()


# What index.jsonl holds; x.bin has 48 bytes.
EXPECTED: dict[str, tuple[str, str | bytes]] = {
    "nothing": ("Malformed", ""),
    "no header": ("Malformed", entry()),
    "half a header": ("Malformed", '{"llorch_'),
    "a header alone": ("Missing", HEADER),
    "version 2": ("Unsupported", header(llorch_dump=2)),
    "version true": ("Malformed", header(llorch_dump=True)),
    "engine is a number": ("Malformed", header(engine=1)),
    "dtype of the engine unknown": ("Unsupported", header(dtype="int4")),
    "dtype of the engine an integer": ("Unsupported", header(dtype="int32")),
    "int8 activations": ("Unsupported", header(dtype="int8-row")),
    "cache of an unknown integer": ("Unsupported", header(kv_cache="int4")),
    "cache unknown": ("Unsupported", header(kv_cache="q8_0")),
    "activations unknown": ("Unsupported", header(activations="Q5_K")),
    "flash attention is a word": ("Malformed", header(flash_attention="no")),
    "weights is a list": ("Malformed", header(weights=["a"])),
    "hash cut": ("Malformed", header(weights={"a": "0" * 63})),
    "hash is a number": ("Malformed", header(weights={"a": 1})),
    "unknown key of the header": ("Unexpected", header(flash_atention=True)),
    "unknown key of a pass": ("Unexpected", HEADER + '{"pass": 0, "ids": [1], "first": 0}\n'),
    "unknown key of an array": ("Unexpected", HEADER + entry(stride=[16, 4])),
    "a list": ("Malformed", HEADER + "[1]\n"),
    "bad JSON": ("Malformed", HEADER + "{\n" + entry()),
    "NaN": ("Malformed", HEADER + '{"name": NaN}\n'),
    "key twice": ("Malformed", HEADER + '{"name": "a", "name": "b"}\n'),
    "deep": ("Malformed", HEADER + "[" * 100_000 + "\n"),
    "not UTF-8": ("Malformed", HEADER.encode() + b'{"name": "\xff"}\n'),
    "UTF-16": ("Malformed", (HEADER + entry()).encode("utf-16")),
    "half a surrogate pair": ("Malformed", HEADER + '{"name": "\\ud800"}\n'),
    "NUL bytes": ("Malformed", HEADER + "\0" * 80 + "\n"),
    "many lines": ("TooLarge", HEADER + "\n" * 1_000_000),
    "many items": ("TooLarge", HEADER + '{"ids": [' + "1," * 2_000_000 + "1]}\n"),
    "33 MB": ("TooLarge", HEADER + " " * (33 << 20)),
    "pass 1 first": ("Malformed", HEADER + '{"pass": 1, "ids": [1]}\n'),
    "pass 0 twice": ("Malformed", HEADER + PASS + PASS),
    "pass without ids": ("Malformed", HEADER + '{"pass": 0}\n'),
    "pass of no token": ("Malformed", HEADER + '{"pass": 0, "ids": []}\n'),
    "negative id": ("Malformed", HEADER + '{"pass": 0, "ids": [-1]}\n'),
    "id 2^31": ("Malformed", HEADER + '{"pass": 0, "ids": [2147483648]}\n'),
    "id is a bool": ("Malformed", HEADER + '{"pass": 0, "ids": [true]}\n'),
    "negative position": ("OutOfRange", HEADER + '{"pass": 0, "ids": [1], "first_position": -1}\n'),
    "array of no pass": ("Missing", HEADER + PASS + entry(**{"pass": 1})),
    "array of a pass, none begun": ("Missing", HEADER + entry(**{"pass": 1})),
    "no dtype": ("Missing", HEADER + entry(dtype=None)),
    "dtype unknown": ("DType", HEADER + entry(dtype="f31")),
    "dtype big-endian": ("DType", HEADER + entry(dtype=">f4")),
    "dtype bool": ("DType", HEADER + entry(dtype="bool")),
    "dtype of objects": ("DType", HEADER + entry(dtype="O")),
    "dtype not a word": ("Malformed", HEADER + entry(dtype=4)),
    "shape not a list": ("Malformed", HEADER + entry(shape="3x4")),
    "shape negative": ("Malformed", HEADER + entry(shape=[-3, -4])),
    "shape of bools": ("Malformed", HEADER + entry(shape=[True])),
    "shape of floats": ("Malformed", HEADER + entry(shape=[3.0, 4])),
    "size 0": ("Malformed", HEADER + entry(shape=[0, 2**62])),
    "nine axes": ("Malformed", HEADER + entry(shape=[1] * 9)),
    "shape overflows": ("TooLarge", HEADER + entry(shape=[2**40, 2**40])),
    "larger than the file": ("Truncated", HEADER + entry(shape=[3, 5])),
    "larger than any file": ("Truncated", HEADER + entry(shape=[2**58])),
    "offset past the end": ("Truncated", HEADER + entry(offset=4)),
    "offset 2^64 - 48": ("Truncated", HEADER + entry(offset=2**64 - 48)),
    "negative offset": ("OutOfRange", HEADER + entry(offset=-4)),
    "offset is a float": ("Malformed", HEADER + entry(offset=4.0)),
    "one stride": ("Malformed", HEADER + entry(strides=[4])),
    "negative stride": ("Malformed", HEADER + entry(strides=[-16, 4])),
    "stride 0": ("Malformed", HEADER + entry(shape=[2**50, 4], strides=[0, 4])),
    "stride below an element": ("Malformed", HEADER + entry(strides=[16, 2])),
    "rows that overlap": ("Malformed", HEADER + entry(strides=[12, 4])),
    "huge strides": ("Truncated", HEADER + entry(strides=[2**62, 4])),
    "strides past the end": ("Truncated", HEADER + entry(strides=[20, 4])),
    "file absolute": ("Unsafe", HEADER + entry(file="/etc/passwd")),
    "file above": ("Unsafe", HEADER + entry(file="../x.bin")),
    "file in a folder": ("Unsafe", HEADER + entry(file="a/x.bin")),
    "file of Windows": ("Unsafe", HEADER + entry(file="..\\x.bin")),
    "file with NUL": ("Unsafe", HEADER + entry(file="x.bin\0")),
    "file is dots": ("Unsafe", HEADER + entry(file="..")),
    "file is the folder": ("Unsupported", HEADER + entry(file=".")),
    "file is a pipe": ("Unsupported", HEADER + entry(file="pipe")),
    "file is a link out": ("Unsafe", HEADER + entry(file="link")),
    "file not there": ("Missing", HEADER + entry(file="y.bin")),
    "file of a name too long": ("Missing", HEADER + entry(file="y" * 5000)),
    "file is a number": ("Malformed", HEADER + entry(file=1)),
    "name empty": ("Malformed", HEADER + entry(name="")),
    "name with an escape": ("Malformed", HEADER + entry(name="\x1b[2J")),
    "name long": ("Malformed", HEADER + entry(name="q" * 201)),
    "name a number": ("Malformed", HEADER + entry(name=1)),
    "layer negative": ("OutOfRange", HEADER + entry(layer=-1)),
    "name twice": ("Duplicate", HEADER + PASS + entry(layer=0) + entry(layer=0)),
    "tokens past the pass": ("OutOfRange", HEADER + PASS + entry(tokens=[0, 1, 3])),
    "tokens twice": ("OutOfRange", HEADER + PASS + entry(tokens=[0, 1, 1])),
    "tokens more than rows": ("Inconsistent", HEADER + PASS + entry(tokens=[0, 1])),
    "tokens negative": ("Malformed", HEADER + PASS + entry(tokens=[-1])),
    "positions before the pass": ("OutOfRange", HEADER + PASS + entry(positions=[4, 5, 6])),
    "positions of no pass": ("Malformed", HEADER + entry(positions=[0, 1, 2])),
    "tokens and positions": ("Malformed", HEADER + PASS + entry(tokens=[0, 1, 2], positions=[5, 6, 7])),
    "axes fewer": ("Malformed", HEADER + entry(axes="seq")),
    "axes of numbers": ("Malformed", HEADER + entry(axes=[1, 2])),
    "axes a number": ("Malformed", HEADER + entry(axes=7)),
}  # fmt: skip


def read_error(path: Path) -> FormatError:
    """The error, which is one line, and took neither work nor memory."""
    tracemalloc.start()
    try:
        with work_limit(100_000), pytest.raises(FormatError) as caught:
            [array.read() for _, array in open_raw(path).arrays]
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith(str(path))
    assert len(text) < 500
    return caught.value


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_index_is_refused_by_code(tmp_path: Path, name: str):
    code, text = EXPECTED[name]
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "x.bin").write_bytes(Q.tobytes())
    (tmp_path / "outside").write_bytes(Q.tobytes())
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    (folder / "index.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = sorted(tmp_path.rglob("*"))
    assert read_error(folder).code == code
    assert sorted(tmp_path.rglob("*")) == before


def test_file_truncated_after_opening_is_an_error_on_read(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(Q.tobytes())
    (tmp_path / "index.jsonl").write_text(HEADER + entry())
    ((_, array),) = open_raw(tmp_path).arrays
    (tmp_path / "x.bin").write_bytes(Q.tobytes()[:-1])
    with refuses("Truncated", 48, 47, where=f"{tmp_path / 'x.bin'}:"):
        array.read()


def test_folder_without_a_dump_is_refused(tmp_path: Path):
    (tmp_path / "x.pt").write_bytes(b"PK")
    assert read_error(tmp_path).code == "Missing"
    with pytest.raises(FileNotFoundError):
        open_raw(tmp_path / "nowhere")

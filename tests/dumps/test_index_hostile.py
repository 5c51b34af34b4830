"""Dumps that are broken or mean harm: each is refused by its code in one line, at once and in little memory."""

import io
import json
import os
import struct
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llorch.dumps.index import open_raw
from llorch.dumps.writers.dump_writer import DumpWriter
from llorch.errors import FormatError

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


def refused(path: Path) -> FormatError:
    """The error, which is one line, and took neither time nor memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(FormatError) as caught:
            [array.read() for _, array in open_raw(path).arrays]
        assert time.process_time() - start < 3
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
    assert refused(folder).code == code
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_shrank_since_is_an_error_when_it_is_read(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(Q.tobytes())
    (tmp_path / "index.jsonl").write_text(HEADER + entry())
    ((_, array),) = open_raw(tmp_path).arrays
    (tmp_path / "x.bin").write_bytes(Q.tobytes()[:-1])
    with pytest.raises(FormatError, match=r"x\.bin: Truncated: an array ends at byte 48, the file at 47"):
        array.read()


def npy(array: object = Q) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def npz(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def lying(claimed: int) -> bytes:
    """A deflated member whose file says that it inflates to so many bytes, with a .npy header of that size."""
    head = npy(np.zeros(1, np.float32))[:-4].replace(b"(1,), }", f"({(claimed - 128) // 4},), }}".encode())
    head = head[:10] + head[10:].rstrip()[:117].ljust(117) + b"\n"
    real = npz(("q.npy", head + bytes(4000)), compression=zipfile.ZIP_DEFLATED)
    return real.replace(struct.pack("<I", len(head) + 4000), struct.pack("<I", claimed))


class Ran:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return sys.exit, ("unpickled",)


FILES: dict[str, tuple[str, str, bytes]] = {
    "npz of objects": ("DType", "x.npz", npz(("q.npy", npy(np.array([Ran()], object))))),
    "npy of objects": ("DType", "x.npy", npy(np.array([Ran()], object))),
    "npy of bools": ("DType", "x.npy", npy([True, False])),
    "npy of records": ("Malformed", "x.npy", npy(np.zeros(2, [("a", "<f4"), ("b", "<f4")]))),
    "npy big-endian": ("DType", "x.npy", npy(Q.astype(">f4"))),
    "npy of text": ("DType", "x.npy", npy(["a"])),
    "npy empty": ("Malformed", "x.npy", b""),
    "npy of another kind": ("Malformed", "x.npy", b"\x93NUMPX" + bytes(200)),
    "npy without a size": ("Malformed", "x.npy", npy().replace(b"(3, 4)", b"(3, x)")),
    "npy of size 0": ("Malformed", "x.npy", npy(np.zeros((0, 4), np.float32))),
    "npy cut": ("Malformed", "x.npy", npy()[:-1]),
    "npy with more behind": ("Malformed", "x.npy", npy() + b"x"),
    "npy of a huge header": ("Malformed", "x.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**31) + bytes(200)),
    "npy of a huge shape": ("TooLarge", "x.npy", npy().replace(b"(3, 4), }" + b" " * 20, b"(" + b"9" * 24 + b",), }")),
    "npz empty": ("Missing", "x.npz", npz()),
    "npz of text": ("Malformed", "x.npz", npz(("q.npy", b"hello"))),
    "npz is a pickle": ("Malformed", "x.npz", b"\x80\4K\1." * 100),
    "npz cut": ("Malformed", "x.npz", npz(("q.npy", npy()))[:-30]),
    "npz with a name twice": ("Duplicate", "x.npz", npz(("q.npy", npy()), ("q", npy()))),
    "npz with a bad name": ("Malformed", "x.npz", npz(("\x1b.npy", npy()))),
    "npz in LZMA": ("Unsupported", "x.npz", npz(("q.npy", npy()), compression=zipfile.ZIP_LZMA)),
    "npz of ids that are none": ("Malformed", "x.npz", npz(("q.npy", npy()), ("ids.npy", npy()))),
    "npz of two prompts": ("Malformed", "x.npz", npz(("q.npy", npy()), ("ids.npy", npy([[1, 2], [3, 4]])))),
    "npz of negative ids": ("OutOfRange", "x.npz", npz(("q.npy", npy()), ("ids.npy", npy([-1])))),
    "npz of ids alone": ("Missing", "x.npz", npz(("ids.npy", npy([1])))),
    "npz that claims 4 GB": ("TooLarge", "x.npz", lying(2**32 - 4)),
    "npz that claims a little more": ("Malformed", "x.npz", lying(8000)),
    "npz that claims less": ("Malformed", "x.npz", lying(2000)),
    "npz bomb": (
        "TooLarge", "x.npz", npz(("q.npy", npy(np.zeros(10**7, np.float32))), compression=zipfile.ZIP_DEFLATED),
    ),
    "npz with other bytes": ("Malformed", "x.npz", npz(("q.npy", npy()), compression=zipfile.ZIP_DEFLATED).replace(
        struct.pack("<I", zlib.crc32(npy())), bytes(4)
    )),
    "npz of a huge table": ("Malformed", "x.npz", npz(("q.npy", npy()))[:-22] + bytes(17 << 20) + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 17 << 20, 0, 0
    )),
    "safetensors of bools": ("DType", "x.safetensors", b""),
    "safetensors with ids that are none": ("Malformed", "x.safetensors", b'{"ids": ["1"]}'),
    "safetensors with no id": ("Malformed", "x.safetensors", b'{"ids": []}'),
    "safetensors with a half text": ("Malformed", "x.safetensors", b'{"ids"'),
    "another kind": ("Unsupported", "x.pt", b"PK"),
}  # fmt: skip


def safetensors(about: bytes) -> bytes:
    """One array; of bools where nothing is said of the run."""
    dtype, data = ("F32", Q.tobytes()) if about else ("BOOL", bytes(12))
    tensor = {"dtype": dtype, "shape": [3, 4], "data_offsets": [0, len(data)]}
    text = json.dumps({"q": tensor} | ({"__metadata__": {"llorch": about.decode()}} if about else {})).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_by_code(tmp_path: Path, name: str):
    code, file, data = FILES[name]
    path = tmp_path / file
    path.write_bytes(safetensors(data) if file.endswith("safetensors") else data)
    assert refused(path).code == code


def test_a_folder_that_is_no_dump_is_refused(tmp_path: Path):
    (tmp_path / "x.pt").write_bytes(b"PK")
    assert refused(tmp_path).code == "Missing"
    with pytest.raises(FileNotFoundError):
        open_raw(tmp_path / "nowhere")


def sound(folder: Path, style: str) -> Path:
    """A small dump in one style, and the file of it that is mutated."""
    if style == "index":
        with DumpWriter(folder, engine="mine") as writer:
            writer.begin([9, 4, 7])
            writer.add("q", Q, layer=0, tokens=[0, 2, 1])
            writer.add("k", Q.astype(np.float16))
        return folder / "index.jsonl"
    path = folder / f"x{style[style.index('.') :]}"
    {"stored": np.savez, "deflated": np.savez_compressed}.get(
        style.split(".")[0], lambda path, q, **_: np.save(path, q)
    )(path, q=Q, ids=np.array([9, 4, 7]))
    return path


@pytest.mark.parametrize("style", ["index", "stored.npz", "deflated.npz", "x.npy"])
def test_mutants_are_read_or_refused_with_format_error_only(tmp_path: Path, style: str):
    rng = np.random.default_rng(0)
    path = sound(tmp_path, style)
    data, accepted, messages = path.read_bytes(), 0, set()
    for index in range(1000):
        mutant = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(len(data)))
            mutant[place : place + int(rng.integers(3))] = rng.bytes(int(rng.integers(3)))
        path.write_bytes(mutant[: rng.integers(len(mutant))] if index % 5 == 0 else mutant)
        try:
            for _, array in open_raw(path.parent if style == "index" else path).arrays:
                assert array.read().shape == array.shape
            accepted += 1
        except FormatError as error:
            messages.add(str(error))
    assert 0 < accepted < 1000
    assert all(message.isprintable() for message in messages)

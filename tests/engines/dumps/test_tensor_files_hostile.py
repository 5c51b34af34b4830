"""Dumps in formats of others that are broken or mean harm, and mutants of every format."""

import io
import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.runtime.errors import FormatError
from tests.engines.dumps.test_index_hostile import Q, read_error


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


def wrong_size_member(n_declared: int) -> bytes:
    """A deflated member whose file says that it inflates to so many bytes, with a .npy header of that size."""
    head = npy(np.zeros(1, np.float32))[:-4].replace(b"(1,), }", f"({(n_declared - 128) // 4},), }}".encode())
    head = head[:10] + head[10:].rstrip()[:117].ljust(117) + b"\n"
    real = npz(("q.npy", head + bytes(4000)), compression=zipfile.ZIP_DEFLATED)
    return real.replace(struct.pack("<I", len(head) + 4000), struct.pack("<I", n_declared))


def wrong_offset_archive(data: bytes) -> bytes:
    """A .npz file of one array `q`, which its table has elsewhere."""
    return data[:-31] + struct.pack("<I", 9999) + data[-27:]


class MaliciousPickle:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return sys.exit, ("unpickled",)


FILES: dict[str, tuple[str, str, bytes]] = {
    "npz of objects": ("DType", "x.npz", npz(("q.npy", npy(np.array([MaliciousPickle()], object))))),
    "npy of objects": ("DType", "x.npy", npy(np.array([MaliciousPickle()], object))),
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
    "npz that claims 4 GB": ("TooLarge", "x.npz", wrong_size_member(2**32 - 4)),
    "npz that claims a little more": ("Malformed", "x.npz", wrong_size_member(8000)),
    "npz that claims less": ("Malformed", "x.npz", wrong_size_member(2000)),
    "npz bomb": (
        "TooLarge", "x.npz", npz(("q.npy", npy(np.zeros(10**7, np.float32))), compression=zipfile.ZIP_DEFLATED),
    ),
    "npz with other bytes": ("Malformed", "x.npz", npz(("q.npy", npy()), compression=zipfile.ZIP_DEFLATED).replace(
        struct.pack("<I", zlib.crc32(npy())), bytes(4)
    )),
    "npz of a huge table": ("Malformed", "x.npz", npz(("q.npy", npy()))[:-22] + bytes(17 << 20) + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 17 << 20, 0, 0
    )),
    "npz of a member behind its end": ("Truncated", "x.npz", wrong_offset_archive(npz(("q.npy", npy())))),
    "safetensors of size 0": ("Malformed", "x.safetensors", b"empty"),
    "safetensors of bools": ("DType", "x.safetensors", b""),
    "safetensors with ids that are none": ("Malformed", "x.safetensors", b'{"ids": ["1"]}'),
    "safetensors with no id": ("Malformed", "x.safetensors", b'{"ids": []}'),
    "safetensors with a half text": ("Malformed", "x.safetensors", b'{"ids"'),
    "another kind": ("Unsupported", "x.pt", b"PK"),
}  # fmt: skip


def safetensors(about: bytes) -> bytes:
    """One array; of bools where nothing is said of the run."""
    dtype, data = ("F32", Q.tobytes()) if about else ("BOOL", bytes(12))
    tensor: dict[str, object] = {"dtype": dtype, "shape": [3, 4], "data_offsets": [0, len(data)]}
    if about == b"empty":
        tensor, data = {"dtype": "F32", "shape": [3, 0], "data_offsets": [0, 0]}, b""
    text = json.dumps({"q": tensor} | ({"__metadata__": {"llorch": about.decode()}} if about else {})).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_by_code(tmp_path: Path, name: str):
    code, file, data = FILES[name]
    path = tmp_path / file
    path.write_bytes(safetensors(data) if file.endswith("safetensors") else data)
    assert read_error(path).code == code


@pytest.mark.parametrize("name", ["x.npz", ""])
def test_excessive_number_of_arrays_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.engines.dumps.tensor_files._MAX_ARRAYS", 1)
    (tmp_path / "x.npz").write_bytes(npz(("a.npy", npy()), ("b.npy", npy())))
    (tmp_path / "a.npy").write_bytes(npy())
    (tmp_path / "b.npy").write_bytes(npy())
    assert read_error(tmp_path / name).code == "TooLarge"


def write_valid_file(folder: Path, style: str) -> Path:
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
    path = write_valid_file(tmp_path, style)
    data, accepted, messages = path.read_bytes(), 0, set()
    for index in range(500):
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
    assert 0 < accepted < 500
    assert all(message.isprintable() for message in messages)

"""Builds GGUF files byte by byte, sound ones and broken ones; no writer would write the broken ones."""

import struct
from collections.abc import Sequence

import numpy as np

U8, BOOL, U32, I32, F32, STRING, ARRAY = 0, 7, 4, 5, 6, 8, 9
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_MXFP4, TYPE_I32 = 0, 1, 2, 8, 39, 26


def string(text: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(key: bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def row(name: bytes, dims: Sequence[int], *, kind: int = TYPE_F32, offset: int = 0, n_dims: int | None = None) -> bytes:
    header = string(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return header + b"".join(struct.pack("<Q", dim % 2**64) for dim in dims) + struct.pack("<IQ", kind, offset)


def gguf(
    entries: Sequence[bytes] = (), rows: Sequence[bytes] = (), data: bytes = b"", *, magic: bytes = b"GGUF",
    version: int = 3, n_entries: int | None = None, n_tensors: int | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    tensors = len(rows) if n_tensors is None else n_tensors
    keys = len(entries) if n_entries is None else n_entries
    header = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(entries) + b"".join(rows)
    padding = b"\0" * (-len(header) % alignment) if rows else b""
    return header + padding + data


def sound_file() -> bytes:
    """A small file with every kind of value and three tensors: F32, F16 and Q4_0."""
    entries = [
        entry(b"general.architecture", STRING, string(b"llama")),
        entry(b"general.alignment", U32, u32(32)),
        entry(b"a.bool", BOOL, b"\1"),
        entry(b"a.float", F32, struct.pack("<f", 0.5)),
        entry(b"a.negative", I32, struct.pack("<i", -3)),
        entry(b"a.u64", 10, struct.pack("<Q", 2**63)),
        entry(b"a.numbers", ARRAY, array(I32, 3, struct.pack("<3i", 1, -2, 3))),
        entry(b"a.bools", ARRAY, array(BOOL, 2, b"\0\1")),
        entry(b"a.tokens", ARRAY, array(STRING, 3, string(b"one") + string(b"") + string(b"\xff\xfe"))),
    ]
    rows = [
        row(b"f32", [3, 2]),
        row(b"f16", [4], kind=TYPE_F16, offset=32),
        row(b"q4_0", [32, 2], kind=TYPE_Q4_0, offset=64),
    ]
    f32 = np.arange(6, dtype="<f4").tobytes()
    f16 = np.array([1, -2, 0.5, 65504], "<f2").tobytes()
    block = np.array([0.5], "<f2").tobytes() + bytes(range(16))
    return gguf(entries, rows, f32.ljust(32, b"\0") + f16.ljust(32, b"\0") + (block * 2).ljust(64, b"\0"))

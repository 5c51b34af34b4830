"""Table 2a of the reliability page: each row is a file, the code it is refused with, and a second at most."""

import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.gguf_bytes import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    TYPE_F16,
    TYPE_I32,
    TYPE_MXFP4,
    TYPE_Q4_0,
    TYPE_Q8_0,
    U8,
    U32,
    array,
    entry,
    gguf,
    row,
    sound_file,
    string,
    u32,
)
from helpers.ggml_library import load_ggml
from helpers.refusals import Refusal, refuses
from helpers.refusals import row as refusal_row
from helpers.work_limit import work_limit

from llorch.files import open_gguf
from llorch.files.gguf import MetadataLimits
from llorch.runtime.errors import FormatError

DATA = bytes(128)


def tensor(*dims: int, kind: int = 0, offset: int = 0, name: bytes = b"t", data: bytes = DATA) -> bytes:
    return gguf((), [row(name, dims, kind=kind, offset=offset)], data)


def alignment(number: int, kind: int = U32) -> bytes:
    return gguf([entry(b"general.alignment", kind, u32(number))])


def nested(depth: int) -> bytes:
    return gguf([entry(b"k", ARRAY, array(ARRAY, 1) * depth + array(U8, 0))])


def long_array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return gguf([entry(b"k", ARRAY, array(kind, count, payload))])


def second_tensor(offset: int) -> bytes:
    return gguf((), [row(b"a", [8]), row(b"b", [8], offset=offset)], DATA)


HEADER: dict[str, tuple[str, bytes]] = {
    "empty file": ("Truncated", b""),
    "3 bytes": ("Truncated", b"GGU"),
    "16-byte header": ("Truncated", gguf()[:16]),
    "wrong magic": ("BadMagic", gguf(magic=b"GGML")),
    "version 0": ("Unsupported", gguf(version=0)),
    "version 1": ("Unsupported", gguf(version=1)),
    "version 4": ("Unsupported", gguf(version=4)),
    "big-endian": ("Unsupported", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    "n_tensors 2^63": ("TooLarge", gguf(n_tensors=2**63)),
    "n_kv 2^64-1": ("TooLarge", gguf(n_entries=2**64 - 1)),
    "n_kv 10^9": ("TooLarge", gguf(n_entries=10**9)),
    "n_tensors 10^9 and 4 MB of zeros": ("TooLarge", gguf(n_tensors=10**9) + bytes(4 << 20)),
    "n_kv 2 with 1 entry": ("Truncated", gguf([entry(b"k", BOOL, b"\1")], n_entries=2)),
}
METADATA: dict[str, tuple[str, bytes]] = {
    "key length 2^63": ("Truncated", gguf([string(b"k", length=2**63)])),
    "key of 65,536 bytes": ("TooLarge", gguf([entry(b"k" * 65_536, BOOL, b"\1")])),
    "string value 2^63": ("Truncated", gguf([entry(b"k", STRING, string(b"v", length=2**63))])),
    "string value past the end": ("Truncated", gguf([entry(b"k", STRING, string(b"v", length=2))])),
    "string value of 17 MB": ("TooLarge", gguf([entry(b"k", STRING, string(bytes(17 << 20)))])),
    "u8 array 2^60 at the end": ("TooLarge", long_array(U8, 2**60)),
    "u8 array 10^7 at the end": ("Truncated", long_array(U8, 10**7)),
    "u8 array over the limit": ("TooLarge", long_array(U8, (1 << 22) + 1, bytes((1 << 22) + 1))),
    "string array past the end": ("Truncated", long_array(STRING, 2, string(b"a") + string(b"b", length=9))),
    "string array without its last length": ("Truncated", long_array(STRING, 2, string(b"12345678"))),
    "string array with one of 17 MB": ("TooLarge", long_array(STRING, 1, string(bytes(17 << 20)))),
    "arrays nested 500 deep": ("Unsupported", nested(500)),
    "arrays nested 5000 deep": ("Unsupported", nested(5000)),
    "value type 99": ("Malformed", gguf([entry(b"k", 99, b"")])),
    "element type 99": ("Malformed", long_array(99, 0)),
    "bool byte 7": ("Malformed", gguf([entry(b"k", BOOL, b"\7")])),
    "bool byte 7 in an array": ("Malformed", long_array(BOOL, 2, b"\0\7")),
    "duplicate key": ("Duplicate", gguf([entry(b"k", BOOL, b"\1")] * 2)),
    "empty key": ("Malformed", gguf([entry(b"", BOOL, b"\1")])),
    "key not UTF-8": ("Malformed", gguf([entry(b"\xff", BOOL, b"\1")])),
    "alignment 0": ("Malformed", alignment(0)),
    "alignment 4": ("Malformed", alignment(4)),
    "alignment 13": ("Malformed", alignment(13)),
    "alignment of type i32": ("Malformed", alignment(32, I32)),
    "alignment 2^31": ("Malformed", alignment(2**31)),
}
TENSORS: dict[str, tuple[str, bytes]] = {
    "table cut": ("Truncated", gguf((), [row(b"t", [8])[:-1]])),
    "n_dims 0": ("Malformed", tensor()),
    "n_dims 5": ("Malformed", tensor(1, 1, 1, 1, 1)),
    "n_dims 2^32-1": ("Malformed", gguf((), [row(b"t", [8], n_dims=2**32 - 1)], DATA)),
    "dimension 0": ("Malformed", tensor(8, 0)),
    "negative dimension": ("Malformed", tensor(8, -1)),
    "product wraps to 0": ("TooLarge", tensor(2**32, 2**32)),
    "product wraps to 8": ("TooLarge", tensor(2**61 + 1, 8)),
    "10^6 x 10^6 f32 in 128 B": ("OutOfBounds", tensor(10**6, 10**6)),
    "unknown type": ("Unsupported", tensor(32, kind=99)),
    "removed type": ("Unsupported", tensor(32, kind=31)),
    "Q4_0 row of 16": ("Malformed", tensor(16, kind=TYPE_Q4_0)),
    "Q4_0 row of 33": ("Malformed", tensor(33, kind=TYPE_Q4_0)),
    "offset past the end": ("Truncated", tensor(8, offset=4096)),
    "data cut by 100 B": ("Truncated", tensor(32, data=DATA[100:])),
    "offset 2^64-64": ("OutOfBounds", tensor(8, offset=2**64 - 64)),
    "offset unaligned": ("Malformed", second_tensor(33)),
    "gap": ("Malformed", second_tensor(64)),
    "overlap": ("Malformed", second_tensor(0)),
    "duplicate tensor name": ("Duplicate", gguf((), [row(b"t", [8]), row(b"t", [8], offset=32)], DATA)),
    "name of 64 B": ("Malformed", tensor(8, name=b"n" * 64)),
    "name of 1 MB": ("Malformed", tensor(8, name=b"n" * 10**6)),
    "name empty": ("Malformed", tensor(8, name=b"")),
    "name with NUL": ("Malformed", tensor(8, name=b"a\0b")),
    "name ../../x": ("Malformed", tensor(8, name=b"../../x")),
    "2000 names on one 1 MB range": (
        "Malformed",
        gguf((), [row(b"n%d" % index, [1 << 18]) for index in range(2000)], bytes(1 << 20)),
    ),
}
EXPECTED = HEADER | METADATA | TENSORS
MOST_LINES = 1_000_000  # of Python; the costliest file takes a sixth of it


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_file_is_refused_by_code_with_little_work(tmp_path: Path, name: str):
    code, data = EXPECTED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with work_limit(MOST_LINES), refuses(code, where=path) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def opened(path: Path, data: bytes, limits: MetadataLimits) -> None:
    path.write_bytes(data)
    open_gguf(path, limits=limits)


def taken(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with open_gguf(path) as file:
        file.array("t")


STRINGS = long_array(STRING, 20, string(b"twelve bytes") * 20)
TOLD = [  # what a code alone does not say
    refusal_row("metadata beyond the limit", lambda path: opened(path, sound_file(), MetadataLimits(header_bytes=200)),
                "TooLarge", "header limit 200"),
    refusal_row("tensor table beyond the limit",
                lambda path: opened(path, sound_file(), MetadataLimits(header_bytes=400)), "TooLarge",
                "header limit 400"),
    refusal_row("string beyond the limit", lambda path: opened(path, STRINGS, MetadataLimits(header_bytes=400)),
                "TooLarge", "string 17", "key 'k'", "limit 400"),
    refusal_row("big-endian", lambda path: opened(path, EXPECTED["big-endian"][1], MetadataLimits()), "Unsupported",
                "big-endian"),
    refusal_row("a tensor of integers", lambda path: taken(path, tensor(8, kind=TYPE_I32)), "DType", where="t",
                got="I32"),
    refusal_row("a block scale that is NaN",
                lambda path: taken(path, tensor(32, kind=TYPE_MXFP4, data=b"\xff" + bytes(16))), "NonFinite", "NaN",
                "row 0", where="t"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", TOLD)
def test_a_refusal_tells_where_and_what(tmp_path: Path, refusal: Refusal):
    refusal.check(tmp_path / "bad.gguf")


def test_a_vector_may_be_made_of_blocks(tmp_path: Path):
    path = tmp_path / "vector.gguf"
    codes = np.arange(64, dtype=np.int8).reshape(2, 32)
    blocks = b"".join(np.float16(2).tobytes() + row.tobytes() for row in codes)
    path.write_bytes(tensor(64, kind=TYPE_Q8_0, data=blocks))
    with open_gguf(path) as file:
        assert file.array("t").tolist() == [2.0 * code for code in range(64)]


def test_a_float16_nan_decodes_to_nan_for_the_loader_to_find(tmp_path: Path):
    path = tmp_path / "nan.gguf"
    path.write_bytes(tensor(4, kind=TYPE_F16, data=np.array([0, np.nan, np.inf, 1], "<f2").tobytes()))
    with open_gguf(path) as file:
        assert np.isfinite(file.array("t")).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: os.truncate(path, 100), "Truncated"),
        (lambda path: path.write_bytes(sound_file() + b"more"), "Inconsistent"),
        (lambda path: os.utime(path, ns=(0, 0)), "Inconsistent"),
    ],
    ids=["cut", "grown", "rewritten"],
)
def test_a_file_that_changes_while_open_is_an_error_not_a_dead_process(
    tmp_path: Path, damage: Callable[[Path], object], code: str
):
    path = tmp_path / "moving.gguf"
    path.write_bytes(sound_file())
    with open_gguf(path) as file:
        damage(path)
        with refuses(code):
            file.array("f32")
        assert str(file.metadata["a.numbers"]) == "[ 1 -2  3]"  # metadata is a copy


def test_a_file_replaced_by_rename_stays_readable(tmp_path: Path):
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    path.write_bytes(sound_file())
    other.write_bytes(gguf())
    with open_gguf(path) as file:
        other.replace(path)
        assert file.array("f32")[1, 2] == 5


HUNGRY = (
    "n_tensors 10^9 and 4 MB of zeros", "string value 2^63", "u8 array 2^60 at the end",
    "u8 array 10^7 at the end", "arrays nested 5000 deep", "10^6 x 10^6 f32 in 128 B",
    "2000 names on one 1 MB range",
)  # fmt: skip
MEASURE = """
import json, resource, sys
from llorch.runtime.errors import FormatError
from llorch.files import open_gguf
from llorch.files.gguf import MetadataLimits
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
# ru_maxrss starts at that of the process that forked this one; VmHWM is this program's own.
peak = lambda: int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before = peak()
for path in sys.argv[1:]:
    try:
        open_gguf(path)
        code = "accepted"
    except FormatError as error:
        code = error.code
    print(json.dumps([code, peak() - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: memory is read from /proc")
def test_the_hungry_files_cost_no_memory(tmp_path: Path):
    paths = [tmp_path / f"{index}.gguf" for index in range(len(HUNGRY))]
    for path, name in zip(paths, HUNGRY, strict=True):
        path.write_bytes(EXPECTED[name][1])
    limited = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True, env=limited, timeout=300
    )
    for name, line in zip(HUNGRY, ran.stdout.splitlines(), strict=True):
        code, kilobytes = json.loads(line)
        assert code == EXPECTED[name][0], name
        assert kilobytes < 16 * 1024, name


EXTREMES = [struct.pack("<Q", number) for number in (0, 1, 7, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 64, 2**64 - 1)]


def mutants(count: int, seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    sound = sound_file()
    for _ in range(count):
        data = bytearray(sound)
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(len(data)))
            match rng.integers(5):
                case 0:
                    data[place] ^= 1 << int(rng.integers(8))
                case 1:
                    data[place] = int(rng.integers(256))
                case 2:
                    data[place : place + 8] = EXTREMES[rng.integers(len(EXTREMES))]
                case 3:
                    del data[place : place + int(rng.integers(1, 64))]
                case _:
                    data[place:place] = data[place : place + int(rng.integers(1, 64))]
        yield bytes(data)


def mutant_files(folder: Path, count: int, seed: int) -> Iterator[Path]:
    """One fresh file per mutant: overwriting one file again and again waits for the disk."""
    for index, data in enumerate(mutants(count, seed)):
        path = folder / f"mutant{index}.gguf"
        path.write_bytes(data)
        yield path
        path.unlink()


def read_everything(path: Path) -> bool:
    """True if the file is accepted; anything but FormatError escapes and fails the test."""
    try:
        with open_gguf(path) as file:
            str(file.metadata)
            for name in file.tensors:
                file.array(name).sum(dtype=np.float64)
    except FormatError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning")
def test_mutants_are_read_or_refused_with_format_error_only(tmp_path: Path):
    accepted = 0
    for path in mutant_files(tmp_path, 2000, seed=0):
        with work_limit(20_000):
            accepted += read_everything(path)
    assert 0 < accepted < 2000  # both outcomes occur: the test can see


class Parameters(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


@pytest.fixture
def llamacpp_accepts() -> Callable[[Path], bool]:
    ggml = load_ggml()
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, Parameters]
    ggml.gguf_free.argtypes = [ctypes.c_void_p]

    def accepts(path: Path) -> bool:
        context = ggml.gguf_init_from_file(str(path).encode(), Parameters(True, None))
        if context:
            ggml.gguf_free(context)
        return bool(context)

    return accepts


@pytest.mark.live
def test_nothing_is_accepted_that_llamacpp_refuses(tmp_path: Path, llamacpp_accepts: Callable[[Path], bool]):
    sound = tmp_path / "sound.gguf"
    sound.write_bytes(sound_file())
    assert llamacpp_accepts(sound)
    theirs = 0
    for path in mutant_files(tmp_path, 1000, seed=1):
        accepted = llamacpp_accepts(path)
        theirs += accepted
        try:
            open_gguf(path).close()
        except FormatError:
            continue
        assert accepted, f"{path.name} is accepted here and refused by llama.cpp"
    assert theirs > 0

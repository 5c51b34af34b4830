import logging
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders.gguf_bytes import ARRAY, STRING, U8, array, entry, gguf, sound_file, string
from builders.gguf_bytes import row as tensor_row
from builders.tiny_models import finish
from gguf import GGUFReader, GGUFWriter
from helpers.refusals import Refusal, assert_tells, refuses, row
from helpers.work_limit import work_limit

from llorch.files import StringArray, open_gguf
from llorch.files.quant import GGMLType

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: memory is read from /proc")


def resident_kilobytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def n_bytes_read() -> int:
    """Count the bytes that this process has read by system calls; pages of a map are not among them."""
    return int(Path("/proc/self/io").read_text().partition("rchar:")[2].split()[0])


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.gguf"
    path.write_bytes(sound_file())
    return path


def test_every_kind_of_metadata_value_is_read(sound: Path):
    with open_gguf(sound) as file:
        values = file.metadata
    assert {key: value if np.isscalar(value) else [*value] for key, value in values.items()} == {  # type: ignore[misc]
        "general.architecture": "llama", "general.alignment": 32, "a.bool": True, "a.float": 0.5, "a.negative": -3,
        "a.u64": 2**63, "a.numbers": [1, -2, 3], "a.bools": [False, True], "a.tokens": [b"one", b"", b"\xff\xfe"],
    }  # fmt: skip
    assert [type(values[f"a.{name}"]) for name in ("bool", "tokens")] == [bool, StringArray]
    assert [values[f"a.{name}"].dtype for name in ("numbers", "bools")] == [np.int32, bool]  # type: ignore[union-attr]


def test_string_arrays_behave_like_sequences(sound: Path):
    with open_gguf(sound) as file:
        tokens = file.metadata["a.tokens"]
    assert isinstance(tokens, StringArray)
    assert (len(tokens), tokens[0], tokens[-3], b"one" in tokens) == (3, b"one", b"one", True)
    assert tokens[1:] == [b"", b"\xff\xfe"]
    assert repr(tokens) == "StringArray(3 strings, 29 bytes)"
    with pytest.raises(IndexError):
        tokens[3]


def test_tensors_have_numpy_shapes_and_decode(sound: Path):
    with open_gguf(sound) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        assert shapes == {"f32": (2, 3), "f16": (4,), "q4_0": (2, 32)}
        assert file.tensors["q4_0"].ggml_type is GGMLType.Q4_0
        assert file.array("f32").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.array("f16").tolist() == [1, -2, 0.5, 65504]
        assert file.array("q4_0")[0, :3].tolist() == [-4.0, -3.5, -3.0]
        assert file.raw("f16").tobytes() == np.array([1, -2, 0.5, 65504], "<f2").tobytes()


def test_float32_tensors_are_read_only_views_of_the_map(sound: Path):
    with open_gguf(sound) as file:
        values = file.array("f32")
        assert np.shares_memory(values, file.raw("f32"))
    assert not values.flags.writeable
    assert values[1, 2] == 5  # still there after close


def test_the_package_reader_sees_the_same_file(sound: Path):
    reader = GGUFReader(sound)
    with open_gguf(sound) as file:
        offsets = {name: info.offset for name, info in file.tensors.items()}
        assert {tensor.name: int(tensor.data_offset) for tensor in reader.tensors} == offsets
        assert set(file.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}


def test_version_2_is_read(tmp_path: Path):
    path = tmp_path / "two.gguf"
    path.write_bytes(gguf(version=2))
    with open_gguf(path) as file:
        assert (file.version, file.metadata, file.tensors) == (2, {}, {})


def test_another_alignment_is_followed(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    finish(writer, {name: np.full(3, len(name) + 0.5, np.float32) for name in ("one", "two")})
    with open_gguf(tmp_path / "a.gguf") as file:
        assert file.tensors["two"].offset % 256 == 0
        assert file.array("two").tolist() == [3.5] * 3


def test_trailing_bytes_are_accepted_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "padded.gguf"
    path.write_bytes(sound_file() + b"\0" * 1024)
    for _ in range(2):
        with open_gguf(path) as file:
            assert file.array("f32")[1, 0] == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert_tells(record.getMessage(), path, "1024 bytes")


def test_padding_after_the_table_of_a_file_without_tensors_is_no_note(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "vocabulary.gguf"
    header = gguf([entry(b"general.name", STRING, string(b"abc"))])
    path.write_bytes(header + bytes(-len(header) % 32))
    with open_gguf(path):
        assert not caplog.records


def two_tensors(name_length: int, alignment: int, *, last: float = 2) -> bytes:
    """A file that says nothing of its alignment, which means 32, and begins its data at a multiple of another one."""
    rows = [tensor_row(b"a", [128]), tensor_row(b"b", [64], offset=512)]
    data = np.append(np.ones(184), [last] * 8).astype("<f4").tobytes()
    return gguf([entry(b"general.name", STRING, string(b"x" * name_length))], rows, data, alignment=alignment)


@pytest.mark.parametrize("alignment", [64, 128, 256])
def test_data_aligned_to_more_than_the_file_says_is_refused(tmp_path: Path, alignment: int):
    n_refused = 0
    for name_length in range(0, 256, 8):
        path = tmp_path / f"{name_length}.gguf"
        path.write_bytes(two_tensors(name_length, alignment))
        if path.read_bytes() == two_tensors(name_length, 32):
            with open_gguf(path) as file:
                assert file.array("a").all()
            continue
        with refuses("Malformed", where="general.alignment", got=32):
            open_gguf(path)
        n_refused += 1
    assert n_refused >= 16


@pytest.mark.parametrize(
    ("last", "trailing"), [(0, b""), (2, b"\1" * 32)], ids=["zeros at the end", "bytes that nothing explains"]
)
def test_data_that_may_begin_where_the_file_says_is_read_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: float, trailing: bytes
):
    lengths = (n for n in range(0, 64, 8) if two_tensors(n, 64) != two_tensors(n, 32))
    path = tmp_path / "file.gguf"
    path.write_bytes(two_tensors(next(lengths), 32 if trailing else 64, last=last) + trailing)
    with open_gguf(path):
        (record,) = caplog.records
    assert_tells(record.getMessage(), path, "32 bytes")


def raw_of(sound: Path, name: str) -> None:
    with open_gguf(sound) as file:
        file.raw(name)


def array_of_closed(sound: Path) -> None:
    file = open_gguf(sound)
    file.close()
    file.array("f32")


REFUSALS = [
    row("no file", lambda sound: open_gguf(sound.with_name("nothing.gguf")), FileNotFoundError, where="nothing.gguf"),
    row("a folder", lambda sound: open_gguf(sound.parent), "Unsupported", expected="file"),
    row("an unknown tensor", lambda sound: raw_of(sound, "x"), "Missing", "'x'", "3", where="sound.gguf"),
    row("a closed file", array_of_closed, ValueError, "closed", where="sound.gguf"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_not_there_is_refused(sound: Path, refusal: Refusal):
    refusal.check(sound)


@pytest.mark.parametrize(
    ("kind", "length", "n_bytes", "lines_each"),
    [(U8, 1 << 22, 1, 0), (STRING, 10**5, 8, 10)],
    ids=["4 MB of u8", "100,000 empty strings"],
)
def test_the_work_for_large_legal_metadata_is_in_proportion(
    tmp_path: Path, kind: int, length: int, n_bytes: int, lines_each: int
):
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf([entry(b"large", ARRAY, array(kind, length, bytes(n_bytes * length)))]))
    with work_limit(10_000 + lines_each * length), open_gguf(path) as file:
        values = file.metadata["large"]
    assert isinstance(values, np.ndarray | StringArray)
    assert len(values) == length


@needs_proc
def test_a_real_sized_vocabulary_opens_in_80_mb(tmp_path: Path):
    tokens, merges = 128_256, 280_147  # as in the Llama 3 vocabulary
    words = b"".join(string(b"token%d" % index) for index in range(tokens))
    pairs = b"".join(string(b"left%d right" % index) for index in range(merges))
    kinds = array(5, tokens, struct.pack("<i", 1) * tokens)
    entries = [
        entry(b"tokenizer.ggml.tokens", ARRAY, array(STRING, tokens, words)),
        entry(b"tokenizer.ggml.token_type", ARRAY, kinds),
        entry(b"tokenizer.ggml.merges", ARRAY, array(STRING, merges, pairs)),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf(entries))
    script = """
import sys
from llorch.files import open_gguf
with open_gguf(sys.argv[1]) as file:
    n_bytes = sum(map(len, file.metadata["tokenizer.ggml.tokens"]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
"""
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 80 * 1024


@needs_proc
def test_opening_does_not_read_the_tensors(tmp_path: Path):
    path = tmp_path / "sparse.gguf"
    n_bytes = 2 << 30
    path.write_bytes(gguf((), [tensor_row(b"big", [n_bytes // 4])]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + n_bytes)  # a hole: 2 GB that take no room
    resident, read = resident_kilobytes(), n_bytes_read()
    with open_gguf(path) as file:
        assert file.array("big").shape == (n_bytes // 4,)
        assert resident_kilobytes() - resident < 10_000
    assert n_bytes_read() - read < 10_000_000

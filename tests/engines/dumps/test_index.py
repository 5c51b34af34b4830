"""The dump that anyone can write, read; and those in other formats."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from helpers.refusals import assert_tells

from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.raw import RawArray, RawDump, known_dtype
from llorch.engines.dumps.stage_dump import INT8_CACHES, Features
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files.safetensors import tensor_bytes
from llorch.stages.stage_ref import Tokens

rng = np.random.default_rng(0)
Q = rng.normal(size=(3, 4, 6)).astype(np.float32)
PASS = {"pass": 0, "ids": [9, 4, 7], "first_position": 5}


def write(folder: Path, *lines: object, data: bytes = Q.tobytes()) -> Path:
    """A dump of lines as they are, behind a header."""
    folder.mkdir(exist_ok=True)
    (folder / "x.bin").write_bytes(data)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in ({"llorch_dump": 1}, *lines)]
    (folder / "index.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def entry(**fields: object) -> dict[str, object]:
    return {"name": "q", "dtype": "f32", "shape": [3, 4, 6], "file": "x.bin"} | fields


def single_array(dump: RawDump) -> RawArray:
    ((number, array),) = dump.arrays
    assert number == 0
    return array


@pytest.mark.parametrize("form", INT8_CACHES)
def test_int8_cache_is_declared_with_the_values_that_share_a_scale(tmp_path: Path, form: str):
    with DumpWriter(tmp_path / "d", kv_cache=form) as writer:
        writer.begin([9])
        writer.add("q", Q)
    assert open_raw(tmp_path / "d").features.kv_cache == form


def test_dump_round_trip_is_exact(tmp_path: Path):
    with DumpWriter(tmp_path / "d", engine="mine", dtype="F32", kv_cache="f16", activations="Q8_0") as writer:
        writer.begin([9, 4, 7])
        writer.add("q", Q, layer=1, axes="seq heads head_dim")
        writer.add("h", Q.astype(">f2")[:, 0], tokens=[2, 0, 1])
        writer.begin(np.array([8]), first_position=3)
        writer.add("q", Q.transpose(2, 1, 0), layer=1)
    dump = open_raw(tmp_path / "d")
    assert dump.passes == (Tokens((9, 4, 7)), Tokens((8,), 3))
    assert dump.features == Features("mine", "float32", "float16", "Q8_0")
    (_, q), (_, h), (number, again) = dump.arrays
    assert (q.name, q.layer, q.axes, q.tokens, q.stored) == ("q", 1, ("seq", "heads", "head_dim"), None, "float32")
    assert (h.tokens, h.stored, h.axes, h.layer) == ((2, 0, 1), "float16", (), None)
    assert number == 1
    for array, wanted in ((q, Q), (h, Q[:, 0].astype(np.float16)), (again, Q.transpose(2, 1, 0))):
        np.testing.assert_array_equal(array.read(), wanted, strict=True)
    assert open_raw(tmp_path / "d" / "index.jsonl").passes == dump.passes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((text, "float32") for text in ("f32", "F32", "float32", "torch.float32", "numpy.float32", "<f4", "float")),
        *((text, "float16") for text in ("f16", "half", "torch.float16", "<f2")),
        *((text, "bfloat16") for text in ("bf16", "BF16", "torch.bfloat16")),
        *((text, "float64") for text in ("f64", "double", "<f8")),
        *((text, "int32") for text in ("i32", "<i4")),
        *((text, "int64") for text in ("I64", "int64", "<i8")),
        *((text, None) for text in ("i8", "f8", ">f4", "|O", "bool", "", "float31")),
    ],
)
def test_dtype_accepts_common_spellings(text: str, name: str | None):
    assert known_dtype(text) == name


def test_bfloat16_is_read_as_float32(tmp_path: Path):
    bits = Q.view(np.uint32) & 0xFFFF0000
    array = single_array(open_raw(write(tmp_path, entry(dtype="bf16"), data=(bits >> 16).astype("<u2").tobytes())))
    assert array.stored == "bfloat16"
    np.testing.assert_array_equal(array.read(), bits.view(np.float32), strict=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (entry(offset=3), Q),
        (entry(shape=[1, 1, 1, 1, 1, 3, 4, 6], offset=3), Q.reshape(1, 1, 1, 1, 1, 3, 4, 6)),
        # heads 1 and 3, channels first
        (entry(shape=[6, 3, 2], strides=[4, 96, 48], offset=3 + 24), Q[:, 1::2].transpose(2, 0, 1)),
    ],
)
def test_strides_and_odd_offsets_are_respected(tmp_path: Path, line: dict, expected: np.ndarray):
    read = single_array(open_raw(write(tmp_path, line, data=b"abc" + Q.tobytes() + b"more"))).read()
    np.testing.assert_array_equal(read, expected, strict=True)
    assert read.flags.c_contiguous
    assert read.flags.aligned


@pytest.mark.parametrize("kind", ["F16", "bf16", "q8_0", "Q8_1", "Q8_K"])
def test_rounding_of_products_is_named_as_in_ggml(tmp_path: Path, kind: str):
    with DumpWriter(tmp_path, activations=kind) as writer:
        writer.add("q", Q)
    assert open_raw(tmp_path).features.activations == kind.upper()


def test_row_of_a_large_array_is_read_alone(tmp_path: Path):
    write(tmp_path, entry(shape=[1 << 10, 1 << 18]))
    with (tmp_path / "x.bin").open("r+b") as file:
        file.truncate(1 << 30)  # a gigabyte, none of it on the disk
        file.seek((1 << 20) * 5)
        file.write(Q.tobytes())
    np.save(tmp_path / "x.npy", Q)
    header = (tmp_path / "x.npy").read_bytes()[:128]
    (tmp_path / "x.npy").write_bytes(header.replace(b"(3, 4, 6), }   ", b"(268435456,), }"))
    os.truncate(tmp_path / "x.npy", 128 + (1 << 30))
    tracemalloc.start()
    row = single_array(open_raw(tmp_path)).read()[5].copy()
    assert single_array(open_raw(tmp_path / "x.npy")).read()[-1] == 0
    assert tracemalloc.get_traced_memory()[1] < 64e6
    tracemalloc.stop()
    np.testing.assert_array_equal(row[: Q.size], Q.reshape(-1))


def test_positions_belong_to_their_pass(tmp_path: Path):
    array = single_array(
        open_raw(write(tmp_path, PASS, entry(shape=[2, 36], positions=[7, 5], axes=["seq", "q_width"])))
    )
    assert array.tokens == (2, 0)


def test_truncated_dump_is_read_up_to_its_last_complete_line(tmp_path: Path):
    write(tmp_path, PASS, entry())
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write(json.dumps(entry(name="k"))[:-9])
    dump = open_raw(tmp_path)
    np.testing.assert_array_equal(single_array(dump).read(), Q)
    (note,) = dump.notes
    assert_tells(note, "line 4", "index.jsonl")


def test_nodes_of_a_graph_may_share_a_name(tmp_path: Path):
    dump = open_raw(write(tmp_path, entry(name="Qcur", layer=0, op="MUL_MAT"), entry(name="Qcur", layer=0, op="ROPE")))
    assert [array.op for _, array in dump.arrays] == ["MUL_MAT", "ROPE"]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    return {array.name: array.read() for _, array in open_raw(path).arrays}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_files_are_read(tmp_path: Path, save: Callable[..., None], order: Literal["C", "F"]):
    wanted: dict[str, np.ndarray] = {"q": Q, "half": Q.astype(np.float16)}
    wanted |= {"zeros": np.zeros((300, 400)), "one": np.array(3)}
    save(tmp_path / "x.npz", **{name: np.asarray(array, order=order) for name, array in wanted.items()})
    read = read_arrays(tmp_path / "x.npz")
    assert read.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(read[name], array, strict=True)


@pytest.mark.parametrize("ids", [[9, 4, 7], [[9, 4, 7]]])
def test_ids_and_first_position_among_the_arrays_define_the_pass(tmp_path: Path, ids: list):
    np.savez(tmp_path / "x.npz", q=Q, ids=np.array(ids), first_position=np.int32(5))
    dump = open_raw(tmp_path / "x.npz")
    assert dump.passes == (Tokens((9, 4, 7), 5),)
    assert single_array(dump).name == "q"


def test_safetensors_files_are_read_with_llorch_trace_metadata(tmp_path: Path):
    about = json.dumps({"engine": "llorch", "first_position": 5, "ids": [9, 4, 7], "model": "story"})
    wanted = {"q": Q, "wide": Q.astype(np.float64), "half": Q.astype(np.float16)}
    for name, metadata in (("trace", {"llorch": about}), ("alone", None), ("foreign", {"llorch": "{}"})):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(b"".join(tensor_bytes(wanted, metadata=metadata)))
        read = read_arrays(path)
        assert read.keys() == wanted.keys()
        for key, array in wanted.items():
            np.testing.assert_array_equal(read[key], array, strict=True)
        dump = open_raw(path)
        assert dump.passes == ((Tokens((9, 4, 7), 5),) if name == "trace" else ())
        assert dump.features == Features("llorch" if name == "trace" else "")


def test_npy_arrays_are_named_by_file(tmp_path: Path):
    np.save(tmp_path / "l0.q.npy", Q)
    np.save(tmp_path / "ids.npy", np.array([9, 4, 7]))
    assert single_array(open_raw(tmp_path / "l0.q.npy")).name == "l0.q"
    (tmp_path / "notes.txt").write_text("not an array")
    dump = open_raw(tmp_path)
    assert dump.passes == (Tokens((9, 4, 7)),)
    np.testing.assert_array_equal(single_array(dump).read(), Q)

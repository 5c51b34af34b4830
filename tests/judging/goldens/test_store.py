"""The store of goldens: its record, and its files of arrays."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import refuses
from safetensors.numpy import load

from llorch.judging.goldens.store import SUFFIX, GoldenStore, plain_distances, read_arrays, read_distances, write_arrays
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import Difference

ARRAYS = {
    "near/l0.attn_scores": np.array([[1.5, -np.inf], [-0.0, 2.0**-149]], np.float32),
    "near/logits": np.arange(6, dtype=np.float64).reshape(2, 3).T / 3,
    "near/generation": np.array([7, -1]),
}


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path):
    write_arrays(tmp_path / f"a{SUFFIX}", ARRAYS)
    found = read_arrays(tmp_path / f"a{SUFFIX}")
    assert [*found] == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_a_stored_golden_is_safetensors_in_an_ordinary_xz_file():
    path = goldens_folder() / "micro-llama" / f"truth{SUFFIX}"
    with lzma.open(path, format=lzma.FORMAT_XZ) as file:
        assert load(file.read()).keys() == read_arrays(path).keys()


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:99] + b"\0" + b[100:], lambda b: b"", lzma.compress])
def test_a_damaged_file_is_refused(tmp_path: Path, damage):
    file = tmp_path / f"a{SUFFIX}"
    write_arrays(file, ARRAYS)
    file.write_bytes(damage(file.read_bytes()))
    with refuses(ValueError, "damaged", "reference_outputs/regenerate.py", where=file):
        read_arrays(file)


def test_write_arrays_failure_keeps_the_old_file(tmp_path: Path):
    file = tmp_path / f"a{SUFFIX}"
    write_arrays(file, ARRAYS)
    before = file.read_bytes()
    with pytest.raises(Exception, match="object"):
        write_arrays(file, {"x": np.array([object()])})
    assert (file.read_bytes(), [*tmp_path.iterdir()]) == (before, [file])


def test_a_store_gives_back_its_record_and_its_arrays(tmp_path: Path):
    store = GoldenStore(tmp_path / "new", "record.json")
    store.write({"b": 1, "a": "é"}, {"one": ARRAYS, "two": {"x": np.zeros(2)}}, indent=None)
    assert store.record() == {"a": "é", "b": 1}
    assert store.path.read_bytes() == b'{"a": "\\u00e9", "b": 1}\n'
    found = store.arrays(["two", "one"])
    assert {name: [*arrays] for name, arrays in found.items()} == {"two": ["x"], "one": sorted(ARRAYS)}


@pytest.mark.parametrize("missing", ["record.json", f"two{SUFFIX}"])
def test_a_store_without_one_of_its_files_is_a_missing_golden(missing: str, tmp_path: Path):
    store = GoldenStore(tmp_path, "record.json")
    store.write({}, {"one": {}, "two": {}})
    (tmp_path / missing).unlink()
    with refuses(FileNotFoundError, tmp_path / missing, "regenerate.py"):
        store.record()
        store.arrays(["one", "two"])


def test_distances_come_back_with_four_digits():
    plain = plain_distances({"engine": {"near": {"l0.q_rope": Difference(1.23456e-7, 0.5)}}})
    assert plain == {"engine": {"near": {"l0.q_rope": [1.235e-7, 0.5]}}}
    assert plain_distances(read_distances(plain)) == plain

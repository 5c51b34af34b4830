"""The proof that a run can be resumed, and that it would notice if it could not."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import invoke, spawn
from helpers.mesh_programs import invoke_on_mesh
from helpers.refusals import assert_cli_refuses, assert_tells, refuses
from helpers.training_runs import small_data, small_settings

from llorch.pytorch.train.verify_resume import ADAPTER, Compared, Proof, RunComparison, compare_runs, verify_resume
from llorch.runtime.errors import CheckpointMismatch
from llorch.training.resume import PACKAGES
from llorch.training.snapshots import SnapshotStore

FLAGS = "--steps 4 --r 64 --dropout 0.1 --batch-size 2 --accumulation 2 --packing --max-length 64 --eight-bit"


def write_run_folder(folder: Path, tensors: dict[str, np.ndarray], log: bytes = b'{"step": 1}\n{"step": 2}\n') -> Path:
    folder.mkdir()
    SnapshotStore(folder).save(2, tensors, {})
    (folder / ADAPTER).write_bytes(b"adapter")
    (folder / "log.jsonl").write_bytes(log)
    return folder


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return {"adapter/a": np.array([[1.5, np.nan], [-0.0, 3]], np.float32), "optimizer/step": np.array(2)}


def test_equal_runs_are_equal_also_where_a_number_is_nan(tensors: dict[str, np.ndarray], tmp_path: Path):
    found = compare_runs(write_run_folder(tmp_path / "a", tensors), write_run_folder(tmp_path / "b", tensors))
    assert found.equal
    counts = {tensor.name: tensor.n_values for tensor in found.tensors}
    assert counts == {"adapter/a": 4, "optimizer/step": 1, ADAPTER: 7}
    assert found.n_lines == 2


@pytest.mark.parametrize(
    ("name", "array", "bits"),
    [
        ("adapter/a", np.array([[1.5, np.nan], [0.0, 3]], np.float32), 1),  # the sign of a zero
        ("adapter/a", np.array([1.5, np.nan, -0.0, 3], np.float32), 128),  # another shape
        ("adapter/a", np.array([[1.5, np.nan], [-0.0, 3]]), 256),  # another dtype
        ("optimizer/step", np.array(1), 2),
        ("optimizer/more", np.zeros(3, np.uint8), 24),  # only one of them has it
    ],
)
def test_each_differing_bit_is_counted(
    name: str, array: np.ndarray, bits: int, tensors: dict[str, np.ndarray], tmp_path: Path
):
    other = write_run_folder(tmp_path / "b", {**tensors, name: array})
    found = compare_runs(write_run_folder(tmp_path / "a", tensors), other)
    assert [(tensor.name, tensor.differing_bits) for tensor in found.tensors if tensor.differing_bits] == [(name, bits)]
    assert not found.equal


@pytest.mark.parametrize("log", [b'{"step": 1}\n{"step": 3}\n', b'{"step": 1}\n', b'{"step": 1}\n{"step": 2}'])
def test_a_line_of_the_log_that_differs_or_is_missing_is_counted(
    log: bytes, tensors: dict[str, np.ndarray], tmp_path: Path
):
    found = compare_runs(write_run_folder(tmp_path / "a", tensors), write_run_folder(tmp_path / "b", tensors, log))
    assert (found.n_lines, found.differing_lines, found.equal) == (2, 1, False)


def test_control_without_differences_is_inconclusive():
    same, other = (RunComparison((Compared("adapter/a", 1, bits),), 1, 0) for bits in (0, 1))
    assert Proof(4, 2, same, {"moments": other}).holds
    assert not Proof(4, 2, same, {"moments": same}).holds
    assert not Proof(4, 2, other, {"moments": other}).holds


def test_a_run_that_cannot_be_cut_in_two_is_refused(tmp_path: Path):
    with refuses(ValueError, "at least 2", got=1, where="steps"):
        verify_resume(small_settings(tmp_path, steps=1), tmp_path, control=False)


def test_refused_second_half_is_inconclusive_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.training.resume.PACKAGES", (*PACKAGES, "click"))  # which a new process does not inherit
    with refuses(CheckpointMismatch, version("click"), "nothing", where="environment.packages.click"):
        verify_resume(small_settings(tmp_path, steps=2), tmp_path, control=False)


@pytest.mark.slow
def test_resumed_and_straight_runs_are_bit_identical_and_lost_state_is_detected(tmp_path: Path):
    data = small_data(tmp_path)
    done = spawn("lora", "verify-resume", "micro-llama", "--data", str(data), *FLAGS.split(), "--control", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["stopped_at"], found["holds"]) == (4, 2, True)
    assert found["halves"]["equal"]
    assert {tensor["differing_bits"] for tensor in found["halves"]["tensors"].values()} == {0}
    assert {name.partition("/")[0] for name in found["halves"]["tensors"]} == {"adapter", "optimizer", ADAPTER}
    assert any(name.endswith(".m_absmax") for name in found["halves"]["tensors"])  # moments in 8 bits
    for control in found["controls"].values():
        assert sum(tensor["differing_bits"] for tensor in control["tensors"].values()) > 1000
    assert {*found["controls"]} == {"moments", "place"}


@pytest.mark.slow
def test_resumed_and_straight_runs_on_a_mesh_are_bit_identical_and_lost_state_is_detected(tmp_path: Path):
    data, flags = small_data(tmp_path), "--steps 4 --r 4 --dropout 0.1 --batch-size 4 --mesh dp=2,tp=2 --control --json"
    done = invoke_on_mesh(tmp_path, "lora", "verify-resume", "micro-llama", "--data", str(data), *flags.split())
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["stopped_at"], found["holds"], found["halves"]["equal"]) == (2, True, True)
    assert {name.partition("/")[0] for name in found["halves"]["tensors"]} == {"adapter", "optimizer", ADAPTER}
    assert found["halves"]["log_lines"] == 7
    for control in found["controls"].values():
        assert sum(tensor["differing_bits"] for tensor in control["tensors"].values()) > 1000


def test_ranks_that_cannot_run_are_inconclusive_with_the_reason(tmp_path: Path):
    flags = "--steps 2 --batch-size 1 --mesh dp=2"
    data = str(small_data(tmp_path))
    result = invoke_on_mesh(tmp_path, "lora", "verify-resume", "micro-llama", "--data", data, *flags.split())
    assert_cli_refuses(result, 3, "of 2", "UserError: mesh")


def test_differences_are_printed_by_tensor_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tensors = Compared("adapter/layers.0.q_proj.lora_A", 1024, 3), Compared("optimizer/step", 1, 0)
    halves = RunComparison(tensors, 4, 1)
    monkeypatch.setattr(
        "llorch.pytorch.train.verify_resume.verify_resume",
        lambda *args, **kwargs: Proof(4, 2, halves, {"moments": halves, "place": RunComparison(tensors[1:], 4, 0)}),
    )
    result = invoke("lora", "verify-resume", "micro-llama", "--data", str(tmp_path), "--steps", "4")
    assert result.exit_code == 1
    told = [
        (4, "2 + 2"),
        ("weights", "1 tensors", "1,024 values", "3 bits"),
        ("adapter/layers.0.q_proj.lora_A", "1,024 values", "3 bits"),
        ("moments", "1 tensors", "1 values", "0 bits"),
        ("log", "4 lines", "1 lines"),
        ("NOT bit-identical",),
        ("moments", "1 of 2"),
        ("place", "NOT NOTICED"),
    ]
    for line, facts in zip(result.stdout.splitlines(), told, strict=True):
        assert_tells(line, *facts)
    every = invoke("lora", "verify-resume", "micro-llama", "--data", str(tmp_path), "-v")
    (line,) = [line for line in every.stdout.splitlines() if "optimizer/step" in line]
    assert_tells(line, "1 values", "0 bits")


def test_missing_torch_prints_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = invoke("lora", "verify-resume", "micro-llama", "--data", str(small_data(tmp_path)))
    assert_cli_refuses(result, 3, "torch", "pip install 'llorch[train]'")

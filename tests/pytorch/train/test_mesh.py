"""Training on several ranks: the losses, the gradients and the adapter of one process, and mistakes that are red."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.mesh_programs import (
    PROGRAM,
    TORCHRUN,
    arguments,
    ended,
    invoke_on_mesh,
    last_step,
    started,
    wait_for_steps,
)
from helpers.mesh_training import compare_training, made_run
from helpers.refusals import assert_tells
from helpers.training_runs import Silent, losses_on_mesh, run_steps, small_settings
from safetensors.numpy import load_file

from llorch.files.convert import convert
from llorch.files.hub import find
from llorch.files.quant import GGMLType
from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.train.run import Run

SLOW = pytest.mark.slow
FLOAT64 = {"dtype": "float64", "model": "micro-llama"}
BOTH = {"dp": 2, "tp": 2}
EVERYTHING = {  # that a layout must not change
    "batch_size": 3, "accumulation": 2, "dropout": 0.2, "weight_decay": 0.1, "gradient_checkpointing": True,
    "label_smoothing": 0.1, "max_grad_norm": 0.5, "lora_plus_ratio": 4.0, "eval_every": 2, "save_every": 2, "chunk": 7,
}  # fmt: skip


def run_one_process(settings: Any, folder: Path, **options: Any) -> Path:
    Run(settings, folder, Silent(), **options).run()
    return folder


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_same_run(actual_folder: Path, expected_folder: Path, *, rel: float) -> None:
    assert lines(actual_folder) == [pytest.approx(line, rel=rel) for line in lines(expected_folder)]
    actual, expected = (load_file(folder / "adapter_model.safetensors") for folder in (actual_folder, expected_folder))
    assert actual.keys() == expected.keys()
    for name in expected:  # stored in float32
        assert np.linalg.norm(actual[name] - expected[name]) <= max(rel, 2**-22) * np.linalg.norm(expected[name]), name


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow
def test_two_by_two_run_equals_one_process_and_resumes_in_one(tmp_path: Path):
    settings = small_settings(tmp_path, **FLOAT64, **EVERYTHING, steps=4)
    expected, actual = run_one_process(settings, tmp_path / "one"), tmp_path / "mesh"
    assert on_ranks(4, made_run, settings, actual, BOTH) == []
    assert_same_run(actual, expected, rel=1e-12)
    longer, watcher = small_settings(tmp_path, **FLOAT64, **EVERYTHING, steps=6), Silent()
    Run(longer, actual, watcher, resume=True).run()
    assert_same_run(actual, run_one_process(longer, expected, resume=True), rel=1e-12)
    assert_tells(watcher.notes[0], "dp=2, tp=2", "one process")


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow_cases(but=["micro-llama-axes0-*"])
@pytest.mark.parametrize(
    ("model", "axes", "kind"),
    [
        ("micro-llama", {"dp": 3, "tp": 1}, {"batch_size": 3}),  # the last batch has no row for the third rank
        ("micro-llama", {"dp": 4, "tp": 1}, {"batch_size": 4, "packing": True}),
        ("micro-llama", {"dp": 1, "tp": 2}, {"batch_size": 4, "dora": True}),
        ("micro-llama", {"dp": 2, "tp": 2}, {"batch_size": 4, "dora": True}),
        ("micro-llama", {"dp": 3, "tp": 2}, {"batch_size": 4, "init": "pissa"}),
        ("micro-llama", {"dp": 1, "tp": 1}, {"batch_size": 4, "rslora": True}),
        ("micro-qwen3.5", {"dp": 2, "tp": 1}, {}),
        ("micro-llama4", {"dp": 2, "tp": 1}, {}),
        ("micro-qwen3-moe", {"dp": 2, "tp": 1}, {"target_parameters": ("experts.down_proj", "gate.weight")}),
        ("micro-qwen3-moe", {"dp": 2, "tp": 2}, {}),
    ],
)
def test_losses_on_other_meshes_adapters_and_families_equal_one_process(
    tmp_path: Path, model: str, axes: Mapping[str, int], kind: Mapping[str, Any]
):
    settings = small_settings(tmp_path, model=model, dtype="float64", **kind)
    one = run_steps(settings, steps=0)
    expected = [one.run_step().loss for _ in range(3)]
    assert on_ranks(axes["dp"] * axes["tp"], losses_on_mesh, settings, axes, 3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("warm_ranks")
@SLOW
def test_packed_base_is_sharded_between_blocks(tmp_path: Path):
    convert(find("story"), tmp_path / "packed.gguf", ggml_type=GGMLType.Q8_0)
    settings = small_settings(tmp_path, model=str(tmp_path / "packed.gguf"), dtype="float64", weights="packed")
    one = run_steps(settings, steps=0)
    expected = [one.run_step().loss for _ in range(3)]
    assert on_ranks(4, losses_on_mesh, settings, BOTH, 3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("warm_ranks")
@SLOW
def test_run_resumes_on_a_mesh_and_then_on_another_mesh(tmp_path: Path):
    longer = [small_settings(tmp_path, **FLOAT64, steps=steps, schedule="constant") for steps in (2, 4, 6)]
    folder, expected = tmp_path / "moves", run_one_process(longer[2], tmp_path / "stays")
    run_one_process(longer[0], folder)
    for settings, axes in zip(longer[1:], (BOTH, {"dp": 3, "tp": 1}), strict=True):
        (note, *_) = on_ranks(axes["dp"] * axes["tp"], settings_run, settings, folder, axes)
        assert_tells(note, ", ".join(f"{name}={size}" for name, size in axes.items()))
    assert_same_run(folder, expected, rel=1e-12)


def settings_run(settings: Any, folder: Path, axes: Mapping[str, int]) -> list[str]:
    return made_run(settings, folder, axes, resume=True)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("model", "axes", "dtype"),
    [
        ("micro-llama", {"dp": 1, "tp": 2}, "float64"),
        pytest.param("micro-llama", BOTH, "float64", marks=SLOW),
        pytest.param("micro-llama", BOTH, "float32", marks=SLOW),
        pytest.param("micro-llama", BOTH, "bfloat16", marks=SLOW),
        pytest.param("micro-qwen3", {"dp": 2, "tp": 1}, "float64", marks=SLOW),
        pytest.param("micro-qwen3", {"dp": 4, "tp": 1}, "float32", marks=SLOW),
        pytest.param("micro-llama", {"dp": 4, "tp": 1}, "float64", marks=SLOW),
    ],
)
def test_training_checkpoints_pass_on_a_mesh(model: str, axes: Mapping[str, int], dtype: str):
    n_rows, failed = on_ranks(axes["dp"] * axes["tp"], compare_training, model, axes, dtype)
    assert failed == []
    assert n_rows > 500


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "axes", "first", "max_rows"),
    [
        ("unsummed factor", {"dp": 1, "tp": 2}, "17 gradient.q_proj.lora_A", 900),
        pytest.param("mean of means", {"dp": 2, "tp": 1}, "17 gradient.q_proj.lora_A", 900, marks=SLOW),
        pytest.param("attached late", {"dp": 2, "tp": 1}, "17 gradient.q_proj.lora_A", 900, marks=SLOW),
        pytest.param("averaged", {"dp": 2, "tp": 1}, "17 gradient.q_proj.lora_A", 900, marks=SLOW),
        pytest.param("counted twice", {"dp": 2, "tp": 1}, "18 grad_norm", 900, marks=SLOW),
    ],
)
def test_distributed_training_fault_is_located(fault: str, axes: Mapping[str, int], first: str, max_rows: int):
    n_rows, failed = on_ranks(2, compare_training, "micro-llama", axes, "float64", fault)
    assert failed[0] == first
    assert not any(row.startswith(("15", "16")) for row in failed)
    assert 20 < len(failed) < n_rows <= max_rows


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_leave_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert on_ranks(1, int, "7") == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("warm_ranks")
@SLOW
def test_rank_dependent_dropout_changes_the_run(tmp_path: Path):
    settings = small_settings(tmp_path, **FLOAT64, dropout=0.3)
    run_one_process(settings, tmp_path / "one")
    on_ranks(2, made_run, settings, tmp_path / "mesh", {"dp": 2, "tp": 1}, "seed of the rank")
    one, other = (lines(tmp_path / name) for name in ("one", "mesh"))
    assert one[0] == pytest.approx(other[0], rel=1e-12)  # nothing is dropped where it is validated
    assert abs(one[2]["loss"] / other[2]["loss"] - 1) > 1e-6


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.slow_cases("changes0-facts0")
@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"eight_bit": True}, ("mesh", "8 bits")),
        ({"batch_size": 1}, ("mesh", "2 ranks of dp")),
        ({"model": "micro-qwen3"}, ("tensor parallel", "2 ranks", "heads 15", "KV heads 3")),
    ],
)
def test_unsupported_mesh_settings_are_refused_on_every_rank(
    tmp_path: Path, changes: Mapping[str, Any], facts: tuple[str, ...]
):
    assert_tells(on_ranks(4, refusal_message, small_settings(tmp_path, **{**FLOAT64, **changes}), BOTH), *facts)


@pytest.mark.usefixtures("warm_ranks")
def test_adapter_attached_after_sharding_is_refused(tmp_path: Path):
    assert_tells(
        on_ranks(1, attach_after_sharding, small_settings(tmp_path, **FLOAT64)), "adapter 'second'", "parallelize"
    )


def attach_after_sharding(settings: Any) -> str:
    from llorch.pytorch.distributed.launch import leave, start
    from llorch.pytorch.lora.adapters import attach
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training

    training = Training(plan_training(settings, start({"dp": 1, "tp": 1})))
    with pytest.raises(ValueError, match=r"^adapter 'second': ") as error:
        attach(training.module, training.plan.initial, name="second", trainable=True)
    leave()
    return str(error.value)


def refusal_message(settings: Any, axes: Mapping[str, int]) -> str:
    from llorch.pytorch.distributed.launch import leave, start
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training

    with pytest.raises(ValueError, match=r"^(mesh|tensor parallel): ") as error:
        Training(plan_training(settings, start(axes)))
    leave()
    return str(error.value)


def start_nodes(folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Two agents, of which the first keeps the store by which they meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = f"--rdzv-backend c10d --rdzv-id test --rdzv-endpoint localhost:{port} --local-addr localhost".split()
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *meeting]
    run = [PROGRAM, *arguments(folder, *options, mesh="dp=2,tp=2")]
    return [started([*command, "--rdzv-conf", f"is_host={is_host}", *run]) for is_host in (1, 0)]


def kill_node(agent: subprocess.Popen[str]) -> None:
    """The agent and its ranks, at once."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agent.communicate()


@pytest.mark.slow
@pytest.mark.nightly_cases("with the store")
@pytest.mark.parametrize("lost", [0, 1], ids=["with the store", "the other one"])
def test_lost_node_ends_the_other_with_one_line_and_both_resume(lost: int, tmp_path: Path):
    agents = start_nodes(tmp_path, "--steps", "400", "--rank-timeout", "20")
    wait_for_steps(tmp_path, 5)
    kill_node(agents[lost])
    code, said = ended(agents[1 - lost])
    ours = [line for line in said if line.startswith("llorch: ")]
    assert code == 1
    assert len(ours) in (1, 2), said  # both ranks that are left may see it before one has told the other
    assert all(line.startswith(("llorch: lost ", "llorch: waited 20 s ")) for line in ours)
    done = last_step(tmp_path)
    assert done >= 2  # whole before that of step 4 began; that is written beside the steps
    go_on = ("--steps", str(done + 2), "--resume", "--allow-change")
    if lost == 0:
        assert [ended(agent)[0] for agent in start_nodes(tmp_path, *go_on)] == [0, 0]
    else:  # on one node, whose ranks start in a tenth of the time
        assert invoke_on_mesh(tmp_path, *arguments(tmp_path, *go_on, mesh="dp=2,tp=2")).exit_code == 0
    assert last_step(tmp_path) == done + 2

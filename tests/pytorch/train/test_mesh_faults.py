"""What goes wrong on one rank of a training: all end with one line and one exit code; the last snapshot is whole."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.command_line import spawn
from helpers.mesh_programs import (
    PROGRAM,
    TORCHRUN,
    adapter,
    arguments,
    ended,
    failed,
    last_step,
    started,
    wait_for_steps,
)
from helpers.refusals import assert_tells

from llorch.training.snapshots import SnapshotStore


@pytest.mark.slow
def test_killed_rank_is_reported_and_the_run_resumes_in_one_process(tmp_path: Path):
    code, said = failed(tmp_path, "killed:1")
    assert (code, len(said)) == (3, 1), said
    assert said[0].startswith("llorch: rank 1 of 2: ")
    assert_tells(said[0], "Signal 9 (SIGKILL)")
    assert last_step(tmp_path) in (2, 4)
    alone = spawn("lora", "train", "-o", str(tmp_path / "run"), "--resume")
    assert alone.returncode == 0, alone.stderr
    assert last_step(tmp_path) == 8


@pytest.mark.parametrize(
    ("fault", "code", "facts"),
    [
        ("full:1", 74, ("step 2", "rank 1", "No space left")),
        pytest.param("missing:1", 3, ("rank 1", "/models/of-this-machine"), marks=pytest.mark.slow),
        pytest.param("nan:1", 2, ("step 1", "finite", "nan"), marks=pytest.mark.slow),
        pytest.param(
            "version:1", 2, ("environment.packages.torch", "rank 0"), marks=pytest.mark.slow, id="another version"
        ),
        pytest.param("file:1", 2, ("base", "rank 0"), marks=pytest.mark.slow, id="another model"),
    ],
)
def test_failure_on_one_rank_ends_all_with_its_message_and_exit_code(
    fault: str, code: int, facts: tuple[str, ...], tmp_path: Path
):
    actual, said = failed(tmp_path, fault)
    assert (actual, len(said)) == (code, 1), said
    assert_tells(said[0], *facts)
    assert not SnapshotStore(tmp_path / "run").steps()
    assert (tmp_path / "run").exists() == (fault in ("full:1", "nan:1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "facts"),
    [
        ("tp=3", (), ("tensor parallel", "3 ranks", "KV heads 2")),
        ("dp=2", ("--batch-size", "1"), ("mesh", "2 ranks")),
        ("dp=2", ("--eight-bit",), ("mesh", "8 bits")),
    ],
)
def test_unsupported_mesh_settings_are_refused_in_one_line(
    mesh: str, options: tuple[str, ...], facts: tuple[str, ...], tmp_path: Path
):
    code, said = failed(tmp_path, "", *options, mesh=mesh)
    assert (code, len(said)) == (2, 1), said
    assert said[0].startswith("llorch: ")
    assert_tells(said[0], *facts)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_launched_ranks_refuse_a_wrong_mesh_size_and_an_existing_run(tmp_path: Path):
    launch = [*TORCHRUN, "--nproc-per-node", "2", PROGRAM]
    said = ended(started([*launch, *arguments(tmp_path, mesh="tp=4")]))[1]
    assert_tells(said[0], "llorch: mesh", expected=("4 ranks", "dp=1 x tp=4"), got=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    code, said = ended(started([*launch, *arguments(tmp_path)]))
    assert code == 1
    assert_tells(said[0], "--resume", "folder")
    assert {line.split()[2] for line in said if "exitcode  :" in line} == {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_other_ranks_time_out_on_a_hanging_rank(frozen: int, tmp_path: Path):
    code, said = failed(tmp_path, f"frozen:{frozen}", "--rank-timeout", "5")
    assert (code, len(said)) == (3, 1), said
    assert_tells(said[0], "llorch", "5 s", f"rank {frozen} of 2")
    assert last_step(tmp_path) in (2, 4)


@pytest.mark.slow
def test_run_restarted_by_a_launcher_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path):
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2", PROGRAM]
    code, said = ended(started([*command, *arguments(tmp_path / "a")], "killed:1"))
    assert code == 0, said
    ours = [line for line in said if line.startswith("llorch: ")]
    assert len(ours) == 1, said
    assert ours[0].startswith("llorch: lost rank 1 of 2, whose process ended")
    assert failed(tmp_path / "b", "") == (0, [])
    assert adapter(tmp_path / "a") == adapter(tmp_path / "b")


@pytest.mark.nightly_cases(but=["15-launcher1"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, (*TORCHRUN, "--nproc-per-node", "2"), marks=pytest.mark.slow, id="INT torchrun"),
        pytest.param(signal.SIGTERM, (*TORCHRUN, "--nproc-per-node", "2"), marks=pytest.mark.slow, id="TERM torchrun"),
    ],
)
def test_signal_finishes_the_step_saves_and_prints_how_to_resume(
    number: int, launcher: tuple[str, ...], tmp_path: Path
):
    command = [*(launcher or [sys.executable]), PROGRAM]
    process = started([*command, *arguments(tmp_path, "--steps", "400", "--save-every", "0")])
    wait_for_steps(tmp_path, 2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    code, said = ended(process)
    ours = [line for line in said if line.startswith("llorch: ")]
    assert code == (1 if launcher else 128 + number), said
    assert said == ours or launcher
    done = last_step(tmp_path)
    assert len(ours) == 1
    assert_tells(ours[0], f"{done} of 400 steps", tmp_path / "run", "--resume")
    if launcher:
        return
    assert failed(tmp_path, "", "--resume", "--steps", str(done + 2), "--allow-change")[0] == 0
    assert last_step(tmp_path) == done + 2

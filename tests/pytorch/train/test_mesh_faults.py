"""What goes wrong on one rank of a training: all end with one line and one exit code; the last snapshot is whole."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import REPOSITORY, spawn
from training_runs import small_data

from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.train.snapshots import SnapshotStore

PROGRAM = str(REPOSITORY / "tests" / "support" / "faulty_ranks.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TALK = ("model: ", "data: ", "steps: ", "step ", "train.jsonl: ", "valid.jsonl: ")  # of a run that goes well


def arguments(folder: Path, *more: str, mesh: str = "dp=2") -> list[str]:
    """A run of 8 steps, of which every second is saved."""
    data = folder / "data"
    if not data.exists():
        small_data(folder)
    shape = "--steps 8 --batch-size 4 --save-every 2 --eval-every 100".split()
    return [
        "lora",
        "train",
        "micro-llama",
        "--data",
        str(data),
        "-o",
        str(folder / "run"),
        *shape,
        "--mesh",
        mesh,
        *more,
    ]


def started(command: list[str], fault: str = "") -> subprocess.Popen[str]:
    """A process, in a group of its own."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=REPOSITORY,
        env=os.environ | {"FAULT": fault},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit code, and the lines on stderr that tell of no progress."""
    _, said = process.communicate(timeout=300)
    return process.returncode, [line for line in said.splitlines() if not line.startswith(TALK)]


def failed(folder: Path, fault: str, *more: str, mesh: str = "dp=2") -> tuple[int, list[str]]:
    return ended(started([sys.executable, PROGRAM, *arguments(folder, *more, mesh=mesh)], fault))


def last_step(folder: Path) -> int:
    """Of the last snapshot, which is read."""
    found = SnapshotStore(folder / "run").newest(read_parts)
    assert found is not None
    assert not found.skipped
    return found.step


def adapter(folder: Path) -> bytes:
    return (folder / "run" / "adapter_model.safetensors").read_bytes()


def wait_for_steps(folder: Path, n_steps: int) -> None:
    log, end = folder / "run" / "log.jsonl", time.monotonic() + 120
    while not log.exists() or sum("loss" in json.loads(line) for line in log.read_text().splitlines()) < n_steps:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_whose_rank_is_killed_says_so_and_goes_on_in_one_process(tmp_path: Path):
    code, said = failed(tmp_path, "killed:1")
    assert code == 3
    assert len(said) == 1, said
    assert said[0].startswith("llorch: rank 1 of 2: its process ended (Signal 9 (SIGKILL)")
    assert last_step(tmp_path) == 2
    alone = spawn("lora", "train", "-o", str(tmp_path / "run"), "--resume")
    assert alone.returncode == 0, alone.stderr
    assert last_step(tmp_path) == 8


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("full:1", 74, "snapshot of step 2 not saved: rank 1: No space left on device; there is none before it"),
        pytest.param("missing:1", 3, "rank 1: /models/of-this-machine: No such file", marks=pytest.mark.slow),
        pytest.param("nan:1", 2, "step 1: expected a finite loss and gradient, got", marks=pytest.mark.slow),
        pytest.param(
            "version:1", 2, "environment.packages.torch: rank 0 has", marks=pytest.mark.slow, id="another version"
        ),
        pytest.param("file:1", 2, "base: rank 0 has", marks=pytest.mark.slow, id="another model"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_its_line_and_its_code(fault: str, code: int, line: str, tmp_path: Path):
    got, said = failed(tmp_path, fault)
    assert got == code
    assert len(said) == 1, said
    assert line in said[0]
    assert not SnapshotStore(tmp_path / "run").steps()
    assert (tmp_path / "run").exists() == (fault in ("full:1", "nan:1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more", "line"),
    [
        ("tp=3", (), "tensor parallel: expected sizes that 3 ranks divide, got KV heads 2"),
        ("dp=2", ("--batch-size", "1"), "mesh: expected at least a row of each forward pass for each of the 2 ranks"),
        ("dp=2", ("--eight-bit",), "mesh: moments of 8 bits share scales"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_in_one_line(mesh: str, more: tuple[str, ...], line: str, tmp_path: Path):
    code, said = failed(tmp_path, "", *more, mesh=mesh)
    assert (code, len(said)) == (2, 1), said
    assert said[0].startswith(f"llorch: {line}")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_of_a_launcher_refuse_together_a_mesh_of_another_size_and_a_folder_with_a_run(tmp_path: Path):
    launch = [*TORCHRUN, "--nproc-per-node", "2", PROGRAM]
    assert ended(started([*launch, *arguments(tmp_path, mesh="tp=4")]))[1][0] == (
        "llorch: mesh: expected 4 ranks for dp=1 x tp=4, got 2"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    code, said = ended(started([*launch, *arguments(tmp_path)]))
    assert (code, said[0].endswith("go on with --resume, or choose another folder")) == (1, True)
    assert [line for line in said if "exitcode  :" in line] == sorted(line for line in said if "exitcode  : 2" in line)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_for_a_rank_that_does_not_answer_the_others_wait_so_long(frozen: int, tmp_path: Path):
    code, said = failed(tmp_path, f"frozen:{frozen}", "--rank-timeout", "5")
    assert code == 3
    assert said == [f"llorch: waited 5 s for rank {frozen} of 2, in vain; its process may hang, or its machine"]
    assert last_step(tmp_path) == 2


@pytest.mark.slow
def test_a_run_that_a_launcher_starts_again_has_the_bits_of_one_that_was_not_disturbed(tmp_path: Path):
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2", PROGRAM]
    code, said = ended(started([*command, *arguments(tmp_path / "a")], "killed:1"))
    assert code == 0, said
    ours = [line for line in said if line.startswith("llorch: ")]
    assert len(ours) == 1, said
    assert ours[0].startswith("llorch: lost rank 1 of 2, whose process ended")
    assert failed(tmp_path / "b", "") == (0, [])
    assert adapter(tmp_path / "a") == adapter(tmp_path / "b")


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, (*TORCHRUN, "--nproc-per-node", "2"), marks=pytest.mark.slow, id="INT torchrun"),
        pytest.param(signal.SIGTERM, (*TORCHRUN, "--nproc-per-node", "2"), marks=pytest.mark.slow, id="TERM torchrun"),
    ],
)
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(number: int, launcher: tuple[str, ...], tmp_path: Path):
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
    assert ours == [
        f"llorch: stopped after {done} of 400 steps, which are saved in {tmp_path / 'run'}; go on with --resume"
    ]
    if launcher:
        return
    assert failed(tmp_path, "", "--resume", "--steps", str(done + 2), "--allow-change")[0] == 0
    assert last_step(tmp_path) == done + 2

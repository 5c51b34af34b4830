"""`--threads`: what a command computes with, what it says of it, and what it leaves behind."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_cli_refuses
from helpers.training_runs import small_data
from threadpoolctl import threadpool_info

from llorch.model.model import Model
from llorch.runtime.threads import VARIABLES, end_waiting_threads, limit_threads


def n_threads() -> tuple[int, int]:
    """Threads of NumPy and of torch."""
    return max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), torch.get_num_threads()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch):
    """A process with three threads whose user has said nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with limit_threads(3):
        yield


@pytest.fixture
def threads_per_pass(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The threads of every pass of a NumPy model."""
    found, forward = [], Model._forward

    def watched(self, *args, **kwargs):
        found.append(n_threads())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Model, "_forward", watched)
    return found


def run(*options: str) -> str:
    return invoke("run", "story", "Once", "-n", "1", "-v", *options).stderr


@pytest.mark.usefixtures("three")
def test_a_small_model_computes_with_one_thread_and_the_process_gets_back_what_it_had(threads_per_pass: list):
    assert run().endswith("; threads: 1\n")
    assert (threads_per_pass, n_threads()) == ([(1, 1)], (3, 3))


@pytest.mark.usefixtures("three")
def test_a_large_model_computes_with_all(threads_per_pass: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.runtime.threads.SMALL", 1)
    assert run().endswith("; threads: all\n")
    assert threads_per_pass == [(3, 3)]


@pytest.mark.usefixtures("three")
def test_thread_settings_of_the_user_are_obeyed(threads_per_pass: list, monkeypatch: pytest.MonkeyPatch):
    assert run("--threads", "2").endswith("; threads: 2\n")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert run().endswith("; threads: OPENBLAS_NUM_THREADS=3\n")
    assert run("--threads", "2").endswith("; threads: 2\n")
    assert threads_per_pass == [(2, 2), (3, 3), (2, 2)]


@pytest.mark.usefixtures("three")
def test_failed_command_restores_the_thread_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Model, "_forward", None)
    assert invoke("run", "story", "Once").exit_code == 70
    assert n_threads() == (3, 3)


def test_every_verb_that_computes_has_the_option():
    computing = ("run", "verify", "trace", "quality", "bench", "lora eval", "lora verify-resume")
    calls = [f"{verb} --help" for verb in computing] + ["lora train --help-all"]
    assert [call for call in calls if "--threads INTEGER" not in invoke(*call.split()).stdout] == []


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="NOT RUN: no list of threads here")
@pytest.mark.usefixtures("three")
def test_threads_that_are_let_go_end_and_others_take_their_place():
    here = Path("/proc/self/task")
    x = torch.ones(1 << 20)
    x.exp()
    before = len([*here.iterdir()])
    end_waiting_threads()
    end = time.monotonic() + 60  # a thread that was joined is listed for a moment more
    while len([*here.iterdir()]) > before - 2:
        assert time.monotonic() < end
    assert torch.equal(x.exp(), torch.full_like(x, math.e))
    assert len([*here.iterdir()]) == before


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT")


@pytest.mark.parametrize(
    ("by_the_user", "expected"),
    [
        ({}, ("passive", "3000", "4")),
        ({"OPENBLAS_THREAD_TIMEOUT": "9", "GOMP_SPINCOUNT": "7"}, ("passive", "7", "9")),
        ({"OMP_WAIT_POLICY": "passive"}, ("passive", "None", "4")),
    ],
)
def test_libraries_are_told_how_to_wait_before_they_are_loaded(by_the_user: dict[str, str], expected: tuple[str, ...]):
    watch = f"""
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name in ("numpy", "torch"):
            print(name, *map(os.environ.get, {WAITING}), flush=True)
        if name == "torch":
            os._exit(0)
sys.meta_path.insert(0, Watch())
from llorch.cli import main
main(["run", "story", "Once", "-n", "1", "--backend", "torch"], prog_name="llorch")
"""
    said = {name: value for name, value in os.environ.items() if name not in WAITING} | by_the_user
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, cwd=REPOSITORY, env=said)
    assert done.stdout.splitlines() == [" ".join((name, *expected)) for name in ("numpy", "torch")], done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_resumed_run_uses_its_first_thread_count(tmp_path: Path):
    data, output = small_data(tmp_path), str(tmp_path / "run")
    settings = ("--data", str(data), "--steps", "2", "--batch-size", "2", "--r", "2", "--lr", "0.01")
    begun = invoke("lora", "train", "micro-qwen3", *settings, "-o", output, "--threads", "2")
    assert "float32 on cpu, threads 2, " in begun.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["environment"]["threads"] == 2
    assert "float32 on cpu, threads 2, " in invoke("lora", "train", "-o", output, "--resume").stderr
    other = invoke("lora", "train", "-o", output, "--resume", "--threads", "1")
    assert_cli_refuses(other, 2, "environment.threads", 2, 1)

"""The faults of benchmarks/serve_faults.py, done to real servers."""

import json
import signal
import subprocess
import sys

import pytest
from helpers.command_line import REPOSITORY

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

QUICK = ("S15", "S18")  # a signal under load, and all that a process writes to stderr
ELSEWHERE = {  # also done by plain tests with fewer processes
    "S5": "test_app.py: an answer that takes too long",
    "S6": "test_bad_bodies.py",
    "S8": "test_guard.py and tests/cli/test_serve.py: keys",
    "S9": "test_guard.py: hosts and origins; test_app.py: models",
    "S11": "test_app.py: the texts of control tokens",
    "G13": "test_templates.py",
    "S13": "test_engine.py: what a job and what a step raises",
    "S14": "tests/cli/test_serve.py: an engine that dies",
    "S15c": "here, at two moments of the start instead of many",
}
LONG = ("S1", "S2", "S2b", "S3", "S4", "S4b", "S7", "S14b", "S15b")


def done(numbers: tuple[str, ...], *options: str) -> list[tuple[str, bool, str]]:
    only = [word for number in numbers for word in ("--only", number)]
    command = [sys.executable, "benchmarks/serve_faults.py", "--json", "--jobs", "4", *only, *options]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False)
    assert run.stdout, run.stderr
    rows = json.loads(run.stdout)
    assert run.returncode == (0 if all(row["ok"] for row in rows) else 1)
    return [(row["fault"], row["ok"], row["measured"]) for row in rows]


def test_faults_hurt_nobody_but_themselves():
    rows = done(QUICK)
    assert [number for number, _, _ in rows] == list(QUICK)
    assert [row for row in rows if not row[1]] == []


@pytest.mark.parametrize("seconds", [0.1, 0.6])
def test_server_that_is_stopped_while_it_starts_ends_and_says_nothing(monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from benchmarks.serve_faults_of_work import _stopped_after

    command = [sys.executable, "-m", "llorch", "serve", "story", "--port", "0"]
    code, _, said_or_left = _stopped_after(command, seconds)
    assert code in (-signal.SIGTERM, 0)
    assert said_or_left == ""


@pytest.mark.slow
@pytest.mark.nightly_cases(but=["S14b-*"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(
    "numbers",
    [*(pytest.param((number,), id=number) for number in LONG), pytest.param(tuple(ELSEWHERE), id="elsewhere")],
)
def test_slow_faults_hurt_nobody_but_themselves(numbers: tuple[str, ...], backend: str):
    rows = done(numbers, "--backend", backend)
    assert sorted(number for number, _, _ in rows) == sorted(numbers)
    assert [row for row in rows if not row[1]] == []


def test_every_fault_is_in_a_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from benchmarks.serve_faults import FAULTS

    assert sorted(fault.number for fault in FAULTS) == sorted([*QUICK, *LONG, *ELSEWHERE])

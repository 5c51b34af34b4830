"""The faults of benchmarks/serve_faults.py, done to real servers."""

import json
import subprocess
import sys

import pytest
from command_line import REPOSITORY

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

QUICK = ("S5", "S6", "S8", "S9", "S11", "G13", "S13", "S14", "S15", "S15c", "S18")
LONG = ("S1", "S2", "S2b", "S3", "S4", "S4b", "S7", "S14b", "S15b")


def done(numbers: tuple[str, ...], *options: str) -> list[tuple[str, bool, str]]:
    only = [word for number in numbers for word in ("--only", number)]
    command = [sys.executable, "benchmarks/serve_faults.py", "--json", *only, *options]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False)
    assert run.stdout, run.stderr
    rows = json.loads(run.stdout)
    assert run.returncode == (0 if all(row["ok"] for row in rows) else 1)
    return [(row["fault"], row["ok"], row["measured"]) for row in rows]


def test_faults_hurt_nobody_but_themselves():
    rows = done(QUICK)
    assert [number for number, _, _ in rows] == list(QUICK)
    assert [row for row in rows if not row[1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_nor_do_those_that_take_long(backend: str):
    rows = done(LONG, "--backend", backend)
    assert [number for number, _, _ in rows] == list(LONG)
    assert [row for row in rows if not row[1]] == []


def test_every_fault_is_in_a_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from benchmarks.serve_faults import FAULTS

    assert sorted(fault.number for fault in FAULTS) == sorted(QUICK + LONG)

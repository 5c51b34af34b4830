"""Adapters that hang, crash or take all memory, beside those that do their work."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import assert_tells

from benchmarks.atlas.runs import Request, RunEnd, run_all, run_program

ADAPTER = """
import os, sys, time
from harness import answer

def load(run):
    if run.model == "refuses":
        raise ValueError("sliding windows are not supported")
    if run.model == "breaks":
        return {}["rope_theta"]
    if run.model == "exits":
        os._exit(7)
    if run.model == "aborts":
        print("out of luck", file=sys.stderr, flush=True)
        os.abort()
    if run.model == "hangs":
        time.sleep(3600)
    if run.model == "children hang":
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).wait()
    if run.model == "grows":
        held = [bytes([1]) * 200_000_000]
        time.sleep(3600)

def compute(engine, run, dump):
    ids, first_position = run.passes[0]
    dump.begin(ids, first_position)

answer("numpy", load, compute)
"""


@pytest.fixture
def asked(tmp_path: Path):
    def ask(*models: str, adapter: str = ADAPTER, seconds: float = 60, **how: Any) -> list[RunEnd]:
        (tmp_path / "adapter.py").write_text(adapter)
        requests = [Request(each, [[1, 2]], str(tmp_path / each), str(tmp_path / "scratch")) for each in models]
        command = [sys.executable, str(tmp_path / "adapter.py")]
        return run_all(command, requests, tmp_path, seconds=seconds, start=60, memory=100_000_000, **how)

    return ask


def test_seconds_are_those_of_the_run_and_not_of_the_look(asked, tmp_path: Path):
    """Three runs take 0.02 s each by their own clock and end before the first look."""
    head = "def compute(engine, run, dump):\n"
    ended = asked(*"abc", adapter=ADAPTER.replace(head, f"{head}    time.sleep(0.02)\n"))
    measured = [json.loads((tmp_path / each / "said.json").read_text())["seconds"] for each in "abc"]
    assert [each.seconds for each in ended] == measured
    assert min(measured) >= 0.02


@pytest.mark.slow_cases(but=["breaks", "refuses"])
@pytest.mark.parametrize(
    ("model", "verdict", "error"),
    [
        ("refuses", "refused", r"^ValueError: sliding windows are not supported$"),
        ("breaks", "crashed", r"^KeyError: 'rope_theta' \(adapter.py:9, load\)$"),
        ("exits", "crashed", r"\bstatus 7: .*\bnothing$"),
        ("aborts", "crashed", r"\bSIGABRT: out of luck$"),
        ("grows", "too large", r" 0\.[12] GB, .* 0\.1 GB$"),  # seen while it grows, or after
    ],
    ids=["refuses", "breaks", "exits", "aborts", "grows"],
)
def test_what_ends_badly_is_a_word_and_the_rest_goes_on(asked, model: str, verdict: str, error: str):
    first, ended, last = asked("first", model, "last")
    assert ended.verdict == verdict
    assert re.search(error, ended.error)
    assert first.verdict == last.verdict == "done"


@pytest.mark.parametrize("model", ["hangs", "children hang"])
def test_what_hangs_is_ended_with_all_that_it_started(asked, model: str):
    words = [each.verdict for each in asked("first", model, "last", seconds=2)]  # those that start may take longer
    assert words == ["done", "hung", "done"]


def test_every_end_is_told_once(asked):
    told: list[RunEnd] = []
    ended = asked("a", "exits", "b", report=told.append)
    assert told == ended
    assert len(ended) == 3


def test_no_run_reaches_the_network(asked):
    code = "from os import environ as e; exit(e['HF_HUB_OFFLINE'] != '1' or not e['https_proxy'].endswith(':9'))"
    (ended,) = asked("a", adapter=code)
    assert_tells(ended.error, "status 0")


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import sys; print(1); print(2, file=sys.stderr)", "1\n"),
        ("print(1); raise ValueError", ""),
        ("import harness; print(1)", ""),  # it must do without what adapters have
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])", ""),
    ],
)
def test_a_program_that_ends_badly_or_late_prints_nothing(program: str, printed: str, tmp_path: Path):
    seconds = 3 if "sleep" in program else 60
    assert run_program([sys.executable, "-c", program], tmp_path / "here", seconds=seconds) == printed

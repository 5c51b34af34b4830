"""Adapters that hang, crash or take all memory, beside those that do their work."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import assert_tells, refuses

from benchmarks.atlas.catalogue import ENGINES, AtlasEngine
from benchmarks.atlas.runs import (
    NotInstalled,
    Request,
    RunEnd,
    download_bytes,
    is_to_install,
    python_of,
    run_all,
    run_program,
)

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
    def ask(*models: str, adapter: str = ADAPTER, seconds: float = 60, **options: Any) -> list[RunEnd]:
        (tmp_path / "adapter.py").write_text(adapter)
        requests = [Request(each, [[1, 2]], str(tmp_path / each), str(tmp_path / "scratch")) for each in models]
        command = [sys.executable, str(tmp_path / "adapter.py")]
        return run_all(command, requests, tmp_path, seconds=seconds, start=60, memory=100_000_000, **options)

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
    ("model", "outcome", "error"),
    [
        ("refuses", "refused", r"^ValueError: sliding windows are not supported$"),
        ("breaks", "crashed", r"^KeyError: 'rope_theta' \(adapter.py:9, load\)$"),
        ("exits", "crashed", r"\bstatus 7: .*\bnothing$"),
        ("aborts", "crashed", r"\bSIGABRT: out of luck$"),
        ("grows", "too large", r" 0\.[12] GB, .* 0\.1 GB$"),  # seen while it grows, or after
    ],
    ids=["refuses", "breaks", "exits", "aborts", "grows"],
)
def test_failed_run_has_an_outcome_and_the_next_ones_start(asked, model: str, outcome: str, error: str):
    first, ended, last = asked("first", model, "last")
    assert ended.outcome == outcome
    assert re.search(error, ended.error)
    assert first.outcome == last.outcome == "done"


@pytest.mark.parametrize("model", ["hangs", "children hang"])
def test_hanging_run_is_ended_with_its_children(asked, model: str):
    words = [each.outcome for each in asked("first", model, "last", seconds=2)]  # those that start may take longer
    assert words == ["done", "hung", "done"]


def test_every_end_is_reported_once(asked):
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


installs = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path) -> AtlasEngine:
    made = AtlasEngine("some", "some", folder=tmp_path)
    lock(made, "8.2.1")
    return made


def lock(engine: AtlasEngine, version: str) -> None:
    engine.lock.write_text(f"# 102215 bytes to download\nclick=={version}\n")


def version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('click'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@installs
def test_environment_is_made_once_for_its_requirements(engine: AtlasEngine, tmp_path: Path):
    python = python_of(engine, tmp_path)
    assert version(python) == "8.2.1"
    assert not is_to_install(engine, tmp_path)
    made = (tmp_path / "environments" / "some" / "pyvenv.cfg").stat().st_mtime_ns
    assert python_of(engine, tmp_path) == python
    assert (tmp_path / "environments" / "some" / "pyvenv.cfg").stat().st_mtime_ns == made
    lock(engine, "8.2.0")
    assert is_to_install(engine, tmp_path)
    assert version(python_of(engine, tmp_path)) == "8.2.0"


@installs
def test_failed_install_gives_the_reason_and_creates_no_environment(engine: AtlasEngine, tmp_path: Path):
    lock(engine, "0.0.0.1")
    with refuses(NotInstalled, "ERROR", "click==0.0.0.1"):
        python_of(engine, tmp_path)
    assert not (tmp_path / "environments" / "some").exists()


@pytest.mark.parametrize("engine", [each for each in ENGINES if not each.why_not], ids=lambda engine: engine.name)
def test_lock_pins_each_package_in_one_line(engine: AtlasEngine, tmp_path: Path):
    assert is_to_install(engine, tmp_path) is not engine.is_reference_engine
    if engine.is_reference_engine:
        return
    assert 1e7 < download_bytes(engine) < 1e10
    head, *lines = engine.lock.read_text().splitlines()
    assert head.startswith("#")
    versions = dict(line.split()[0].removesuffix(";").split("==") for line in lines)
    for line in engine.lock.with_suffix(".txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = re.sub(r"\[.*\]", "", line).partition("==")
            assert versions[name].partition("+")[0] == version


def test_package_of_no_registry_is_not_tried(tmp_path: Path):
    with pytest.raises(NotInstalled, match="no wheel"):
        python_of(AtlasEngine("other", "other", why_not="no wheel"), tmp_path)
    assert not (tmp_path / "environments").exists()

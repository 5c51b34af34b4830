"""An environment of its own for each engine."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers.refusals import refuses

from benchmarks.atlas.catalogue import ENGINES, AtlasEngine
from benchmarks.atlas.runs import NotInstalled, download_bytes, is_to_install, python_of

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
def test_it_is_made_once_for_its_requirements(engine: AtlasEngine, tmp_path: Path):
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


def test_what_no_registry_has_is_not_tried(tmp_path: Path):
    with pytest.raises(NotInstalled, match="no wheel"):
        python_of(AtlasEngine("other", "other", why_not="no wheel"), tmp_path)
    assert not (tmp_path / "environments").exists()

"""An environment of its own for each engine."""

import re
import subprocess
from pathlib import Path

import pytest
from runs.refusals import refuses

from llorch.atlas.catalogue import ENGINES, AtlasEngine
from llorch.atlas.environments import NotInstalled, download_bytes, is_to_install, python_of

HASHES = {
    "8.2.0": "6b303f0b2aa85f1cb4e5303078fadcbcd4e476f114fab9b5007005711839325c",
    "8.2.1": "61a3265b914e850b85317d0b3109c7f8cd35a670f963866005d6ef1d5175a12b",
}
installs = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path) -> AtlasEngine:
    made = AtlasEngine("some", "some", folder=tmp_path)
    lock(made, "8.2.1")
    return made


def lock(engine: AtlasEngine, version: str, *, digest: str = "") -> None:
    line = f"click=={version} --hash=sha256:{digest or HASHES[version]}\n"
    engine.lock.write_text(f"# 102215 bytes to download\n{line}")


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
def test_what_cannot_be_installed_says_why_and_leaves_nothing(engine: AtlasEngine, tmp_path: Path):
    lock(engine, "0.0.0.1", digest=HASHES["8.2.1"])
    with refuses(NotInstalled, "ERROR", "click==0.0.0.1"):
        python_of(engine, tmp_path)
    assert not (tmp_path / "environments" / "some").exists()


@installs
def test_package_with_another_hash_is_not_installed(engine: AtlasEngine, tmp_path: Path):
    lock(engine, "8.2.1", digest=HASHES["8.2.0"])
    with refuses(NotInstalled, "HASHES"):
        python_of(engine, tmp_path)


@pytest.mark.parametrize("engine", [each for each in ENGINES if not each.why_not], ids=lambda engine: engine.name)
def test_lock_has_a_hash_for_each_package_and_every_pin(engine: AtlasEngine, tmp_path: Path):
    assert is_to_install(engine, tmp_path) is not engine.is_witness
    if engine.is_witness:
        return
    assert 1e7 < download_bytes(engine) < 1e10
    head, *entries = re.split(r"\n(?=\S)", engine.lock.read_text())
    assert head.startswith("#")
    assert all("--hash=sha256:" in entry for entry in entries)
    locked = {entry.partition("==")[0]: entry for entry in entries}
    for line in engine.lock.with_suffix(".txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = re.sub(r"\[.*\]", "", line).partition("==")
            assert locked[name].split()[0].removesuffix(";").partition("+")[0] == f"{name}=={version}"


def test_what_no_registry_has_is_not_tried(tmp_path: Path):
    with pytest.raises(NotInstalled, match="no wheel"):
        python_of(AtlasEngine("other", "other", why_not="no wheel"), tmp_path)
    assert not (tmp_path / "environments").exists()

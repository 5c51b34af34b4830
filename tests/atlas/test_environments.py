"""An environment of its own for each engine."""

import subprocess
from pathlib import Path

import pytest
from refusals import refuses

from llorch.atlas.catalogue import Engine
from llorch.atlas.environments import NotInstalled, python_of

pytestmark = pytest.mark.slow  # they install packages


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    (tmp_path / "some.txt").write_text("click==8.2.1\n")
    return Engine("some", "some", folder=tmp_path)


def version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('click'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_it_is_made_once_for_its_requirements(engine: Engine, tmp_path: Path):
    python = python_of(engine, tmp_path)
    assert version(python) == "8.2.1"
    made = (tmp_path / "environments" / "some" / "pyvenv.cfg").stat().st_mtime_ns
    assert python_of(engine, tmp_path) == python
    assert (tmp_path / "environments" / "some" / "pyvenv.cfg").stat().st_mtime_ns == made
    engine.requirements.write_text("click==8.2.0\n")
    assert version(python_of(engine, tmp_path)) == "8.2.0"


def test_what_cannot_be_installed_says_why_and_leaves_nothing(engine: Engine, tmp_path: Path):
    engine.requirements.write_text("click==0.0.0.1\n")
    with refuses(NotInstalled, "ERROR", "click==0.0.0.1"):
        python_of(engine, tmp_path)
    assert not (tmp_path / "environments" / "some").exists()


def test_what_no_registry_has_is_not_tried(tmp_path: Path):
    with pytest.raises(NotInstalled, match="no wheel"):
        python_of(Engine("other", "other", why_not="no wheel"), tmp_path)
    assert not (tmp_path / "environments").exists()

"""What pyproject.toml, the wheel and CHANGELOG.md say is true of the package."""

import re
import tomllib
from pathlib import Path

import pytest

import llorch
from llorch.builtin import EVERY

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = [file.read_text() for file in (ROOT / "llorch").rglob("*.py")]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_each_extra_is_asked_for_by_a_message_or_makes_nothing_but_haste_or_is_for_developers():
    asked = {extra for source in SOURCES for extra in re.findall(r"MissingExtra\(['\"](\w+)", source)}
    assert asked | {"learn"} | {"dev", "docs"} == EXTRAS.keys()


def test_the_wheel_carries_the_lessons_and_the_goldens_of_every_built_in_model():
    carried = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folders = ["checkpoints", *(f"reference_outputs/{name}" for name in (*EVERY, "quantised"))]
    assert carried == {folder: f"llorch/{folder}" for folder in folders}


def test_the_newest_version_of_the_changelog_is_that_of_the_package():
    assert re.findall(r"^## (\S+)", CHANGELOG, re.MULTILINE)[0] == llorch.__version__


@pytest.mark.parametrize(("old", "new"), re.findall(r"^\| (`.*) \| (`.*) \|$", CHANGELOG, re.MULTILINE))
def test_a_module_that_moved_is_where_the_changelog_says(old: str, new: str):
    def places(cell: str) -> list[Path]:
        names = re.findall(r"`([\w.]+?)(?:\.\*)?`", cell)
        return [ROOT.joinpath("llorch", *name.split(".")) for name in names]

    def exists(path: Path) -> bool:
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    assert [path for path in places(old) if exists(path)] == []
    assert [path for path in places(new) if not exists(path)] == []

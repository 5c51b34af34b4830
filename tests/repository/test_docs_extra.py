"""The site is built with the packages of the extra docs, and with no other that happens to be installed."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BLOCKED = """
import importlib.abc, json, sys
class Blocked(importlib.abc.MetaPathFinder):
    names = set(json.loads(sys.argv.pop(1)))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
NAMES = (
    f"{BLOCKED}\nsys.path.insert(0, '.')\nimport checkpoints.reference as r\nprint(len(r.names()), len(r.commands()))"
)
SITE = (
    f"{BLOCKED}\nimport runpy\nsys.argv[0] = 'checkpoints/build.py'\nrunpy.run_path(sys.argv[0], run_name='__main__')"
)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(lines: list[str]) -> set[str]:
    """Names of the packages that pip installs for some requirements, as far as they are here."""
    found, waiting = set[str](), [(Requirement(line), "") for line in lines]
    while waiting:
        wanted, extra = waiting.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        try:
            here: Distribution = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        for each in ("", *wanted.extras):
            if (key := f"{plain(wanted.name)}[{each}]") not in found:
                found.add(key)
                waiting += [(Requirement(line), each) for line in here.requires or ()]
    return {key.partition("[")[0] for key in found}


def blocked_by(extra: str) -> list[str]:
    """Top-level modules that belong to no package of llorch with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = closure([*project["dependencies"], *project["optional-dependencies"][extra]])
    return [
        module
        for module, packages in packages_distributions().items()
        if module not in ("llorch", "pip", "setuptools", "_distutils_hack", *sys.stdlib_module_names)
        and not {*map(plain, packages)} & installed
    ]


def run_with(extra: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, json.dumps(blocked_by(extra)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_packages_of_other_extras_are_blocked():
    blocked = blocked_by("docs")
    assert not {"click", "numpy", "torch"} & {*blocked}
    assert {*blocked} & {"pytest", "ruff", "_pytest"}


@pytest.mark.slow
def test_reference_pages_need_no_package_beyond_docs():
    done = run_with("docs", NAMES)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 10_000


@pytest.mark.slow
def test_site_is_built_with_the_packages_of_docs(tmp_path: Path):
    pytest.importorskip(
        "sphinx", reason="NOT RUN: sphinx is not installed; pip install -c constraints.txt -e '.[docs]'"
    )
    done = run_with("docs", SITE, "--site", str(tmp_path / "site"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site" / "README.html").is_file() or (tmp_path / "site" / "index.html").is_file()

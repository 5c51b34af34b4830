"""Python code that runs with the packages of one extra of llorch, and with no other that happens to be installed."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
BLOCKED = """
import importlib.abc, json, sys
class Blocked(importlib.abc.MetaPathFinder):
    names = set(json.loads(sys.argv.pop(1)))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def normalize_name(name: str) -> str:
    """Spell the name of a package as pip compares it."""
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
            if (key := f"{normalize_name(wanted.name)}[{each}]") not in found:
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
        and not {*map(normalize_name, packages)} & installed
    ]


def run_with(extra: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that finds the packages of an extra only."""
    command = [sys.executable, "-c", BLOCKED + code, json.dumps(blocked_by(extra)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)

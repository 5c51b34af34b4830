"""A virtual environment for each engine, with pinned versions: what they depend on excludes each other.

Nothing else in the atlas asks the network. Callers say `download_bytes` and ask before they call `python_of`.
"""

import os
import shutil
import sys
from pathlib import Path

from benchmarks.atlas.catalogue import AtlasEngine
from llorch.runtime.worker import run

INSTALL = 900.0  # seconds
_MARK = "llorch-requirements.txt"  # what is installed, once all of it is


class NotInstalled(Exception):
    """An engine that cannot be had here; says why."""


def is_to_install(engine: AtlasEngine, home: Path) -> bool:
    """Tell if `python_of` would fetch packages."""
    return not engine.why_not and not engine.is_reference_engine and not _is_made(engine, _folder_of(engine, home))


def download_bytes(engine: AtlasEngine) -> int:
    """Read how much its packages are, from the first line of its lock: `# 355000000 bytes to download`."""
    return int(engine.lock.read_text(encoding="utf-8").split(maxsplit=2)[1])


def _folder_of(engine: AtlasEngine, home: Path) -> Path:
    return home / "environments" / engine.script


def _is_made(engine: AtlasEngine, folder: Path) -> bool:
    """Tell if the folder holds a complete environment of the engine's current lock file."""
    mark = folder / _MARK
    return mark.exists() and mark.read_text(encoding="utf-8") == engine.lock.read_text(encoding="utf-8")


def python_of(engine: AtlasEngine, home: Path) -> Path:
    """Return the interpreter of an engine's environment below a folder; make the environment if it is missing.

    A reference engine uses the interpreter that runs llorch.

    Raises:
        NotInstalled: Its packages cannot be had, or not in `INSTALL` seconds.
    """
    if engine.why_not:
        raise NotInstalled(engine.why_not)
    if engine.is_reference_engine:
        return Path(sys.executable)
    folder = _folder_of(engine, home)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if _is_made(engine, folder):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _install([sys.executable, "-m", "venv", str(folder)], folder)
    _install([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(engine.lock)], folder)
    shutil.copyfile(engine.lock, folder / _MARK)
    return python


def _install(command: list[str], folder: Path) -> None:
    """Run an installing command, `INSTALL` seconds at most; if it fails, delete `folder` and raise NotInstalled."""
    environment = os.environ | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    ended = run(command, seconds=INSTALL, env=environment)
    if ended.limit:
        raise NotInstalled(f"installing its packages took over {INSTALL:.0f} s")
    if ended.status:
        shutil.rmtree(folder, ignore_errors=True)
        text = (ended.errors or ended.output).decode("utf-8", "replace")
        said = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in said if "ERROR" in line.upper()] or said or ["no message"]
        raise NotInstalled(f"pip cannot install its packages: {errors[0].strip()[:300]}")

"""The line of `llorch --version`: version, commit and the extras whose packages are installed; nothing is imported."""

from importlib.util import find_spec
from pathlib import Path

from llorch.apps.doctor.machine.packages import EXTRAS, module_of
from llorch.runtime.worker import run

_PACKAGE = Path(__file__).parents[3]
_COMMAND = ("git", "describe", "--always", "--dirty", "--exclude=*")
_TIMEOUT = 10.0  # seconds


def version_line(version: str) -> str:
    """Write the line for bug reports; `version` is that of llorch."""
    extras = ", ".join(installed_extras()) or "none"
    return f"llorch {version} ({commit_of(_PACKAGE)}, extras: {extras})"


def commit_of(package: Path) -> str:
    """Name the commit: of the checkout, else the one that the build wrote into `commit.txt`, else none."""
    if (package.parent / ".git").exists():
        found = _described(package.parent)
    else:
        file = package / "commit.txt"
        found = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    return f"commit {found}" if found else "unknown commit"


def installed_extras() -> list[str]:
    """List the extras all of whose packages can be found."""
    return [extra for extra, wanted in EXTRAS.items() if all(find_spec(module_of(one)) for one in wanted)]


def _described(checkout: Path) -> str:
    try:
        ended = run(_COMMAND, seconds=_TIMEOUT, cwd=checkout)
    except OSError:
        return ""
    return "" if ended.status or ended.limit else ended.text.strip()

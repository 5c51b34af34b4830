"""The packages of llorch and of its extras: which are installed, in which version, and whether they can be imported.

Each package is imported in a child process, which it may end or never come back from. `version_line` is the line of
`llorch --version`: version, commit and the extras whose packages are installed; it imports nothing.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llorch.apps.doctor.health import HealthCheck
from llorch.runtime.errors import MissingExtra
from llorch.runtime.worker import Ended, run, signal_name

_MARK = "llorch:"  # opens llorch's lines; imported packages may print, too


def run_probe(code: str, *arguments: str, timeout: float) -> tuple[list[Any], str]:
    """Run a program and return the values that it passes to `say`, and the reason why it failed ("" for none).

    Args:
        code: The program; `say(value)` is defined, `sys` and `json` are imported.
        arguments: Arguments of the command line.
        timeout: Seconds until the program is ended.
    """
    head = f"import json, sys\ndef say(value): print({_MARK!r} + json.dumps(value), flush=True)\n"
    command = [sys.executable, "-c", head + code, *arguments]
    ended = run(command, seconds=timeout)
    return list(_printed_values(ended.text)), _reason_of_end(ended, timeout)


def _printed_values(out: str) -> Iterator[Any]:
    """Yield the JSON values that the child printed after a mark; skip all other lines."""
    for line in out.splitlines():
        before, mark, value = line.partition(_MARK)
        if mark and not before:
            yield json.loads(value)


def _reason_of_end(ended: Ended, timeout: float) -> str:
    if ended.limit:
        return f"did not answer within {timeout:.0f} s"
    if ended.status < 0:
        return f"signal ended the process: {signal_name(ended.status)}"
    if ended.status == 0:
        return ""
    return f"the process ended with code {ended.status}" + (f": {ended.last_words}" if ended.last_words else "")


_IMPORTING = """
import importlib
for name in sys.argv[1:]:
    say([name, None])
    try:
        importlib.import_module(name)
        say([name, ""])
    except BaseException as error:
        say([name, f"{type(error).__name__}: {error}"])
"""


def imported_by(modules: Sequence[str], *, timeout: float) -> dict[str, str]:
    """Import modules one after the other: of each what is wrong with it, or nothing."""
    found: dict[str, str] = {}
    while len(found) < len(modules):
        rest = [name for name in modules if name not in found]
        said, why = run_probe(_IMPORTING, *rest, timeout=timeout)
        found |= {name: " ".join(error.split()) for name, error in said if error is not None}
        if len(found) < len(modules):  # the process ended in one of them; a new one goes on after it
            name = said[-1][0] if said else rest[0]
            found[name] = found.get(name) or why or "the process ended"
    return found


_PACKAGE = Path(__file__).parents[3]
_GIT = ("git", "describe", "--always", "--dirty", "--exclude=*")
_GIT_TIMEOUT = 10.0  # seconds


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
        ended = run(_GIT, seconds=_GIT_TIMEOUT, cwd=checkout)
    except OSError:
        return ""
    return "" if ended.status or ended.limit else ended.text.strip()


# As in pyproject.toml, by extra: a name in the package index and the least version.
NEEDED = (
    "click>=8.2", "gguf>=0.19", "jaxtyping>=0.3", "jinja2>=3.1.6", "numpy>=2.0", "regex>=2024.4", "rich>=13.7",
    "safetensors>=0.5", "threadpoolctl>=3.5", "tokenizers>=0.21",
)  # fmt: skip
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch>=2.11",),
    "train": ("torch>=2.11", "matplotlib>=3.10", "pyyaml>=6"),
    "tensorboard": ("tensorboard>=2.19",),
    "serve": ("llguidance>=1.7", "prometheus-client>=0.22", "pydantic>=2.11", "starlette>=1.0", "uvicorn>=0.40"),
    "hub": ("huggingface-hub>=1.0",),
    "golden": (
        "accelerate>=1.10", "bitsandbytes>=0.49", "compressed-tensors>=0.20", "llama-cpp-python==0.3.36", "peft>=0.21",
        "tensorboard>=2.19", "torch>=2.11", "transformers>=5.23",
    ),
    "learn": ("watchfiles>=1.0",),
}  # fmt: skip
_MODULES = {"pyyaml": "yaml", "llama-cpp-python": "llama_cpp"}  # where it is not the name with _ for -
# One process loads torch for all of these.
_WITH_TORCH = ("torch", "accelerate", "bitsandbytes", "compressed-tensors", "peft", "transformers")
_TIMEOUT = 120.0  # seconds


def package_name(requirement: str) -> str:
    """Return the name of the package that a requirement is about."""
    return re.split("[>=]=", requirement)[0]


def module_of(requirement: str) -> str:
    """Name the module that the package of a requirement brings."""
    name = package_name(requirement)
    return _MODULES.get(name, name.replace("-", "_"))


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Name what brings a module that could not be imported; None for a module of no package of llorch's."""
    module = (error.name or "").partition(".")[0]
    extras = {"": NEEDED, **EXTRAS}
    extra = next((extra for extra, wanted in extras.items() if module in map(module_of, wanted)), None)
    return None if extra is None else MissingExtra(extra, module)


def installed_version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def imported(pool: Executor) -> dict[str, str]:
    """Import every package that is installed, beside this process: of each what is wrong with it, or nothing."""
    names = dict.fromkeys(package_name(one) for one in (*NEEDED, *(one for extra in EXTRAS.values() for one in extra)))
    modules = {name: module_of(name) for name in names if installed_version(name)}
    on_torch = [module for name, module in modules.items() if name in _WITH_TORCH]
    others = [module for name, module in modules.items() if name not in _WITH_TORCH]
    jobs: list[Future[dict[str, str]]] = [
        pool.submit(imported_by, group, timeout=_TIMEOUT) for group in (others, on_torch) if group
    ]
    found = {module: error for job in jobs for module, error in job.result().items()}
    return {name: found[module] for name, module in modules.items()}


def of_packages(probed: Mapping[str, str]) -> Iterator[HealthCheck]:
    """Check llorch itself, each package that it needs, and each extra; `probed` is the result of `imported`."""
    yield HealthCheck("packages", "llorch", "ok", installed_version("llorch") or "run from its sources")
    for one in NEEDED:
        yield _needed(one, probed)
    for extra, wanted in EXTRAS.items():
        yield _check_extra(extra, wanted, probed)


def _needed(wanted: str, probed: Mapping[str, str]) -> HealthCheck:
    name, found = package_name(wanted), installed_version(package_name(wanted))
    if found is None:
        return HealthCheck("packages", name, "broken", "is not installed", _install(wanted))
    wrong = _fault(wanted, found, probed)
    return HealthCheck("packages", name, "broken" if wrong else "ok", found + wrong, _install(wanted) if wrong else "")


def _check_extra(extra: str, wanted: tuple[str, ...], probed: Mapping[str, str]) -> HealthCheck:
    """Check that the packages of an extra are installed and can be imported."""
    found = {one: installed_version(package_name(one)) for one in wanted}
    faults = {one: _fault(one, there, probed) for one, there in found.items() if there}
    said = [
        f"{package_name(one)} {there}{faults[one]}" if there else f"no {package_name(one)}"
        for one, there in found.items()
    ]
    text = ", ".join(said)
    broken = [one for one, fault in faults.items() if fault]
    if broken:
        return HealthCheck("extras", extra, "broken", text, _install(*broken))
    if None in found.values():
        return HealthCheck("extras", extra, "absent", text, f"pip install 'llorch[{extra}]'")
    return HealthCheck("extras", extra, "ok", text)


def _fault(wanted: str, found: str, probed: Mapping[str, str]) -> str:
    """Return the fault of an installed version in parentheses, "" if it has none."""
    least = wanted.removeprefix(package_name(wanted))
    if (exact := least.startswith("==")) and found != least[2:]:
        return f" (should be {least[2:]})"
    if not exact and _version_numbers(found) < _version_numbers(least[2:]):
        return f" (older than {least[2:]})"
    error = probed.get(package_name(wanted), "")
    return f" ({error[:200]})" if error else ""


def _version_numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]


def _install(*wanted: str) -> str:
    return "pip install --force-reinstall " + " ".join(f"'{one}'" for one in wanted)

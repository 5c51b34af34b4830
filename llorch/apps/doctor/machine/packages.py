"""Packages of llorch and of its extras: their versions, and if they can be imported.

Packages are imported in child processes, because an import may crash or hang. `version_line` is the line of
`llorch --version`: version, commit and the extras whose packages are installed. It imports no package.
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
from llorch.runtime.worker import ProcessResult, run, signal_name

_MARK = "llorch:"  # prefix of llorch's lines, because imported packages may print other lines


def run_probe(code: str, *arguments: str, timeout: float) -> tuple[list[Any], str]:
    """Run a Python program in a child; return the values that it passes to `say`, and its failure ("" if none).

    Args:
        code: The program; `say(value)` is defined, `sys` and `json` are imported.
        arguments: Arguments of its command line.
        timeout: Time limit in seconds.
    """
    prologue = f"import json, sys\ndef say(value): print({_MARK!r} + json.dumps(value), flush=True)\n"
    command = [sys.executable, "-c", prologue + code, *arguments]
    process = run(command, seconds=timeout)
    return list(_printed_values(process.text)), _describe_failure(process, timeout)


def _printed_values(output: str) -> Iterator[Any]:
    """Yield the JSON values of lines that begin with the mark; skip all other lines."""
    for line in output.splitlines():
        prefix, mark, value = line.partition(_MARK)
        if mark and not prefix:
            yield json.loads(value)


def _describe_failure(process: ProcessResult, timeout: float) -> str:
    if process.limit:
        return f"did not answer within {timeout:.0f} s"
    if process.status < 0:
        return f"signal ended the process: {signal_name(process.status)}"
    if process.status == 0:
        return ""
    return f"the process ended with code {process.status}" + (f": {process.error_line}" if process.error_line else "")


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


def import_in_children(modules: Sequence[str], *, timeout: float) -> dict[str, str]:
    """Import modules one after the other in child processes; map each to its error, "" if there is none."""
    errors: dict[str, str] = {}
    while len(errors) < len(modules):
        remaining = [name for name in modules if name not in errors]
        records, failure = run_probe(_IMPORTING, *remaining, timeout=timeout)
        errors |= {name: " ".join(error.split()) for name, error in records if error is not None}
        if len(errors) < len(modules):  # a module ended the process: a new process imports the next ones
            name = records[-1][0] if records else remaining[0]
            errors[name] = errors.get(name) or failure or "the process ended"
    return errors


_PACKAGE = Path(__file__).parents[3]  # the folder llorch/
_GIT = ("git", "describe", "--always", "--dirty", "--exclude=*")
_GIT_TIMEOUT = 10.0  # seconds


def version_line(version: str) -> str:
    """Format the version line for bug reports; `version` is llorch's."""
    extras = ", ".join(installed_extras()) or "none"
    return f"llorch {version} ({read_commit(_PACKAGE)}, extras: {extras})"


def read_commit(package: Path) -> str:
    """Return `commit` and the hash of the checkout, else from the build's `commit.txt`, else `unknown commit`."""
    if (package.parent / ".git").exists():
        commit = _git_describe(package.parent)
    else:
        file = package / "commit.txt"
        commit = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    return f"commit {commit}" if commit else "unknown commit"


def installed_extras() -> list[str]:
    """List the extras whose packages are all installed."""
    return [extra for extra, packages in EXTRAS.items() if all(find_spec(module_name(r)) for r in packages)]


def _git_describe(checkout: Path) -> str:
    try:
        process = run(_GIT, seconds=_GIT_TIMEOUT, cwd=checkout)
    except OSError:
        return ""
    return "" if process.status or process.limit else process.text.strip()


# Requirements by extra, as in pyproject.toml.
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
_MODULES = {"pyyaml": "yaml", "llama-cpp-python": "llama_cpp"}  # package -> module, if not the same with _ for -
# Packages that import torch: one process imports all of them, so that torch is loaded once.
_WITH_TORCH = ("torch", "accelerate", "bitsandbytes", "compressed-tensors", "peft", "transformers")
_TIMEOUT = 120.0  # seconds for the imports of one process


def package_name(requirement: str) -> str:
    """Return the package name of a requirement."""
    return re.split("[>=]=", requirement)[0]


def module_name(requirement: str) -> str:
    """Return the module name of a requirement's package."""
    name = package_name(requirement)
    return _MODULES.get(name, name.replace("-", "_"))


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Make the error that names the extra of a missing module; None if no requirement of llorch has the module."""
    module = (error.name or "").partition(".")[0]
    extras = {"": NEEDED, **EXTRAS}
    extra = next((extra for extra, requirements in extras.items() if module in map(module_name, requirements)), None)
    return None if extra is None else MissingExtra(extra, module)


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def probe_imports(pool: Executor) -> dict[str, str]:
    """Import every installed package in child processes; map each to its error, "" if there is none."""
    names = dict.fromkeys(package_name(r) for r in (*NEEDED, *(r for extra in EXTRAS.values() for r in extra)))
    modules = {name: module_name(name) for name in names if installed_version(name)}
    with_torch = [module for name, module in modules.items() if name in _WITH_TORCH]
    without_torch = [module for name, module in modules.items() if name not in _WITH_TORCH]
    jobs: list[Future[dict[str, str]]] = [
        pool.submit(import_in_children, group, timeout=_TIMEOUT) for group in (without_torch, with_torch) if group
    ]
    errors = {module: error for job in jobs for module, error in job.result().items()}
    return {name: errors[module] for name, module in modules.items()}


def check_packages(errors: Mapping[str, str]) -> Iterator[HealthCheck]:
    """Check llorch itself, each required package and each extra; `errors` comes from `probe_imports`."""
    yield HealthCheck("packages", "llorch", "ok", installed_version("llorch") or "run from its sources")
    for requirement in NEEDED:
        yield _check_required(requirement, errors)
    for extra, requirements in EXTRAS.items():
        yield _check_extra(extra, requirements, errors)


def _check_required(required: str, errors: Mapping[str, str]) -> HealthCheck:
    name, actual = package_name(required), installed_version(package_name(required))
    if actual is None:
        return HealthCheck("packages", name, "broken", "is not installed", _repair(required))
    fault = _describe_fault(required, actual, errors)
    return HealthCheck(
        "packages", name, "broken" if fault else "ok", actual + fault, _repair(required) if fault else ""
    )


def _check_extra(extra: str, requirements: tuple[str, ...], errors: Mapping[str, str]) -> HealthCheck:
    """Check that the packages of an extra are installed and importable."""
    versions = {required: installed_version(package_name(required)) for required in requirements}
    faults = {required: _describe_fault(required, actual, errors) for required, actual in versions.items() if actual}
    descriptions = [
        f"{package_name(required)} {actual}{faults[required]}" if actual else f"no {package_name(required)}"
        for required, actual in versions.items()
    ]
    text = ", ".join(descriptions)
    broken = [required for required, fault in faults.items() if fault]
    if broken:
        return HealthCheck("extras", extra, "broken", text, _repair(*broken))
    if None in versions.values():
        return HealthCheck("extras", extra, "absent", text, f"pip install 'llorch[{extra}]'")
    return HealthCheck("extras", extra, "ok", text)


def _describe_fault(requirement: str, installed: str, errors: Mapping[str, str]) -> str:
    """Describe the fault of an installed version in parentheses; return "" if it has none."""
    bound = requirement.removeprefix(package_name(requirement))
    if (is_exact := bound.startswith("==")) and installed != bound[2:]:
        return f" (should be {bound[2:]})"
    if not is_exact and _version_numbers(installed) < _version_numbers(bound[2:]):
        return f" (older than {bound[2:]})"
    error = errors.get(package_name(requirement), "")
    return f" ({error[:200]})" if error else ""


def _version_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


def _repair(*requirements: str) -> str:
    return "pip install --force-reinstall " + " ".join(f"'{requirement}'" for requirement in requirements)

"""Health checks of torch with its devices, of llorch's compiled kernels, and of the reference engines."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llorch.apps.doctor.machine.child import run_probe
from llorch.apps.doctor.machine.finding import HealthCheck
from llorch.apps.doctor.machine.packages import installed_version
from llorch.files.strict_json import read_json
from llorch.runtime.builtin import goldens_folder

_TORCH = """
import logging, torch
say({"built_for": torch.version.cuda or torch.version.hip or "", "threads": torch.get_num_threads()})
try:
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    say({"devices": [f"{one.name}, {one.total_memory / 1e9:.0f} GB, sm_{one.major}{one.minor}" for one in found]})
except Exception as error:
    say({"devices": [], "why": str(error)})
from llorch.pytorch.kernels.cpu.library import find_compiler, library
class Kept(logging.Handler):
    def emit(self, record):
        say({"why_not": record.getMessage()})
logging.getLogger("llorch").addHandler(Kept())
say({"compiler": find_compiler()})
say({"kernels": library() is not None})
"""
_DRIVER = Path("/dev/nvidiactl")
_TIMEOUT = 180.0  # seconds; compiling takes some
_ENGINE_PACKAGES = {  # by engine: what goldens name a version by, and whose it is
    "llama.cpp": ("llamacpp", {"llama_cpp_python": "llama-cpp-python"}),
    "transformers": ("transformers", {"transformers": "transformers", "torch": "torch"}),
}


def of_torch() -> Iterator[HealthCheck]:
    """Check the devices that torch sees, and the C kernels of the torch path, which are built if they are not there."""
    if find_spec("torch") is None:
        return
    said, why = run_probe(_TORCH, timeout=_TIMEOUT)
    facts: dict[str, Any] = {key: value for one in said for key, value in one.items()}
    yield _devices(facts, why)
    yield _check_kernels(facts, why)


def _devices(facts: Mapping[str, Any], why: str) -> HealthCheck:
    """Check that torch finds the GPU of this machine, if there is one."""
    if "devices" not in facts:
        return HealthCheck("engines", "devices", "broken", f"torch {why}", "pip install --force-reinstall torch")
    if facts["devices"]:
        return HealthCheck("engines", "devices", "ok", f"cpu; {'; '.join(facts['devices'])}")
    if not _DRIVER.exists():
        return HealthCheck("engines", "devices", "ok", "cpu")
    if not facts["built_for"]:
        text = "cpu; this machine has a GPU, but this torch is built without GPU support"
        return HealthCheck("engines", "devices", "note", text, "pip install --force-reinstall torch")
    why = facts.get("why") or "torch gives no reason"
    text = f"cpu; this machine has a GPU, but torch for CUDA {facts['built_for']} does not find it: {why}"
    return HealthCheck(
        "engines", "devices", "broken", text, "nvidia-smi  # the driver must support torch's CUDA version"
    )


def _check_kernels(facts: Mapping[str, Any], why: str) -> HealthCheck:
    if facts.get("kernels"):
        return HealthCheck("engines", "C kernels", "ok", f"built and loaded, by {Path(facts['compiler'][0]).name}")
    if "compiler" in facts and facts["compiler"] is None:
        text = "no C compiler, so a token takes at least twice as long on the torch path"
        return HealthCheck("engines", "C kernels", "absent", text, "apt-get install gcc  # or another C compiler")
    repair = "CC=gcc llorch doctor  # or another compiler"
    return HealthCheck(
        "engines", "C kernels", "broken", str(facts.get("why_not") or f"cannot build them: {why}"), repair
    )


def check_engines(probed: Mapping[str, str]) -> Iterator[HealthCheck]:
    """Check that the reference engines run and that they have the versions that made the goldens."""
    stored = read_json(goldens_folder() / "micro-llama" / "golden.json", limit=1 << 24)["provenance"]
    for engine, (name, packages) in _ENGINE_PACKAGES.items():
        yield _check_engine(engine, stored["engines"][name], packages, probed)  # type: ignore[index] (ours)


def _check_engine(
    engine: str, made_by: Mapping[str, str], packages: Mapping[str, str], probed: Mapping[str, str]
) -> HealthCheck:
    """Check that a reference engine's packages are installed and importable, in the versions that made the goldens."""
    found = {package: installed_version(package) for package in packages.values()}
    text = ", ".join(f"{package} {version}" if version else f"no {package}" for package, version in found.items())
    if None in found.values():
        return HealthCheck("reference engines", engine, "absent", text, "pip install 'llorch[golden]'")
    if any(probed.get(package) for package in found):
        return HealthCheck(
            "reference engines", engine, "broken", f"{text}: cannot be imported", "pip install 'llorch[golden]'"
        )
    others = [
        f"{p} {made_by[key]}"
        for key, p in packages.items()
        if _version_without_build(made_by[key]) != _version_without_build(found[p])
    ]
    if others:
        return HealthCheck(
            "reference engines", engine, "note", f"{text}; the goldens were made with {', '.join(others)}"
        )
    return HealthCheck("reference engines", engine, "ok", f"{text}, the versions that made the goldens")


def _version_without_build(version: str | None) -> str:
    """Return a version without its build (+cpu, +cu130); "" for None."""
    return (version or "").partition("+")[0]

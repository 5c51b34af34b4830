"""Health checks of a machine whose packages work, and one forward pass against its golden.

Checked are processor, BLAS and memory, torch and its devices, C kernels, reference engines, and the caches.
"""

import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_info

from llorch.apps.doctor.health import HealthCheck
from llorch.apps.doctor.machine.packages import installed_version, run_probe
from llorch.files.strict_json import read_json
from llorch.judging.goldens.forward import read
from llorch.model.model import load
from llorch.runtime.builtin import goldens_folder
from llorch.runtime.memory import address_space_left, available_memory
from llorch.runtime.threads import VARIABLES, n_cores
from llorch.stages.comparison import compare

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
        return HealthCheck("engines", "devices", "warning", text, "pip install --force-reinstall torch")
    why = facts.get("why") or "torch gives no reason"
    text = f"cpu; this machine has a GPU, but torch for CUDA {facts['built_for']} does not find it: {why}"
    repair = "nvidia-smi  # the driver must support torch's CUDA version"
    return HealthCheck("engines", "devices", "broken", text, repair)


def _check_kernels(facts: Mapping[str, Any], why: str) -> HealthCheck:
    if facts.get("kernels"):
        return HealthCheck("engines", "C kernels", "ok", f"built and loaded, by {Path(facts['compiler'][0]).name}")
    if "compiler" in facts and facts["compiler"] is None:
        text = "no C compiler, so a token takes at least twice as long on the torch path"
        return HealthCheck("engines", "C kernels", "absent", text, "apt-get install gcc  # or another C compiler")
    repair = "CC=gcc llorch doctor  # or another compiler"
    text = str(facts.get("why_not") or f"cannot build them: {why}")
    return HealthCheck("engines", "C kernels", "broken", text, repair)


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
    repair = "pip install 'llorch[golden]'"
    if None in found.values():
        return HealthCheck("reference engines", engine, "absent", text, repair)
    if any(probed.get(package) for package in found):
        return HealthCheck("reference engines", engine, "broken", f"{text}: cannot be imported", repair)
    versions = {package: made_by[key] for key, package in packages.items()}
    others = [f"{p} {v}" for p, v in versions.items() if _version_without_build(v) != _version_without_build(found[p])]
    if others:
        text = f"{text}; the goldens were made with {', '.join(others)}"
        return HealthCheck("reference engines", engine, "warning", text)
    return HealthCheck("reference engines", engine, "ok", f"{text}, the versions that made the goldens")


def _version_without_build(version: str | None) -> str:
    """Return a version without its build (+cpu, +cu130); "" for None."""
    return (version or "").partition("+")[0]


_FEATURES = (  # which decide how fast products of matrices are
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
_LEAST = 1 << 30  # bytes; with less even small models may not load


def of_hardware() -> Iterator[HealthCheck]:
    """Check the system, the processor, its cores, the BLAS library and the memory."""
    yield HealthCheck("machine", "system", "ok", f"{platform.platform()}, Python {platform.python_version()}")
    yield HealthCheck("machine", "processor", "ok", processor())
    yield _cores()
    yield _blas()
    yield memory()


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor and those of its features that llorch uses."""
    try:
        text = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    has = (fields.get("flags") or fields.get("Features") or "").split()
    found = " ".join(feature for feature in _FEATURES if feature in has) or "none of the known features"
    return f"{fields.get('model name', platform.machine())}: {found}"


def _cores() -> HealthCheck:
    here, allowed = os.cpu_count() or 1, n_cores()
    said = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    text = f"{allowed} of {here} usable by llorch" + (f"; {', '.join(said)}" if said else "")
    return HealthCheck("machine", "cores", "ok", text)


def _blas() -> HealthCheck:
    import numpy as np  # whose BLAS it is

    found = [one for one in threadpool_info() if one["user_api"] == "blas"]
    if not found:
        text = f"NumPy {np.__version__} loads no known BLAS, so matrix products are slow"
        return HealthCheck("machine", "BLAS", "warning", text, "pip install --force-reinstall numpy")
    one = found[0]
    built = f", for {one['architecture']}" if one.get("architecture") else ""
    text = f"{one['internal_api']} {one['version']}{built}, {one['num_threads']} threads (NumPy {np.__version__})"
    return HealthCheck("machine", "BLAS", "ok", text)


def memory() -> HealthCheck:
    """Report the memory that is left, and the address space that a limit of the process leaves."""
    left, limit = available_memory(), address_space_left()
    text = f"{left / 1e9:.1f} GB left" if math.isfinite(left) else "unknown: this system does not report it"
    if math.isfinite(limit):
        text += f"; {limit / 1e9:.1f} GB of address space (ulimit -v)"
    return HealthCheck("machine", "memory", "ok" if left >= _LEAST else "warning", text)


_LITTLE = 1e9  # bytes


def of_caches() -> Iterator[HealthCheck]:
    """Check each cache, whether it exists or not."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or root / "huggingface") / "hub")
    yield _cache("models of the hub", hub.expanduser())
    yield _cache("compiled, measured", root / "llorch")


def _cache(name: str, folder: Path) -> HealthCheck:
    place = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(place).free
    taken = f"{_folder_size(folder) / 1e6:.1f} MB" if folder.exists() else "not created yet"
    text = f"{folder}: {taken}; {free / 1e9:.1f} GB free"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return HealthCheck("caches", name, "warning", f"{text}; not writable")
    return HealthCheck("caches", name, "ok" if free >= _LITTLE else "warning", text)


def _folder_size(folder: Path) -> int:
    """Sum the bytes of the files in a folder; a link's target is not counted."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # somebody has just removed it
    return total


_MODEL = "micro-llama"
_REPAIR = "llorch verify  # every model and stage, with the first wrong number"


def self_test(goldens: Path | None = None) -> HealthCheck:
    """Run it; broken where a stage differs, or where it does not run at all."""
    try:
        golden = read((goldens or goldens_folder()) / _MODEL)
        trace: dict = {}
        load(_MODEL).forward(golden.cases["near"].ids, trace=trace)
        reports = {engine: compare(trace, shown.traces["near"]) for engine, shown in golden.engine_outputs.items()}
    except (OSError, ValueError, ImportError, ArithmeticError, MemoryError) as error:
        return HealthCheck("self-test", _MODEL, "broken", f"failed to run: {' '.join(str(error).split())}", _REPAIR)
    wrong = {engine: report for engine, report in reports.items() if not report.agrees}
    text = "; ".join(f"{engine}: {report}" for engine, report in (wrong or reports).items())
    return HealthCheck("self-test", _MODEL, "broken" if wrong else "ok", text, _REPAIR if wrong else "")

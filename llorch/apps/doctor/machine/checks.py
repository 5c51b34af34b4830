"""Health checks of a machine whose packages work, and one forward pass compared with stored reference outputs.

The checks cover processor, BLAS and memory, torch and its devices, C kernels, reference engines, and the caches.
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
from llorch.ops.compiled.ggml import PACKAGE
from llorch.runtime.builtin import goldens_folder
from llorch.runtime.memory import address_space_left, available_memory
from llorch.runtime.threads import VARIABLES, n_cores
from llorch.stages.comparison import compare

_TORCH = """
import torch
say({"built_for": torch.version.cuda or torch.version.hip or "", "threads": torch.get_num_threads()})
try:
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    say({"devices": [f"{one.name}, {one.total_memory / 1e9:.0f} GB, sm_{one.major}{one.minor}" for one in found]})
except Exception as error:
    say({"devices": [], "why": str(error)})
"""
_KERNELS = """
import logging
from llorch.ops.compiled.ggml import NoKernels, ggml_kernels
from llorch.ops.compiled.library import find_compiler, library
class Kept(logging.Handler):
    def emit(self, record):
        say({"why_not": record.getMessage()})
logging.getLogger("llorch").addHandler(Kept())
say({"compiler": find_compiler()})
say({"kernels": library() is not None})
try:
    say({"ggml": ggml_kernels().version})
except NoKernels as error:
    say({"why_no_ggml": str(error)})
"""
_DRIVER = Path("/dev/nvidiactl")  # exists if a driver of NVIDIA is loaded
_TIMEOUT = 180.0  # seconds, including compilation of the kernels
_ENGINE_PACKAGES = {  # engine -> its name in the goldens, {key of a version in the goldens: package}
    "llama.cpp": ("llamacpp", {"llama_cpp_python": "llama-cpp-python"}),
    "transformers": ("transformers", {"transformers": "transformers", "torch": "torch"}),
}


def check_torch() -> Iterator[HealthCheck]:
    """Check the devices that torch finds."""
    if find_spec("torch") is None:
        return
    records, failure = run_probe(_TORCH, timeout=_TIMEOUT)
    facts: dict[str, Any] = {key: value for record in records for key, value in record.items()}
    yield _check_devices(facts, failure)


def check_kernels() -> Iterator[HealthCheck]:
    """Check the C kernels, compiled now if they are missing, and ggml's; in a child, because they may crash."""
    records, failure = run_probe(_KERNELS, timeout=_TIMEOUT)
    facts: dict[str, Any] = {key: value for record in records for key, value in record.items()}
    yield _check_c_kernels(facts, failure)
    yield _check_ggml_kernels(facts, failure)


def _check_devices(facts: Mapping[str, Any], failure: str) -> HealthCheck:
    """Check that torch finds this machine's GPU, if there is one."""
    if "devices" not in facts:
        return HealthCheck("engines", "devices", "broken", f"torch {failure}", "pip install --force-reinstall torch")
    if facts["devices"]:
        return HealthCheck("engines", "devices", "ok", f"cpu; {'; '.join(facts['devices'])}")
    if not _DRIVER.exists():
        return HealthCheck("engines", "devices", "ok", "cpu")
    if not facts["built_for"]:
        text = "cpu; this machine has a GPU, but this torch is built without GPU support"
        return HealthCheck("engines", "devices", "warning", text, "pip install --force-reinstall torch")
    failure = facts.get("why") or "torch gives no reason"
    text = f"cpu; this machine has a GPU, but torch for CUDA {facts['built_for']} does not find it: {failure}"
    repair = "nvidia-smi  # the driver must support torch's CUDA version"
    return HealthCheck("engines", "devices", "broken", text, repair)


def _check_c_kernels(facts: Mapping[str, Any], failure: str) -> HealthCheck:
    if facts.get("kernels"):
        return HealthCheck("engines", "C kernels", "ok", f"built and loaded, by {Path(facts['compiler'][0]).name}")
    if "compiler" in facts and facts["compiler"] is None:
        text = "no C compiler, so a token takes at least twice as long"
        return HealthCheck("engines", "C kernels", "absent", text, "apt-get install gcc  # or another C compiler")
    repair = "CC=gcc llorch doctor  # or another compiler"
    text = str(facts.get("why_not") or f"cannot build them: {failure}")
    return HealthCheck("engines", "C kernels", "broken", text, repair)


def _check_ggml_kernels(facts: Mapping[str, Any], failure: str) -> HealthCheck:
    if "ggml" in facts:
        text = f"ggml {facts['ggml']}: a known product is right; used for large quantised files, on NumPy"
        return HealthCheck("engines", "ggml kernels", "ok", text)
    why_not = facts.get("why_no_ggml")
    text = f"{why_not or f'cannot load them: {failure}'}; so quantised files are slower on NumPy"
    if why_not is not None:
        return HealthCheck("engines", "ggml kernels", "absent", text, f"pip install {PACKAGE}")
    return HealthCheck("engines", "ggml kernels", "broken", text, f"pip install --force-reinstall {PACKAGE}")


def check_engines(errors: Mapping[str, str]) -> Iterator[HealthCheck]:
    """Check that the reference engines can be imported, and have the versions that made the goldens."""
    provenance = read_json(goldens_folder() / "micro-llama" / "golden.json", limit=1 << 24)["provenance"]
    for engine, (name, packages) in _ENGINE_PACKAGES.items():
        yield _check_engine(engine, provenance["engines"][name], packages, errors)  # type: ignore[index] (llorch's own file)


def _check_engine(
    engine: str, made_by: Mapping[str, str], packages: Mapping[str, str], errors: Mapping[str, str]
) -> HealthCheck:
    """Check that a reference engine's packages are installed and importable, in the versions that made the goldens."""
    installed = {package: installed_version(package) for package in packages.values()}
    text = ", ".join(f"{package} {version}" if version else f"no {package}" for package, version in installed.items())
    repair = "pip install 'llorch[golden]'"
    if None in installed.values():
        return HealthCheck("reference engines", engine, "absent", text, repair)
    if any(errors.get(package) for package in installed):
        return HealthCheck("reference engines", engine, "broken", f"{text}: cannot be imported", repair)
    expected = {package: made_by[key] for key, package in packages.items()}
    differing = [f"{p} {v}" for p, v in expected.items() if _public_version(v) != _public_version(installed[p])]
    if differing:
        text = f"{text}; the goldens were made with {', '.join(differing)}"
        return HealthCheck("reference engines", engine, "warning", text)
    return HealthCheck("reference engines", engine, "ok", f"{text}, the versions that made the goldens")


def _public_version(version: str | None) -> str:
    """Return a version without its local part (+cpu, +cu130); "" for None."""
    return (version or "").partition("+")[0]


_FEATURES = (  # they decide the speed of matrix products
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
_MIN_MEMORY = 1 << 30  # bytes; with less, even small models may not load


def check_hardware() -> Iterator[HealthCheck]:
    """Check the system, the processor, its cores, the BLAS library and the memory."""
    yield HealthCheck("machine", "system", "ok", f"{platform.platform()}, Python {platform.python_version()}")
    yield HealthCheck("machine", "processor", "ok", processor())
    yield _check_cores()
    yield _check_blas()
    yield check_memory()


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor, and its features that matter for speed."""
    try:
        text = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    used_flags = " ".join(feature for feature in _FEATURES if feature in flags) or "none of the known features"
    return f"{fields.get('model name', platform.machine())}: {used_flags}"


def _check_cores() -> HealthCheck:
    n_total, n_usable = os.cpu_count() or 1, n_cores()
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    text = f"{n_usable} of {n_total} usable by llorch" + (f"; {', '.join(variables)}" if variables else "")
    return HealthCheck("machine", "cores", "ok", text)


def _check_blas() -> HealthCheck:
    import numpy as np  # its import loads the BLAS

    libraries = [blas for blas in threadpool_info() if blas["user_api"] == "blas"]
    if not libraries:
        text = f"NumPy {np.__version__} loads no known BLAS, so matrix products are slow"
        return HealthCheck("machine", "BLAS", "warning", text, "pip install --force-reinstall numpy")
    blas = libraries[0]
    target = f", for {blas['architecture']}" if blas.get("architecture") else ""
    text = f"{blas['internal_api']} {blas['version']}{target}, {blas['num_threads']} threads (NumPy {np.__version__})"
    return HealthCheck("machine", "BLAS", "ok", text)


def check_memory() -> HealthCheck:
    """Check the available memory, and report the address space that `ulimit -v` leaves to this process."""
    available, limit = available_memory(), address_space_left()
    text = f"{available / 1e9:.1f} GB left" if math.isfinite(available) else "unknown: this system does not report it"
    if math.isfinite(limit):
        text += f"; {limit / 1e9:.1f} GB of address space (ulimit -v)"
    return HealthCheck("machine", "memory", "ok" if available >= _MIN_MEMORY else "warning", text)


_MIN_FREE = 1e9  # bytes; with less free space a cache is a warning


def check_caches() -> Iterator[HealthCheck]:
    """Check the free space and the permissions of each cache folder, whether it exists or not."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or root / "huggingface") / "hub")
    yield _check_cache("models of the hub", hub.expanduser())
    yield _check_cache("compiled, measured", root / "llorch")


def _check_cache(name: str, folder: Path) -> HealthCheck:
    existing_folder = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing_folder).free
    used = f"{_folder_size(folder) / 1e6:.1f} MB" if folder.exists() else "not created yet"
    text = f"{folder}: {used}; {free / 1e9:.1f} GB free"
    if not (existing_folder.is_dir() and os.access(existing_folder, os.W_OK)):
        return HealthCheck("caches", name, "warning", f"{text}; not writable")
    return HealthCheck("caches", name, "ok" if free >= _MIN_FREE else "warning", text)


def _folder_size(folder: Path) -> int:
    """Sum the bytes of the files in a folder, without the targets of links."""
    total = 0
    for folder_path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder_path, name)).st_size
            except OSError:
                continue  # another process has just removed it
    return total


_MODEL = "micro-llama"
_REPAIR = "llorch verify  # every model and stage, with the first wrong number"


def self_test(goldens: Path | None = None) -> HealthCheck:
    """Compare one forward pass with its golden; broken if a stage differs, or if the pass does not run."""
    try:
        golden = read((goldens or goldens_folder()) / _MODEL)
        trace: dict = {}
        load(_MODEL).forward(golden.cases["near"].ids, trace=trace)
        reports = {engine: compare(trace, output.traces["near"]) for engine, output in golden.engine_outputs.items()}
    except (OSError, ValueError, ImportError, ArithmeticError, MemoryError) as error:
        return HealthCheck("self-test", _MODEL, "broken", f"failed to run: {' '.join(str(error).split())}", _REPAIR)
    failed = {engine: report for engine, report in reports.items() if not report.agrees}
    text = "; ".join(f"{engine}: {report}" for engine, report in (failed or reports).items())
    return HealthCheck("self-test", _MODEL, "broken" if failed else "ok", text, _REPAIR if failed else "")

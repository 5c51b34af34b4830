"""Processor, BLAS and memory."""

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from threadpoolctl import threadpool_info

from llorch.apps.doctor.machine.finding import HealthCheck
from llorch.runtime.memory import address_space_left, available_memory
from llorch.runtime.threads import VARIABLES, n_cores

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
        return HealthCheck("machine", "BLAS", "note", text, "pip install --force-reinstall numpy")
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
    return HealthCheck("machine", "memory", "ok" if left >= _LEAST else "note", text)

"""The kernels of the OpenBLAS that comes with NumPy: the widest that an AMD processor has.

OpenBLAS knows processors by their model number. On an AMD processor with AVX512 that is newer than the library it falls
back to kernels that are half as wide. Its own variable `OPENBLAS_CORETYPE` says otherwise, but is read when the library
is loaded; so this module acts when it is imported, and `llorch` imports it before anything imports NumPy. It does
nothing where the variable is set already, or NumPy is imported already.

Source: OpenBLAS driver/others/dynamic.c (detection, and what SkylakeX kernels need); benchmarks/NOTES.md (figures).
"""

import os
import sys
from pathlib import Path

_VARIABLE, _KERNELS = "OPENBLAS_CORETYPE", "SkylakeX"
_NEEDED = frozenset({"avx512f", "avx512cd", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"})


def needs_help(cpuinfo: str) -> bool:
    """Tell whether OpenBLAS may underrate a processor.

    Args:
        cpuinfo: What Linux says of it in /proc/cpuinfo.

    Returns:
        True for an AMD processor that can run the AVX512 kernels.
    """
    entries = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.split() for key, _, value in entries}
    return fields.get("vendor_id") == ["AuthenticAMD"] and set(fields.get("flags", ())) >= _NEEDED


def _choose_kernels() -> None:
    if "numpy" in sys.modules or _VARIABLE in os.environ:
        return
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if needs_help(cpuinfo):
        os.environ[_VARIABLE] = _KERNELS


_choose_kernels()

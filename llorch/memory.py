"""Memory of the machine: how much is left, and one setting of the C library that large activations need."""

import ctypes
import math
import os
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3)
_KEPT = 1 << 28  # bytes of freed memory kept for the next array


def available_memory() -> float:
    """Bytes that a program can still take: free memory and what the system would give up for it.

    Returns:
        What Linux says; elsewhere all memory of the machine, or infinity where nobody tells.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def keep_freed_memory() -> None:
    """Let the C library keep freed memory instead of handing every large array back to the system.

    By default each activation of some megabytes is mapped, cleared and faulted in page by page, and unmapped a moment
    later; that costs more than the arithmetic on it. Does nothing where the C library has no `mallopt` (not glibc).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_MMAP_THRESHOLD, _KEPT)

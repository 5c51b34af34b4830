"""One setting of the C library that large activations need."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3)
_KEPT = 1 << 28  # bytes of freed memory kept for the next array


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

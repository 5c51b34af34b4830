"""Memory of the machine: how much is left, and two calls of the C library that large arrays need."""

import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3)
_KEPT = 1 << 28  # bytes of freed memory kept for the next array
_ROOT = Path("/")  # of what Linux says about itself
_VERSION_2 = "memory.max", "memory.current", ""  # files of a control group, and how names in memory.stat begin
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


def available_memory() -> float:
    """Return the bytes that this process can still take: the least of machine, container and own limit.

    What the system would give up, pages of files, counts as free. Outside of Linux it is all memory of the machine, or
    infinity where nobody tells.
    """
    return min(_left_on_machine(), _left_in_groups(), address_space_left())


def address_space_left() -> float:
    """Read the bytes that `ulimit -v` leaves; infinity without such a limit."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        taken = int((_ROOT / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return math.inf
    return math.inf if limit == resource.RLIM_INFINITY else float(limit - taken)


def _left_on_machine() -> float:
    """Return the bytes that the machine has available, or has in all where that is unknown."""
    try:
        lines = (_ROOT / "proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _left_in_groups() -> float:
    """Find the least memory that is left in a control group of this process or one around it, of version 2 or 1."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    left = [math.inf]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "memory" in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = mount / path.strip("/")  # in a container often not there: the mount is the group itself
            left += [_left_in_group(folder) for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return min(left)


def _left_in_group(folder: Path) -> float:
    """Return the bytes that a control group may still take, infinity without a limit."""
    for limit, used, prefix in (_VERSION_2, _VERSION_1):
        try:
            most, taken = ((folder / name).read_text().strip() for name in (limit, used))
            found = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        files = sum(int(found.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))  # can be dropped
        return math.inf if most == "max" else float(int(most) - int(taken) + files)
    return math.inf


def keep_freed_memory() -> None:
    """Let the C library keep freed memory instead of handing every large array back to the system.

    By default each activation of some megabytes is mapped, cleared and faulted in page by page, and unmapped a moment
    later; that costs more than the arithmetic on it. Does nothing where the C library has no `mallopt` (not glibc).
    """
    mallopt = _function_of_c("mallopt")
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_MMAP_THRESHOLD, _KEPT)


def return_freed_memory() -> None:
    """Return freed memory to the system that the C library holds between objects in use.

    Where large arrays are made and freed in turn with small objects that stay, the next array often fits in none of the
    holes. Does nothing where the C library has no `malloc_trim` (not glibc).
    """
    _function_of_c("malloc_trim")(0)


def _function_of_c(name: str) -> Callable[..., object]:
    """Find a function of the C library; one that does nothing where it is missing."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *_: None

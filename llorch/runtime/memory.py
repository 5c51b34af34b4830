"""Available memory, and two settings of the C library's allocator for large arrays."""

import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3)
_KEPT = 1 << 28  # bytes of freed memory that the allocator keeps for the next array
_ROOT = Path("/")  # root of /proc and /sys
_VERSION_2 = "memory.max", "memory.current", ""  # of control groups: limit and usage file, prefix in memory.stat
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


def available_memory() -> float:
    """Return the bytes that this process can still allocate: the least of machine, control group and process limit.

    Cached file pages, which the system would drop, count as free. Outside Linux the machine counts with its total
    memory, or with infinity if that is unknown.
    """
    return min(_free_on_machine(), _free_in_groups(), address_space_left())


def address_space_left() -> float:
    """Return the bytes left below `ulimit -v`; infinity without a limit."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = int((_ROOT / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return math.inf
    return math.inf if limit == resource.RLIM_INFINITY else float(limit - used)


def _free_on_machine() -> float:
    """Return the available bytes of the machine, or its total bytes if that is unknown."""
    try:
        lines = (_ROOT / "proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _free_in_groups() -> float:
    """Return the least available memory of this process's control groups and their parents, version 2 or 1."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    free = [math.inf]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "memory" in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup" / ("memory" if controllers else "")
            group = mount / path.strip("/")  # often missing in a container, where the mount is the group itself
            free += [_free_in_group(folder) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return min(free)


def _free_in_group(folder: Path) -> float:
    """Return the available bytes of one control group; infinity without a limit."""
    for limit_name, used_name, prefix in (_VERSION_2, _VERSION_1):
        try:
            limit_text, used_text = ((folder / name).read_text().strip() for name in (limit_name, used_name))
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        files = sum(int(stats.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))  # droppable pages
        return math.inf if limit_text == "max" else float(int(limit_text) - int(used_text) + files)
    return math.inf


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning every large array to the system.

    By default each activation of some megabytes is mapped, cleared, faulted in page by page and soon unmapped, which
    costs more than its arithmetic. Does nothing if the C library has no `mallopt` (not glibc).
    """
    mallopt = _c_function("mallopt")
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_MMAP_THRESHOLD, _KEPT)


def return_freed_memory() -> None:
    """Return freed memory in the C library's heap to the system.

    If large arrays alternate with small long-lived objects, the next array often fits into none of the holes. Does
    nothing if the C library has no `malloc_trim` (not glibc).
    """
    _c_function("malloc_trim")(0)


def _c_function(name: str) -> Callable[..., object]:
    """Return a function of the C library, or a function that does nothing if it is missing."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *_: None

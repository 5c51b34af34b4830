"""Folders that grow: huggingface_hub's cache and our own; how large they are, and the room beside them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from llorch.apps.doctor.machine.finding import HealthCheck

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
        return HealthCheck("caches", name, "note", f"{text}; not writable")
    return HealthCheck("caches", name, "ok" if free >= _LITTLE else "note", text)


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

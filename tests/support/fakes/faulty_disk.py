"""A disk on which one operation fails, and states in which a loss of power may leave the files of a run."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llorch.files import new_file
from llorch.training import snapshot_files, snapshots
from llorch.training.snapshots import SnapshotStore

OPERATIONS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir", "listdir")


class Crash(BaseException):
    """The process is gone; nothing that it would do afterwards happens."""


@contextmanager
def on(disk: Any) -> Iterator[None]:
    """Let snapshots be written to a disk, which has the names of `os`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (snapshots, snapshot_files, new_file):  # the latter syncs
            patch.setattr(module, "os", disk)
        yield


class FastDisk:
    """The real one, but it does not wait for the device: these tests end the process, not the power."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        os.fstat(descriptor)


@dataclass(frozen=True)
class Fault:
    """What goes wrong: an error of the system, or the end of the process; a write may have been done by half."""

    name: str
    error: BaseException
    half: bool = False
    sticky: bool = False


FAULTS = (
    Fault("EIO once", OSError(errno.EIO, "injected")),
    Fault("EIO from then on", OSError(errno.EIO, "injected"), sticky=True),
    Fault("ENOSPC once, after half a write", OSError(errno.ENOSPC, "injected"), half=True),
    Fault("ENOSPC from then on, after half a write", OSError(errno.ENOSPC, "injected"), half=True, sticky=True),
    Fault("crash", Crash(), sticky=True),
    Fault("crash after half a write", Crash(), half=True, sticky=True),
)


class FaultyDisk:
    """Fails at the n-th operation, counted from 1."""

    def __init__(self, fault: Fault, fail_index: int) -> None:
        self.fault, self.fail_index, self.done = fault, fail_index, 0

    @property
    def failed(self) -> bool:
        return self.done >= self.fail_index

    def __getattr__(self, name: str) -> Any:
        found = getattr(FastDisk(), name)
        return self._counted(name, found) if name in OPERATIONS else found

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.done += 1
            if self.done == self.fail_index or (self.failed and self.fault.sticky):
                if self.fault.half and name == "write":
                    operation(args[0], args[1][: len(args[1]) // 2])
                if name == "close":
                    operation(*args)  # what fails to close is closed
                raise self.fault.error
            return operation(*args)

        return run


class StutteringDisk(FastDisk):
    """Writes at most seven bytes at a time, as a system may."""

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data[:7])


def tensors_of(step: int) -> dict[str, np.ndarray]:
    """A small state that depends on the step."""
    rng = np.random.default_rng(step)
    return {
        "adapter/layers.0.q_proj.lora_A": rng.normal(size=(2, 5)).astype(np.float32),
        "optimizer/codes": rng.integers(0, 255, 11, dtype=np.uint8),
        "optimizer/step": np.array(step),
    }


def save(store: SnapshotStore, step: int) -> None:
    store.save(step, tensors_of(step), {"step": step, "text": "ä"})


def save_parts(store: SnapshotStore, step: int) -> None:
    """As several processes save, each a file."""
    folder = store.begin(step) / snapshot_files.PARTS
    folder.mkdir()
    for name, array in tensors_of(step).items():
        np.save(folder / name.replace("/", "|"), array)
    store.complete(step, {"step": step, "text": "ä"})


def read_parts(folder: Path) -> dict[str, np.ndarray]:
    return {file.stem.replace("|", "/"): np.load(file) for file in folder.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


@dataclass
class File:
    """A file: what lies on the device, and what was written to it."""

    durable: bytes = b""
    written: bytes = b""

    def sync(self) -> None:
        self.durable = self.written

    def content_after(self, data: str) -> bytes:
        lost = len(self.written) - len(self.durable)
        return {
            "kept": self.written,
            "dropped": self.durable,
            "half": self.durable + self.written[len(self.durable) :][: lost // 2],
            "zeroed": self.durable + bytes(lost),
        }[data]


@dataclass
class Folder:
    """A folder: its names on the device, and the changes since, in order."""

    durable: "dict[str, File | Folder]" = field(default_factory=dict)
    pending: "list[Callable[[dict[str, File | Folder]], object]]" = field(default_factory=list)

    def names(self, n_changes: int | None = None) -> "dict[str, File | Folder]":
        names = dict(self.durable)
        for change in self.pending[:n_changes]:
            change(names)
        return names

    def sync(self) -> None:
        self.durable, self.pending = self.names(), []


class VolatileDisk:
    """A disk in memory that knows what a loss of power would leave; `on_change` is called after every operation."""

    def __init__(self, root: Path, on_change: Callable[[], None]) -> None:
        self._root, self._top, self._on_change = root, Folder(), on_change
        self._open: dict[int, File | Folder] = {}
        self._numbers = itertools.count()
        self.path = SimpleNamespace(exists=self._exists)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _at(self, path: Path) -> Any:
        node: Any = self._top
        for name in path.relative_to(self._root).parts:
            node = node.names()[name]
        return node

    def _change(self, path: Path, change: "Callable[[dict[str, File | Folder]], object]") -> None:
        self._at(path.parent).pending.append(change)
        self._on_change()

    def mkdir(self, path: Path) -> None:
        folder = Folder()
        self._change(path, lambda names: names.update({path.name: folder}))

    def open(self, path: Path, flags: int, mode: int = 0) -> int:
        descriptor = next(self._numbers)
        if flags & os.O_CREAT:
            assert not self._exists(path)
            file = File()
            self._open[descriptor] = file
            self._change(path, lambda names: names.update({path.name: file}))
        else:
            self._open[descriptor] = self._at(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        file = self._open[descriptor]
        assert isinstance(file, File)
        file.written += bytes(data)
        self._on_change()
        return len(data)

    def fsync(self, descriptor: int) -> None:
        self._open[descriptor].sync()
        self._on_change()

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def rename(self, path: Path, target: Path) -> None:
        self._change(path, lambda names: names.update({target.name: names.pop(path.name)}))

    def unlink(self, path: Path) -> None:
        self._change(path, lambda names: names.pop(path.name))

    def rmdir(self, path: Path) -> None:
        assert not self.listdir(path)
        self._change(path, lambda names: names.pop(path.name))

    def listdir(self, path: Path) -> list[str]:
        return list(self._at(path).names())

    def _exists(self, path: Path) -> bool:
        try:
            self._at(path)
        except KeyError:
            return False
        return True

    def after_power_loss(self) -> Iterator[dict[str, bytes | None]]:
        """Trees of paths and contents (None for a folder): any first changes of each folder, each fate of the data."""
        folders = [folder for folder in self._folders(self._top) if folder.pending]
        for counts in itertools.product(*(range(len(folder.pending) + 1) for folder in folders)):
            n_changes = {id(folder): count for folder, count in zip(folders, counts, strict=True)}
            for data in ("kept", "dropped", "half", "zeroed"):
                yield dict(_tree(self._top, n_changes, data, ""))

    def _folders(self, top: Folder) -> Iterator[Folder]:
        yield top
        for node in {id(node): node for names in (top.durable, top.names()) for node in names.values()}.values():
            if isinstance(node, Folder):
                yield from self._folders(node)


def _tree(folder: Folder, n_changes: dict[int, int], data: str, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.names(n_changes.get(id(folder))).items():
        path = f"{prefix}{name}"
        if isinstance(node, File):
            yield path, node.content_after(data)
        else:
            yield path, None
            yield from _tree(node, n_changes, data, f"{path}/")


def put_down(tree: dict[str, bytes | None], folder: Path) -> None:
    """Make a tree real."""
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)

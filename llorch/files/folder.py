"""Hugging Face folders: one model.safetensors, or shards listed by model.safetensors.index.json.

File names that a file of the folder contains are resolved inside the folder. Pickles are never opened.

Source: transformers modeling_utils (layout and precedence); huggingface_hub (layout of the download cache).
"""

import logging
import os
from collections.abc import Container, Mapping
from pathlib import Path

from llorch.files.mapped import on_error
from llorch.files.safetensors import SafetensorsFile, SafetensorsTensors
from llorch.files.strict_json import read_json
from llorch.files.tensor_names import is_plain_name
from llorch.runtime.errors import FormatError

logger = logging.getLogger(__name__)

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})

_INDEX = "model.safetensors.index.json"
_MAX_INDEX = 25_000_000  # bytes


class SafetensorsFolder(SafetensorsTensors):
    """Tensors of a Hugging Face folder: one file, or the shards of an index."""

    def __init__(self, path: str | Path) -> None:
        """Find and open the file or the shards; FormatError Missing, Unsafe, or the error of a shard."""
        super().__init__(path)
        self.stored = {}
        self.unlisted: list[str] = []  # tensors of the shards that the index does not list
        with on_error(self.close):
            self._open_all()
        self.tensors = self.stored

    def _open_all(self) -> None:
        index, single = self.path / _INDEX, self.path / "model.safetensors"
        if not index.exists():
            self._add(_single_file(self.path))
            return
        weight_map = _read_index(index)
        if single.exists():  # it has priority over the index, as in transformers
            _require_no_shards(single, index, set(weight_map.values()))
            self._add(_single_file(self.path))
            return
        for shard in sorted(set(weight_map.values())):
            self._add(file_inside(self.path, shard))
        _check_index(index, weight_map, {name: file.path.name for name, file in self._file_of.items()})
        self.unlisted = sorted(self.stored.keys() - weight_map.keys())

    def _add(self, path: Path) -> None:
        shard = SafetensorsFile(path)
        self._files.append(shard._file)
        duplicates = sorted(shard.tensors.keys() & self.stored.keys())
        if duplicates:
            raise FormatError("Duplicate", f"tensor {duplicates[0]!r} is in two shards", path=path)
        self.stored = {**self.stored, **shard.tensors}
        self._file_of |= dict.fromkeys(shard.tensors, shard._file)

    def require_listed(self, ignored: Container[str]) -> None:
        """Raise Unexpected for tensors of the shards that the index does not list; warn if all are `ignored`."""
        index, extra = self.path / _INDEX, [name for name in self.unlisted if name not in ignored]
        if extra:
            message = f"{len(extra)} tensors of the shards are not in the index: {', '.join(extra[:20])}"
            raise FormatError("Unexpected", message, path=index)
        if self.unlisted:
            first, count = self.unlisted[0], len(self.unlisted)
            logger.warning("note: %s does not list %d tensors, which llorch ignores, as %s", index, count, first)


def _single_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return file_inside(folder, "model.safetensors")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        message = f"{pickles[0]} is a pickle, which can run code; convert the model to safetensors first"
        raise FormatError("Unsafe", message, path=folder)
    message = f"expected model.safetensors or model.safetensors.index.json, got neither{_gguf_hint(folder)}"
    raise FormatError("Missing", message, path=folder)


def _gguf_hint(folder: Path) -> str:
    """Return a hint with the path of a GGUF file in the folder; empty if there is none."""
    names = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; the folder holds a GGUF file: give {folder / names[0]}" if names else ""


def file_inside(folder: Path, name: str) -> Path:
    """Resolve a plain file name inside a folder; Unsafe if it leads outside, Missing if it does not exist."""
    if not is_plain_name(name):
        raise FormatError("Unsafe", f"expected a plain file name, got {name!r}", path=folder)
    path = folder / name
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise FormatError("Missing", f"expected a file {name:.200}, got none{_gguf_hint(folder)}", path=folder)
    return require_inside(path, folder)


def require_inside(path: Path, folder: Path) -> Path:
    """Raise Unsafe for a link out of a folder, except into the `blobs` of its download cache."""
    real_folder, target = folder.resolve(), path.resolve()
    roots = [real_folder]
    if real_folder.parent.name == "snapshots":
        roots += [root / "blobs" for root in real_folder.parents[1:3]]  # of the repository, or of the whole cache
    if not any(target.is_relative_to(root) for root in roots):
        message = f"{path.relative_to(folder)} is a link that leads out of the folder; put a copy of the file there"
        raise FormatError("Unsafe", message, path=folder)
    return path


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, limit=_MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError("Malformed", "weight_map must map tensor names to file names", path=path)
    return weight_map


def _require_no_shards(single: Path, index: Path, shards: set[str]) -> None:
    """Raise Inconsistent for a folder with two models: one file, and an index whose shards all exist."""
    if single.name not in shards and all(is_plain_name(name) and (index.parent / name).exists() for name in shards):
        message = f"expected one model, got {single.name} and the shards of {index.name}; remove one of the two"
        raise FormatError("Inconsistent", message, path=index.parent)


def _check_index(path: Path, weight_map: Mapping[str, str], shard_by_name: Mapping[str, str]) -> None:
    missing = sorted(name for name, shard in weight_map.items() if shard_by_name.get(name) != shard)
    if missing:
        message = f"{len(missing)} tensors are missing from the shard that the index names: {', '.join(missing[:20])}"
        raise FormatError("Missing", message, path=path)

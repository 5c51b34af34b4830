"""Tensors that several processes wrote, each its parts, read whole by one process that needs no other.

    .metadata       a pickle: shape and dtype of each tensor, and where which part of it lies
    __0_0.distcp    parts, which one process wrote

A pickle can run code, so nothing is taken from it but what describes tensors. This module checks that the parts make up
each tensor, as torch does not change a value that was never written.

Source: torch.distributed.checkpoint (`FileSystemReader`, `Metadata`), whose files are promised to no other version.
"""

import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

from llorch.runtime.errors import FormatError

_DESCRIBES = {
    (described.__module__, described.__name__): described
    for described in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata,
        metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
        _get_layout, torch.Size,
    )
}  # fmt: skip
Described = Mapping[str, TensorStorageMetadata]
_DTYPES = {"float64", "float32", "float16", "int64", "int32", "uint8"}  # those of a snapshot


def read_parts(folder: Path) -> dict[str, np.ndarray]:
    """Read all tensors whole; FormatError where values of one are missing, or torch cannot read them."""
    reader = _Reader(folder)
    try:
        described = cast(Described, reader.read_metadata().state_dict_metadata)  # what is no tensor was refused
        for name, tensor in described.items():
            _require_whole(name, tensor, folder)
        return _loaded(reader, described)
    except (FormatError, OSError):
        raise
    except (Exception, CheckpointException) as error:
        message = f"torch {torch.__version__} cannot read these tensors: {type(error).__name__}: {error}"
        raise FormatError("Unsupported", message, path=folder) from error


def _loaded(reader: FileSystemReader, described: Described) -> dict[str, np.ndarray]:
    tensors: dict[str, Any] = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in described.items()
    }
    with warnings.catch_warnings():  # that this is one process alone
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _require_whole(name: str, tensor: TensorStorageMetadata, folder: Path) -> None:
    """Require that each value lies in exactly one part."""
    n_parts = np.zeros(tensor.size, np.uint8)
    for part in tensor.chunks:
        n_parts[tuple(slice(at, at + n) for at, n in zip(part.offsets, part.sizes, strict=True))] += 1
    if wrong := int((n_parts != 1).sum()):
        message = f"{name}: expected each value in one part, got {wrong} of {n_parts.size} in none or several"
        raise FormatError("Inconsistent", message, path=folder)


class _Reader(FileSystemReader):
    """Reads a description that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            described = _Unpickler(file).load()
        described.storage_meta.load_id = self.load_id
        return described


def _member_of(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration; Python before 3.11.4 pickles members as `getattr(kind, name)`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise FormatError(
            "Unsafe", f".metadata is a pickle that reads an attribute of {kind!r}, which llorch never writes"
        )
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath  # where it was written
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if (module, name) not in _DESCRIBES:
            raise FormatError("Unsafe", f".metadata is a pickle that loads {module}.{name}, which llorch never writes")
        return _DESCRIBES[module, name]

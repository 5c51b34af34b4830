"""Read the tensors of a snapshot that several processes wrote in parts (`sharded_snapshots`), in one process.

    .metadata       a pickle: shape and dtype of each tensor, and file and offset of each part
    __0_0.distcp    parts written by one process

A pickle can run code, so only classes that describe tensors are loaded from it. This module checks that the parts cover
each tensor, because torch leaves values unchanged that were never written.

Source: torch.distributed.checkpoint (`FileSystemReader`, `Metadata`), whose files may change with torch's version.
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

_ALLOWED_CLASSES = {
    (described.__module__, described.__name__): described
    for described in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata,
        metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
        _get_layout, torch.Size,
    )
}  # fmt: skip
Descriptions = Mapping[str, TensorStorageMetadata]
_DTYPES = {"float64", "float32", "float16", "int64", "int32", "uint8"}  # dtypes in snapshots


def read_parts(folder: Path) -> dict[str, np.ndarray]:
    """Read all complete tensors; FormatError if values are missing, or torch cannot read them."""
    reader = _Reader(folder)
    try:
        descriptions = cast(Descriptions, reader.read_metadata().state_dict_metadata)  # others were refused
        for name, tensor in descriptions.items():
            _require_complete(name, tensor, folder)
        return _load(reader, descriptions)
    except (FormatError, OSError):
        raise
    except (Exception, CheckpointException) as error:
        message = f"torch {torch.__version__} cannot read these tensors: {type(error).__name__}: {error}"
        raise FormatError("Unsupported", message, path=folder) from error


def _load(reader: FileSystemReader, descriptions: Descriptions) -> dict[str, np.ndarray]:
    tensors: dict[str, Any] = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in descriptions.items()
    }
    with warnings.catch_warnings():  # about a single process
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _require_complete(name: str, tensor: TensorStorageMetadata, folder: Path) -> None:
    """Require that each value is in exactly one part."""
    n_parts = np.zeros(tensor.size, np.uint8)
    for part in tensor.chunks:
        n_parts[tuple(slice(start, start + n) for start, n in zip(part.offsets, part.sizes, strict=True))] += 1
    if n_wrong := int((n_parts != 1).sum()):
        message = f"{name}: expected each value in one part, got {n_wrong} of {n_parts.size} in none or several"
        raise FormatError("Inconsistent", message, path=folder)


class _Reader(FileSystemReader):
    """Reader of metadata that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            description = _Unpickler(file).load()
        description.storage_meta.load_id = self.load_id
        return description


def _member_of(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration; Python before 3.11.4 pickles members as `getattr(kind, name)`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise FormatError(
            "Unsafe", f".metadata is a pickle that reads an attribute of {kind!r}, which llorch never writes"
        )
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Unpickler that refuses every class but those of torch's tensor descriptions."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath  # the path at the time of writing
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if (module, name) not in _ALLOWED_CLASSES:
            raise FormatError("Unsafe", f".metadata is a pickle that loads {module}.{name}, which llorch never writes")
        return _ALLOWED_CLASSES[module, name]

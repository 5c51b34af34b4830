"""Arrays as a safetensors file (an adapter, a snapshot, a trace): bytes to write, and arrays from bytes that were read.

    u64 header length | JSON {"__metadata__": {...}, name: {dtype, shape, data_offsets}} | data without holes

Names may hold slashes (`optimizer/layers.0.q_proj.lora_A.m`), integers and bytes are kept as they are, and the same
tensors always give the same bytes.

Source: https://github.com/huggingface/safetensors (README).
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from llorch.errors import FormatError
from llorch.files.strict_json import parse_json

_DTYPES = {
    "F64": np.float64, "I64": np.int64, "F32": np.float32, "I32": np.int32, "F16": np.float16, "U8": np.uint8,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def tensor_bytes(
    tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Give the bytes of the file, header first, one tensor at a time.

    The widest come first, so that all are aligned; none is copied that lies in one piece. ValueError for another dtype.
    """
    for name, array in tensors.items():
        if array.dtype not in _CODES:
            raise ValueError(f"tensor file: {name} has the dtype {array.dtype}, expected one of {', '.join(_DTYPES)}")
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name in names:
        array, end = tensors[name], begin + tensors[name].nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def tensors_from(data: UInt8[np.ndarray, " n_bytes"], path: Path) -> dict[str, np.ndarray]:
    """Views, by name, of the tensors of a file that was read whole."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or 8 + length > len(data):
        raise FormatError("Truncated", f"the header claims {length} bytes, the file has {len(data)}", path=path)
    header = parse_json(data[8 : 8 + length].tobytes(), what="the header", path=path)
    if not isinstance(header, dict):
        raise FormatError("Malformed", f"the header must be an object, got {type(header).__name__}", path=path)
    return {name: _tensor(name, entry, data[8 + length :], path) for name, entry in header.items()}


def _tensor(name: str, entry: object, data: UInt8[np.ndarray, " n_bytes"], path: Path) -> np.ndarray:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            code in _DTYPES
            and all(type(size) is int and size >= 0 for size in shape)
            and 0 <= begin <= end <= len(data)
            and end - begin == prod(shape) * np.dtype(_DTYPES[code]).itemsize
        ):
            return data[begin:end].view(_DTYPES[code]).reshape(shape)
    raise FormatError("Malformed", f"{name}: expected a tensor inside the file, got {entry!r:.80}", path=path)

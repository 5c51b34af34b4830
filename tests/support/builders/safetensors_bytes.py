"""Builds safetensors files byte by byte, sound ones and broken ones."""

import json


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A header given as bytes is written as it is, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

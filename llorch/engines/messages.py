"""Messages between this process and that of an engine: plain values and arrays, nothing that could run.

A message is a frame with a JSON text, and then the bytes of its arrays, in the order in which it names
them. What JSON has no word for is an object of one entry that says what it is: `{"array": [dtype, shape]}`.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.runtime.channel import Channel

_OWN = ("builtins", "llorch.runtime.errors")  # modules whose exceptions arrive as what they are


def message(value: object) -> list[bytes | memoryview]:
    """Encode a value as the parts of a message; arrays are not copied.

    The value is made of None, numbers, texts, paths, arrays, sequences, mappings and dataclasses of llorch.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_encode_value(value, arrays)).encode()
    return [text, *map(_bytes, arrays)]


def receive(channel: Channel) -> Any:
    """Receive a value; arrays are filled as they come, sequences are lists and tuples, mappings dictionaries.

    Raises EOFError where the other process is gone; OSError for that, too, or when it says nothing for too long.
    """
    return _meant(json.loads(channel.receive()), channel)


def described(error: Exception) -> list:
    """Describe an exception so that `raised` can make it again.

    The class must come from Python or llorch. Other exceptions become a RuntimeError with the same text.
    """
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ in _OWN)
    args = error.args
    if isinstance(error, OSError) and error.errno is not None:
        args = (error.errno, error.strerror, error.filename)
    found = [kind.__module__, kind.__name__, list(args), vars(error)]
    try:
        message(found)
        same = kind is not Exception and str(raised(*found)) == str(error)
    except Exception:
        same = False  # a class that is made in a way of its own
    return found if same else ["builtins", "RuntimeError", [f"{type(error).__name__}: {error}"], {}]


def raised(module: str, kind: str, args: Sequence, state: Mapping[str, object]) -> Exception:
    """Make the exception that `described` has described."""
    made = getattr(importlib.import_module(module), kind)
    error = made.__new__(made, *args)  # `__init__` of llorch's classes takes other arguments, and ran before
    error.args = error.args or tuple(args)  # which MemoryError leaves to `__init__`
    vars(error).update(state)
    return error


def _encode_value(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert a value to JSON, with its arrays appended to a list; TypeError for other types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": [value.dtype.str, value.shape]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Mapping):
        return {"mapping": [[_encode_value(part, arrays) for part in entry] for entry in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encode_value(part, arrays) for part in value]}
    if isinstance(value, Sequence):
        return [_encode_value(part, arrays) for part in value]
    if is_dataclass(value) and type(value).__module__.startswith("llorch."):
        parts = [[field.name, _encode_value(getattr(value, field.name), arrays)] for field in fields(value)]
        return {"dataclass": [type(value).__module__, type(value).__qualname__, parts]}
    raise TypeError(f"messages: cannot send a {type(value).__name__} to or from the process of an engine")


def _meant(said: Any, channel: Channel) -> Any:
    """Convert a message from JSON back to Python values; arrays follow it through the channel."""
    if isinstance(said, list):
        return [_meant(part, channel) for part in said]
    if not isinstance(said, dict):
        return said
    ((kind, parts),) = said.items()
    if kind == "array":
        array = np.empty(parts[1], parts[0])
        channel.fill(_bytes(array))
        return array
    if kind == "path":
        return Path(parts)
    if kind == "tuple":
        return tuple(_meant(part, channel) for part in parts)
    if kind == "mapping":
        return {_meant(key, channel): _meant(part, channel) for key, part in parts}
    module, name, entries = parts
    return getattr(importlib.import_module(module), name)(**{key: _meant(part, channel) for key, part in entries})


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data

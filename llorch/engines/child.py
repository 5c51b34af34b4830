"""Child process of a reference engine: `main` serves the requests of process.py, and ends with its parent process.

An engine may crash, abort, hang, or be killed for its memory use. It also changes process-wide state: threads, log
levels, environment variables. In a child process, this affects no other code.

Messages contain only plain values and arrays, never code: a frame with a JSON text, and then the bytes of its arrays in
order. A value that JSON cannot express is an object with one entry that names its type: `{"array": [dtype, shape]}`.
"""

import faulthandler
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from llorch.runtime.channel import Channel, stdio_channel

_ERROR_MODULES = ("builtins", "llorch.runtime.errors")  # modules whose exceptions keep their class


def message(value: object) -> list[bytes | memoryview]:
    """Encode a value as the parts of a message; contiguous arrays are not copied.

    The value may contain None, numbers, strings, paths, arrays, sequences, mappings and dataclasses of llorch.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_encode_value(value, arrays)).encode()
    return [text, *map(_bytes, arrays)]


def receive(channel: Channel) -> Any:
    """Receive a value; sequences become lists and tuples, mappings become dictionaries.

    Raise EOFError or OSError if the other process is gone, and OSError if it was silent for too long.
    """
    return _decode(json.loads(channel.receive()), channel)


def describe_error(error: Exception) -> list:
    """Describe an exception so that `rebuild_error` can rebuild it.

    The class must come from Python or llorch. Other exceptions become a RuntimeError with the same text.
    """
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ in _ERROR_MODULES)
    args = error.args
    if isinstance(error, OSError) and error.errno is not None:
        args = (error.errno, error.strerror, error.filename)
    description = [kind.__module__, kind.__name__, list(args), vars(error)]
    try:
        message(description)
        is_rebuildable = kind is not Exception and str(rebuild_error(*description)) == str(error)
    except Exception:
        is_rebuildable = False  # a class with a special constructor
    return description if is_rebuildable else ["builtins", "RuntimeError", [f"{type(error).__name__}: {error}"], {}]


def rebuild_error(module: str, kind: str, args: Sequence, state: Mapping[str, object]) -> Exception:
    """Rebuild the exception that `describe_error` described."""
    error_class = getattr(importlib.import_module(module), kind)
    error = error_class.__new__(error_class, *args)  # not `__init__`: llorch's classes take other arguments there
    error.args = error.args or tuple(args)  # `MemoryError.__new__` does not set args
    vars(error).update(state)
    return error


def _encode_value(value: object, arrays: list[np.ndarray]) -> Any:
    """Convert a value to JSON and append its arrays to `arrays`; raise TypeError for other types."""
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
        return {"mapping": [[_encode_value(element, arrays) for element in entry] for entry in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encode_value(element, arrays) for element in value]}
    if isinstance(value, Sequence):
        return [_encode_value(element, arrays) for element in value]
    if is_dataclass(value) and type(value).__module__.startswith("llorch."):
        named_values = [[field.name, _encode_value(getattr(value, field.name), arrays)] for field in fields(value)]
        return {"dataclass": [type(value).__module__, type(value).__qualname__, named_values]}
    raise TypeError(f"messages: cannot send a {type(value).__name__} to or from the process of an engine")


def _decode(encoded: Any, channel: Channel) -> Any:
    """Convert parsed JSON of a message to Python values; read its arrays from the channel, in order."""
    if isinstance(encoded, list):
        return [_decode(part, channel) for part in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, parts),) = encoded.items()
    if kind == "array":
        array = np.empty(parts[1], parts[0])
        channel.fill(_bytes(array))
        return array
    if kind == "path":
        return Path(parts)
    if kind == "tuple":
        return tuple(_decode(part, channel) for part in parts)
    if kind == "mapping":
        return {_decode(key, channel): _decode(part, channel) for key, part in parts}
    module, name, entries = parts
    return getattr(importlib.import_module(module), name)(**{key: _decode(part, channel) for key, part in entries})


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def main(first_import: str) -> None:
    """Import the slow module `first_import`, then serve requests one after the other; `_listen` ends the process."""
    channel = _isolate_process()
    _PARENT_CHANNELS.append(channel)
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    if first_import:
        with suppress(Exception):  # the import in `_open` raises it again
            importlib.import_module(first_import)
    engines: list[Any] = []  # the open engine, if any
    while True:
        kind, *request = requests.get()
        try:
            reply = message(["value", _HANDLERS[kind](engines, *request)])
        except Exception as error:
            reply = message(["error", *describe_error(error), traceback.format_exc()])
            traceback.clear_frames(error.__traceback__)  # frees large arrays in the frames
        channel.send(*reply)
        del reply


def tell(text: str) -> None:
    """Send the progress of a long call to the parent process; do nothing outside a child process."""
    for channel in _PARENT_CHANNELS:
        channel.send(*message(["said", text]))


def _isolate_process() -> Channel:
    """Separate the engine from the channel, the terminal and signals; make it the first victim if memory runs out."""
    channel = stdio_channel()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group, but meant for the parent
        signal.signal(number, signal.SIG_IGN)
    faulthandler.disable()  # its stack dump would hide the last error line
    logging.basicConfig(format="%(message)s")
    logging.getLogger("llorch").setLevel(logging.DEBUG)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills this process first
    return channel


def _listen(channel: Channel, requests: SimpleQueue[Any]) -> None:
    """Queue requests, even while the engine computes; end the process as soon as the parent is gone."""
    try:
        while True:
            requests.put(receive(channel))
    except (EOFError, OSError):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    finally:
        os._exit(0)


def _open(engines: list[Any], cwd: str, target: str, args: list, kwargs: dict) -> dict[str, object]:
    """Load an engine by `module:function` in the folder `cwd`; return its method names and main attributes."""
    os.chdir(cwd)
    engine = _import_target(target)(*args, **kwargs)
    engines[:] = [engine]
    public = [name for name in dir(type(engine)) if not name.startswith("_") and name != "close"]
    methods = [name for name in public if callable(getattr(type(engine), name))]
    attributes = ("name", "config", "n_threads", "load_path")
    return {"methods": methods, **{name: getattr(engine, name, None) for name in attributes}}


def _call(engines: list[Any], method: str, args: list, kwargs: dict) -> object:
    return getattr(engines[0], method)(*args, **kwargs)


def _close(engines: list[Any]) -> None:
    engine = engines.pop()
    if hasattr(engine, "close"):
        engine.close()
    del engine
    gc.collect()


def _call_target(_engines: list[Any], cwd: str, target: str, args: list, kwargs: dict) -> object:
    os.chdir(cwd)
    return _import_target(target)(*args, **kwargs)


def _import_target(target: str) -> Any:
    """Import the function that `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


_PARENT_CHANNELS: list[Channel] = []
_HANDLERS = {"open": _open, "call": _call, "close": _close, "run": _call_target}

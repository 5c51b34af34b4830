"""The process of an engine: `main` does what process.py asks, and ends when the process that asks is gone.

An engine may crash, abort, hang or be killed for the memory that it takes; and it changes what belongs to a whole
process (threads, log levels, variables of the environment). Here it does all that to itself alone.

Messages are plain values and arrays, nothing that could run: a frame with a JSON text, and then the bytes of its
arrays, in the order in which it names them. What JSON has no word for is an object of one entry that says what it is:
`{"array": [dtype, shape]}`.
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

from llorch.runtime.channel import Channel, own_channel

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


def _encode_value(value: object, arrays: list[np.ndarray]) -> Any:
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


def main(first_import: str) -> None:
    """Answer requests until there are no more; import first what takes long, while nothing is asked yet."""
    channel = _isolate_process()
    _ASKING.append(channel)
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    if first_import:
        with suppress(Exception):  # whoever needs it will meet it again
            importlib.import_module(first_import)
    held: list[Any] = []  # the engine with its model
    while True:
        kind, *request = requests.get()
        try:
            answer = message(["value", _ANSWERS[kind](held, *request)])
        except Exception as error:
            answer = message(["error", *described(error), traceback.format_exc()])
            traceback.clear_frames(error.__traceback__)  # what they hold may be large
        channel.send(*answer)
        del answer


def tell(text: str) -> None:
    """Say how far a long call is, to the process that waits for it; to nobody where there is none."""
    for channel in _ASKING:
        channel.send(*message(["said", text]))


def _isolate_process() -> Channel:
    """Keep the engine off the channel and the terminal, and let nothing happen to others for its sake."""
    channel = own_channel()
    for number in (signal.SIGINT, signal.SIGTERM):  # to a whole group: they are for the process that asks
        signal.signal(number, signal.SIG_IGN)
    faulthandler.disable()  # its stack would stand where the last words are
    logging.basicConfig(format="%(message)s")
    logging.getLogger("llorch").setLevel(logging.DEBUG)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, this is the process to end
    return channel


def _listen(channel: Channel, requests: SimpleQueue[Any]) -> None:
    """Listen to the parent also while the engine computes, so that the engine ends with its parent."""
    try:
        while True:
            requests.put(receive(channel))
    except (EOFError, OSError):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    finally:
        os._exit(0)


def _open(held: list[Any], place: str, target: str, args: list, kwargs: dict) -> dict[str, object]:
    """Load an engine from `module:function` in folder `place`; return its public methods and properties."""
    os.chdir(place)
    engine = _import_target(target)(*args, **kwargs)
    held[:] = [engine]
    public = [name for name in dir(type(engine)) if not name.startswith("_") and name != "close"]
    methods = [name for name in public if callable(getattr(type(engine), name))]
    said = ("name", "config", "n_threads", "load_path")
    return {"methods": methods, **{name: getattr(engine, name, None) for name in said}}


def _call(held: list[Any], method: str, args: list, kwargs: dict) -> object:
    return getattr(held[0], method)(*args, **kwargs)


def _close(held: list[Any]) -> None:
    engine = held.pop()
    if hasattr(engine, "close"):
        engine.close()
    del engine
    gc.collect()


def _call_target(_held: list[Any], place: str, target: str, args: list, kwargs: dict) -> object:
    os.chdir(place)
    return _import_target(target)(*args, **kwargs)


def _import_target(target: str) -> Any:
    """Import the function that `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


_ASKING: list[Channel] = []
_ANSWERS = {"open": _open, "call": _call, "close": _close, "run": _call_target}

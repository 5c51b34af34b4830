"""The process of an engine: `main` does what process.py asks, and ends when the process that asks is gone.

An engine may crash, abort, hang or be killed for the memory that it takes; and it changes what belongs to a whole
process (threads, log levels, variables of the environment). Here it does all that to itself alone.
"""

import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from llorch.engines.messages import described, message, receive
from llorch.runtime.channel import Channel, own_channel


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

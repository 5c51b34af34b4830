"""Looking after the engine: a server whose engine will not compute any more ends, with an error."""

import threading

from llorch.apps.serve.engine import Engine
from llorch.apps.serve.server import RunningServer

LOOK = 0.5  # seconds between two looks


def watch_engine(engine: Engine, running: RunningServer) -> None:
    """Stop a server when its engine has died, or is stuck; in a thread, which ends with the process."""
    threading.Thread(target=_watch, args=(engine, running), name="llorch-watch", daemon=True).start()


def _watch(engine: Engine, running: RunningServer) -> None:
    """Stop the server with an error once the engine has failed or a step does not return."""
    never = threading.Event()
    while not never.wait(LOOK):
        if engine.is_stuck:
            engine.give_up(TimeoutError("a step of the engine does not return"))
        if engine.failure is not None and not engine.draining:
            return running.stop(RuntimeError(f"serve: the engine has died: {engine.failure!r}"))

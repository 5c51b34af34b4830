"""An engine that does what engines do at their worst, for the process that it runs in."""

import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from llorch.engines.child import tell
from llorch.runtime.errors import FormatError, MissingExtra


class OwnError(RuntimeError):
    """Of a class that the other process does not know."""


class MadeItsOwnWay(Exception):
    """Of a class that is not made of its arguments."""

    def __init__(self, *, why: str) -> None:
        super().__init__(f"because {why}")


ERRORS: dict[str, Exception] = {
    "RuntimeError": RuntimeError("engine: refuses"),
    "ValueError": ValueError("ids: expected others, got 7"),
    "MemoryError": MemoryError("no room for 7 GB"),
    "KeyError": KeyError("stage"),
    "FileNotFoundError": FileNotFoundError(2, "No such file or directory", "a/model"),
    "FormatError": FormatError("OutOfRange", "7 is too large", path=Path("a"), offset=3),
    "MissingExtra": MissingExtra("golden", "engine"),
    "OwnError": OwnError("of its own"),
    "MadeItsOwnWay": MadeItsOwnWay(why="it can"),
}


def doubled(number: int) -> int:
    return 2 * number


class FaultyEngine:
    """Has no model."""

    name, n_threads, config = "planted", 1, None

    def __init__(self, doing: str = "", *values: object) -> None:
        if doing:
            getattr(self, doing)(*values)

    def echo(self, *values: object, **options: object) -> tuple:
        return values, options

    def tell(self, *lines: str) -> int:
        for line in lines:
            tell(line)
        return len(lines)

    def end_by(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    def abort(self) -> None:
        print("a warning", file=sys.stderr, flush=True)
        os.write(1, b"engine.cpp:7: ASSERT(x > 0) failed\n\n")
        os.abort()

    def crash(self) -> None:
        ctypes.string_at(0)

    def leave(self) -> None:
        sys.exit(5)

    def hang(self) -> None:
        time.sleep(600)

    def spin(self) -> None:
        while True:
            pass

    def fail(self, name: str) -> None:
        raise ERRORS[name]

    def leave_a_file(self) -> Path:
        return Path(tempfile.mkstemp()[1])

    def surroundings(self) -> dict:
        ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return {"ggml": os.environ.get("GGML_CPU_TILED_MM"), "stdin": sys.stdin.read(), "ignores Ctrl-C": ignores}

    def _private(self) -> None:
        """Not to be asked for."""

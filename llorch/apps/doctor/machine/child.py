"""Python in a process beside this one, which may end it, or never come back."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from llorch.runtime.worker import Ended, run, signal_name

_MARK = "llorch:"  # opens llorch's lines; imported packages may print, too


def run_probe(code: str, *arguments: str, timeout: float) -> tuple[list[Any], str]:
    """Run a program and return the values that it passes to `say`, and the reason why it failed ("" for none).

    Args:
        code: The program; `say(value)` is defined, `sys` and `json` are imported.
        arguments: Arguments of the command line.
        timeout: Seconds until the program is ended.
    """
    head = f"import json, sys\ndef say(value): print({_MARK!r} + json.dumps(value), flush=True)\n"
    command = [sys.executable, "-c", head + code, *arguments]
    ended = run(command, seconds=timeout)
    return list(_printed_values(ended.text)), _reason_of_end(ended, timeout)


def _printed_values(out: str) -> Iterator[Any]:
    """Yield the JSON values that the child printed after a mark; skip all other lines."""
    for line in out.splitlines():
        before, mark, value = line.partition(_MARK)
        if mark and not before:
            yield json.loads(value)


def _reason_of_end(ended: Ended, timeout: float) -> str:
    if ended.limit:
        return f"did not answer within {timeout:.0f} s"
    if ended.status < 0:
        return f"signal ended the process: {signal_name(ended.status)}"
    if ended.status == 0:
        return ""
    return f"the process ended with code {ended.status}" + (f": {ended.last_words}" if ended.last_words else "")


_IMPORTING = """
import importlib
for name in sys.argv[1:]:
    say([name, None])
    try:
        importlib.import_module(name)
        say([name, ""])
    except BaseException as error:
        say([name, f"{type(error).__name__}: {error}"])
"""


def imported_by(modules: Sequence[str], *, timeout: float) -> dict[str, str]:
    """Import modules one after the other: of each what is wrong with it, or nothing."""
    found: dict[str, str] = {}
    while len(found) < len(modules):
        rest = [name for name in modules if name not in found]
        said, why = run_probe(_IMPORTING, *rest, timeout=timeout)
        found |= {name: " ".join(error.split()) for name, error in said if error is not None}
        if len(found) < len(modules):  # the process ended in one of them; a new one goes on after it
            name = said[-1][0] if said else rest[0]
            found[name] = found.get(name) or why or "the process ended"
    return found

"""Python in a process beside this one, which may end it, or never come back."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_MARK = "llorch:"  # of lines of ours: what is imported may print, too


def said_by(code: str, *arguments: str, timeout: float) -> tuple[list[Any], str]:
    """Run a program and return the values that it passes to `say`, and the reason why it failed ("" for none).

    Args:
        code: The program; `say(value)` is defined, `sys` and `json` are imported.
        arguments: Arguments of the command line.
        timeout: Seconds until the program is ended.
    """
    head = f"import json, sys\ndef say(value): print({_MARK!r} + json.dumps(value), flush=True)\n"
    command = [sys.executable, "-c", head + code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
            why = _ending(process.returncode, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            why = f"did not answer within {timeout:.0f} s"
    return list(_values(out)), why


def _values(out: str) -> Iterator[Any]:
    for line in out.splitlines():
        before, mark, value = line.partition(_MARK)
        if mark and not before:
            yield json.loads(value)


def _ending(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"signal ended the process: {signal.Signals(-code).name}"
    last = [line.strip() for line in errors.splitlines() if line.strip()][-1:]
    return f"the process ended with code {code}" + "".join(f": {line}" for line in last)


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
        said, why = said_by(_IMPORTING, *rest, timeout=timeout)
        found |= {name: " ".join(error.split()) for name, error in said if error is not None}
        if len(found) < len(modules):  # the process ended in one of them; a new one goes on after it
            name = said[-1][0] if said else rest[0]
            found[name] = found.get(name) or why or "the process ended"
    return found

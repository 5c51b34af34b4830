"""End a command with an exit code, and with one line on stderr instead of a traceback.

0 ok, 1 numbers differ, 2 usage or data that cannot be used, 3 something needed is missing (a file, a golden, a device,
an optional package, an engine that did not survive), 4 out of memory; a dump whose numbers are not comparable: 10 other
token ids, 11 other positions, 12 a norm's input for its output, 13 an unknown layout, 14 other weights, 15 not the run
in production; 70 a bug in llorch, 74 a disk that is full, fails or cannot be written to, 130 interrupted, 141 the
reader of our output went away.

A `UserError` has code 2. Every other ValueError, such as a shape that does not broadcast, is a bug.
"""

import errno
import faulthandler
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

import click

from llorch.runtime import errors
from llorch.runtime.errors import LearnerFault, MissingExtra, UserError, printable, shortened

OK, DIFFERS, USAGE, MISSING, NO_MEMORY, BUG, DISK = 0, 1, 2, 3, 4, 70, 74
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the signal, as a shell reports them
GUARDS: Mapping[errors.Guard, int] = {"ids": 10, "positions": 11, "norm": 12, "layout": 13, "weights": 14, "run": 15}

_CODES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((KeyboardInterrupt,), INTERRUPTED),
    ((BrokenPipeError,), BROKEN_PIPE),
    ((errors.CheckpointMismatch, LearnerFault), DIFFERS),
    ((errors.NonFiniteRun,), USAGE),
    ((MissingExtra, errors.MissingDevice, errors.EngineDied, FileNotFoundError), MISSING),
    ((MemoryError,), NO_MEMORY),
    ((UserError, OSError), USAGE),
)
_FILE_LIMIT_ADVICE = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 1024",
    errno.ENFILE: "end programs that hold many open files",
}
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}


def exit_code(error: BaseException) -> int:
    """Find the exit code of an exception: special cases, then the first matching class in `_CODES`, else BUG."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return NO_MEMORY  # torch raises RuntimeError for it
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return NO_MEMORY
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return DISK
    if isinstance(error, ModuleNotFoundError):
        return MISSING if _missing_extra(error) else BUG
    if isinstance(error, errors.RankFailed):
        return MISSING if error.exit_code is None else error.exit_code
    if isinstance(error, errors.GuardFailed):
        return GUARDS[error.guard]
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), BUG)


def _missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Name the extra that provides the module; imported only on an error, because the import would slow every start."""
    from llorch.apps.doctor.machine.packages import missing_extra

    return missing_extra(error)


def error_line(error: BaseException) -> str:
    """Format an error as one printable line for a person."""
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, ModuleNotFoundError) and (missing := _missing_extra(error)) is not None:
        text = str(missing)
    elif isinstance(error, OSError) and error.errno in _FILE_LIMIT_ADVICE:
        text = f"{error.filename or 'open'}: {error.strerror}; {_FILE_LIMIT_ADVICE[error.errno]}"
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS and error.strerror == os.strerror(error.errno):
        text = f"stdout: {error.strerror}; write the output to another place"  # a file would have its name
    elif (isinstance(error, OSError) and error.errno == errno.ENOMEM) or (type(error), str(error)) == (MemoryError, ""):
        text = "out of memory, or out of address space (ulimit -v); use a smaller model or a shorter input"
    else:
        message = str(error) if isinstance(error, OSError) else shortened(str(error))  # a path is never shortened
        text = " ".join(message.split()) or type(error).__name__
    return f"llorch: {printable(text)}"


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit with code 128 + SIGTERM, so that the block can clean up."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    old_handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


@contextmanager
def reported(*, traceback: bool = False) -> Iterator[None]:
    """Turn any error in the block into a line on stderr (with `traceback`, also that) and an exit code."""
    _open_streams()
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # reports signals: reading a truncated mapped file raises SIGBUS
    try:
        yield
        sys.stdout.flush()  # so that a closed pipe shows here and not while Python shuts down
    except click.ClickException as error:
        _print_if_possible(error.show)
        raise click.exceptions.Exit(error.exit_code) from None
    except (click.exceptions.Exit, click.Abort):
        raise  # click handles them
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code != BROKEN_PIPE:
            _print_if_possible(partial(explain, error, traceback=traceback or code == BUG))
        _abandon_broken(sys.stdout)
        raise click.exceptions.Exit(code) from None


def _print_if_possible(show: Callable[[], None]) -> None:
    """Show an error on stderr; if stderr is full or closed, only the exit code reports it."""
    try:
        show()
    except OSError:
        _abandon_broken(sys.stderr)


def explain(error: BaseException, *, traceback: bool = False) -> None:
    """Print an error as one line on stderr, after the traceback if wanted, or after the learner's own frames."""
    if traceback:
        import traceback as tracebacks

        click.echo("".join(tracebacks.format_exception(error)), err=True, nl=False)
    if isinstance(error, LearnerFault):
        from llorch.apps.learn.calling import own_frames

        for line in own_frames(error.__cause__ or error):
            click.echo(f"  {printable(line)}", err=True)
    click.echo(error_line(error), err=True)


def _open_streams() -> None:
    """Open a stream that the caller closed (`>&-`), and let stdout take every character."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")
    sys.stderr = sys.stderr or Path(os.devnull).open("w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale such as C may lack characters that a model writes
        sys.stdout.reconfigure(errors="backslashreplace")


def _abandon_broken(stream: TextIO) -> None:
    """Drop the buffered output of a stream that nobody reads or whose disk is full, so that exit raises nothing."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

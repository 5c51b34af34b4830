"""`--mesh`: parse the option, and run the same command again on every rank (process) of the mesh."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from math import prod
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from llorch.cli.options import SECONDS, group, page_option
from llorch.cli.outcome import OK, error_line, exit_code
from llorch.runtime.errors import MissingExtra, RankLost
from llorch.runtime.launched_rank import is_launched_by_llorch, is_rank, silence_other_ranks
from llorch.training.stopping import SIGNALS, Stopped

if TYPE_CHECKING:
    from llorch.pytorch.distributed.launch import DeviceMesh

AXES = ("dp", "tp")
Made = TypeVar("Made")


class Terminated(KeyboardInterrupt):
    """Interruption by SIGTERM, which a launcher sends if the user interrupted the run or another rank failed."""


class MeshType(click.ParamType):
    """Parameter type `dp=N,tp=M`: N data-parallel groups of M tensor-parallel ranks each."""

    name = "dp=N,tp=M"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Mapping[str, int]:
        """Parse the number of ranks of both axes, in any case, as the help spells DP=N; an axis left out has 1."""
        if is_rank():
            silence_other_ranks()
        if isinstance(value, Mapping):
            return value
        matches = [re.fullmatch(r"(dp|tp)=([1-9]\d{0,3})", part) for part in str(value).lower().split(",")]
        sizes = {match[1]: int(match[2]) for match in matches if match}
        if len(sizes) < len(matches):
            self.fail(f"expected dp=N, tp=M or dp=N,tp=M, such as dp=2,tp=2, got {value!r}", param, ctx)
        return {name: sizes.get(name, 1) for name in AXES}


mesh_option = group(
    "Machine",
    page_option(
        "--mesh", "axes", type=MeshType(), is_eager=True,  # so that only rank 0 reports errors of the other options
        help="N data-parallel by M tensor-parallel processes.",
    ),
)  # fmt: skip
timeout_option = group(
    "Machine",
    page_option(
        "--rank-timeout", type=SECONDS, default=300.0, show_default=True, metavar="SECONDS",
        help="Longest wait of a process.",
    ),
)  # fmt: skip


def require_tensor_parallel(axes: Mapping[str, int] | None, given: Mapping[str, object]) -> None:
    """Raise a usage error for options that a model on a mesh does not support; `given` has their values by option."""
    if axes is None:
        return
    if axes["dp"] != 1:
        raise click.UsageError(f"--mesh dp={axes['dp']}: expected tp=M alone; only training splits the rows of a batch")
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{option} does not go with --mesh, which splits the torch path over CPU processes")


@contextmanager
def on_mesh(
    axes: Mapping[str, int] | None, *, rank_timeout: float, device: str = "cpu"
) -> Iterator["DeviceMesh | None"]:
    """Join the requested mesh; yield it, or None without `axes`. An error on one rank ends all ranks.

    In the process that the user started, launch the ranks, which run the whole command again, and exit with their code.
    """
    if axes is None:
        yield None
        return
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.pytorch.device import target
    from llorch.pytorch.distributed.launch import Ranks, leave, start

    timeout = timedelta(seconds=rank_timeout)
    if not is_rank():
        target(device)  # raises if the device is missing
        _launch_ranks(axes, timeout)
    _raise_on_signals()
    try:
        mesh = start(axes, device=device, timeout=timeout)
        yield mesh
        Ranks(mesh).largest(0)  # a barrier: no rank may end before the others are done
        _ignore_signals()
        leave()
    except (click.exceptions.Exit, click.ClickException, Stopped):
        _ignore_signals()
        raise
    except (Exception, KeyboardInterrupt) as error:
        _ignore_signals()
        raise _choose_exit_error(error) from error


def of_first(mesh: "DeviceMesh | None", read: Callable[[], Made]) -> Made:
    """Return `read()` of rank 0 on all ranks, because the user's stdin can be read only once."""
    if mesh is None:
        return read()
    from llorch.pytorch.distributed.launch import Ranks

    return Ranks(mesh).first(read)


def _launch_ranks(axes: Mapping[str, int], timeout: timedelta) -> NoReturn:
    """Run the command on ranks, and exit (raise Exit) with their code."""
    from llorch.pytorch.distributed.launch import RanksEnded, on_ranks

    try:
        on_ranks(prod(axes.values()), run_again, sys.argv[1:], sys.stdin is not None, timeout=timeout)
    except RanksEnded as ended:
        raise click.exceptions.Exit(ended.exit_code) from None
    raise click.exceptions.Exit(OK)


def run_again(arguments: Sequence[str], has_stdin: bool) -> None:
    """Run the command line with these arguments as a rank, and leave with its exit code.

    All ranks share the stdin of the launcher, if it has one; see `of_first`.
    """
    from llorch.cli import main

    if has_stdin:
        sys.stdin = open(0, closefd=False)  # multiprocessing closes it in child processes
    try:
        main(args=[*arguments], prog_name="llorch")
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)  # a normal exit could abort: torch threads may still wait for other ranks
        raise


def _choose_exit_error(error: BaseException) -> BaseException:
    """Choose the exception that ends this rank after an error: its own, or that of the rank that failed first."""
    from llorch.pytorch.distributed.launch import Ranks

    if Ranks.ending is None:  # the rank has not joined the mesh
        return error
    exit_error = Ranks.ending.of(error, exit_code(error), error_line(error).removeprefix("llorch: "))
    if is_launched_by_llorch() and isinstance(exit_error, (RankLost, Terminated)):
        return click.exceptions.Exit(exit_code(exit_error))  # the launcher reports the cause
    return exit_error


def _raise_on_signals() -> None:
    """Raise on a signal; the launcher may send several, so later ones are ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


def _ignore_signals() -> None:
    """Ignore signals, so that the launcher cannot end this rank before it prints its line and sets its exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

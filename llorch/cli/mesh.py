"""`--mesh`: what the user writes, and the same command again on every rank of it."""

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
from llorch.runtime.launched_rank import is_launched_by_us, is_rank, only_first_speaks
from llorch.training.stopping import SIGNALS, Stopped

if TYPE_CHECKING:
    from llorch.pytorch.distributed.launch import DeviceMesh

AXES = ("dp", "tp")
Made = TypeVar("Made")


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a launcher sends where the user ended it, and where another rank failed."""


class MeshType(click.ParamType):
    """`dp=N,tp=M`: N ranks with other rows of a batch, each of them M that share every layer."""

    name = "dp=N,tp=M"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Mapping[str, int]:
        """Read the number of ranks of both axes, in any case, as the help spells DP=N; an axis left out has 1."""
        if is_rank():
            only_first_speaks()
        if isinstance(value, Mapping):
            return value
        found = [re.fullmatch(r"(dp|tp)=([1-9]\d{0,3})", part) for part in str(value).lower().split(",")]
        given = {match[1]: int(match[2]) for match in found if match}
        if len(given) < len(found):
            self.fail(f"expected dp=N, tp=M or dp=N,tp=M, such as dp=2,tp=2, got {value!r}", param, ctx)
        return {name: given.get(name, 1) for name in AXES}


mesh_option = group(
    "Machine",
    page_option(
        "--mesh", "axes", type=MeshType(), is_eager=True,  # so that one rank alone says what is wrong with the others
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
    """Raise a usage error for what a model that generates on a mesh cannot have; `given` is by option."""
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
    """Enter a mesh, if one is asked for, on ranks started for it; an error of one rank ends all of them."""
    if axes is None:
        yield None
        return
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.pytorch.device import target
    from llorch.pytorch.distributed.launch import Ranks, leave, start

    timeout = timedelta(seconds=rank_timeout)
    if not is_rank():
        target(device)  # that it is here
        _launch_ranks(axes, timeout)
    _interruptible()
    try:
        mesh = start(axes, device=device, timeout=timeout)
        yield mesh
        Ranks(mesh).largest(0)  # that nobody ends before the others are done
        _deaf()
        leave()
    except (click.exceptions.Exit, click.ClickException, Stopped):
        _deaf()
        raise
    except (Exception, KeyboardInterrupt) as error:
        _deaf()
        raise _ending(error) from error


def of_first(mesh: "DeviceMesh | None", read: Callable[[], Made]) -> Made:
    """Read on the first rank, for all ranks: the user's stdin can be read only once."""
    if mesh is None:
        return read()
    from llorch.pytorch.distributed.launch import Ranks

    return Ranks(mesh).first(read)


def _launch_ranks(axes: Mapping[str, int], timeout: timedelta) -> NoReturn:
    """Run the command on ranks, and end with their code."""
    from llorch.pytorch.distributed.launch import RanksEnded, on_ranks

    try:
        on_ranks(prod(axes.values()), run_again, sys.argv[1:], sys.stdin is not None, timeout=timeout)
    except RanksEnded as ended:
        raise click.exceptions.Exit(ended.exit_code) from None
    raise click.exceptions.Exit(OK)


def run_again(arguments: Sequence[str], has_stdin: bool) -> None:
    """Run the command line with these arguments as a rank, and leave with its exit code.

    All share the stdin of the launcher, if it has one; see `of_first`.
    """
    from llorch.cli import main

    if has_stdin:
        sys.stdin = open(0, closefd=False)  # which Python takes away from processes that it starts
    try:
        main(args=[*arguments], prog_name="llorch")
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)  # threads of torch that still wait for other ranks could abort a longer farewell
        raise


def _ending(error: BaseException) -> BaseException:
    """Choose the exception that ends a rank after it raised this one."""
    from llorch.pytorch.distributed.launch import Ranks

    if Ranks.ending is None:  # it has not joined the others
        return error
    ends = Ranks.ending.of(error, exit_code(error), error_line(error).removeprefix("llorch: "))
    if is_launched_by_us() and isinstance(ends, (RankLost, Terminated)):
        return click.exceptions.Exit(exit_code(ends))  # our launcher says why
    return ends


def _interruptible() -> None:
    """End on a signal, of which the launcher may send several."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _deaf()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


def _deaf() -> None:
    """Let no launcher end this rank, which is about to end with a line and a code of its own."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

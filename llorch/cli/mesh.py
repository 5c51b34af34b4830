"""`--mesh`: what the user writes, and the same command again on every rank of it."""

import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, NoReturn

import click

from llorch.cli.outcome import error_line, exit_code
from llorch.errors import MissingExtra

if TYPE_CHECKING:
    from llorch.pytorch.ranks import DeviceMesh

AXES = ("dp", "tp")


class MeshType(click.ParamType):
    """`dp=N,tp=M`: N ranks with other rows of a batch, each of them M that share every layer."""

    name = "dp=N,tp=M"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Mapping[str, int]:
        """The number of ranks of both axes; 1 of one that is not given."""
        if isinstance(value, Mapping):
            return value
        found = [re.fullmatch(r"(dp|tp)=([1-9]\d{0,3})", part) for part in str(value).split(",")]
        given = {match[1]: int(match[2]) for match in found if match}
        if len(given) < len(found):
            self.fail(f"expected dp=N,tp=M or one of both, as dp=2,tp=2, got {value!r}", param, ctx)
        return {name: given.get(name, 1) for name in AXES}


mesh_option = click.option(
    "--mesh", "axes", type=MeshType(),
    help="Processes: dp with other rows of a batch, each of them tp that share every layer.",
)  # fmt: skip


@contextmanager
def on_mesh(axes: Mapping[str, int] | None, *, device: str = "cpu") -> Iterator["DeviceMesh | None"]:
    """This rank's place in a mesh, where one is asked for; with what ends one rank all of them end.

    In a process that no launcher started the command is run on ranks, and ends with their code.
    """
    if axes is None:
        yield None
        return
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.pytorch.ranks import Ranks, is_rank, leave, only_first_speaks, start

    if not is_rank():
        _launch(axes)
    only_first_speaks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher is sent it, too, and tells the ranks by SIGTERM
    mesh = start(axes, device=device)
    try:
        yield mesh
        leave()
    except (click.exceptions.Exit, click.ClickException):
        raise
    except Exception as error:
        raise Ranks(mesh).outcome(error, exit_code(error), error_line(error).removeprefix("llorch: ")) from error


def _launch(axes: Mapping[str, int]) -> NoReturn:
    from llorch.pytorch.ranks import on_ranks

    raise click.exceptions.Exit(on_ranks(prod(axes.values()), run_again, sys.argv[1:]))


def run_again(arguments: Sequence[str]) -> int:
    """The command line with these arguments, as a rank; gives its exit code, which is the same on all of them."""
    from llorch.cli import main

    try:
        main(args=[*arguments], prog_name="llorch")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0

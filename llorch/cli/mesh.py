"""`--mesh`: what the user writes, and the same command again on every rank of it."""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

import click

from llorch.errors import MissingExtra

if TYPE_CHECKING:
    from llorch.pytorch.ranks import DeviceMesh


class RanksType(click.ParamType):
    """`tp=N`, N ranks that share each layer."""

    name = "tp=N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of ranks, at least 1."""
        found = re.fullmatch(r"tp=([1-9]\d{0,3})", str(value))
        return int(found[1]) if found else self.fail(f"expected tp=N, as tp=2, got {value!r}", param, ctx)


def joined(n_ranks: int) -> "DeviceMesh":
    """The mesh, if a launcher made this process a rank; else the command is run on ranks, and ends with their code."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.pytorch.ranks import is_rank, start

    return start({"tp": n_ranks}) if is_rank() else _launched(n_ranks)


def _launched(n_ranks: int) -> NoReturn:
    from llorch.pytorch.ranks import on_ranks

    raise click.exceptions.Exit(on_ranks(n_ranks, run_again, sys.argv[1:]))


def run_again(arguments: Sequence[str]) -> int:
    """The command line with these arguments, as a rank; gives its exit code, which is the same on all of them."""
    from llorch.cli import main

    try:
        main(args=[*arguments], prog_name="llorch")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0

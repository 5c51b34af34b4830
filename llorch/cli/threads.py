"""`--threads`, and what a command takes without it."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from llorch.cli.options import WholeNumber

if TYPE_CHECKING:
    from llorch.config import ModelConfig

_WANTED = "llorch.threads"


def threads_option(function: Callable) -> Callable:
    """`--threads`, for whatever computes; `use_threads` reads it."""
    return click.option(
        "--threads", type=WholeNumber(min=1), expose_value=False, callback=_remember,
        help="Of the CPU.  [default: OMP_NUM_THREADS, else 1 for a small model, else all]",
    )(function)  # fmt: skip


def _remember(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    ctx.meta[_WANTED] = value


def use_threads(*configs: "ModelConfig", recorded: int | None = None) -> str:
    """Compute with as many threads as the user says, or as suit the models; gives how many, for stderr.

    Where torch runs the models, it is imported by now. `recorded`: threads of the run that is gone on with.
    """
    from llorch.threads import VARIABLES, is_small, limited

    ctx = click.get_current_context()
    n = ctx.meta.get(_WANTED) or recorded
    if n is None:
        for name in VARIABLES:
            if os.environ.get(name):
                return f"threads: {name}={os.environ[name]}"
        if not all(map(is_small, configs)):
            return "threads: all"
    ctx.with_resource(limited(n or 1))
    return f"threads: {n or 1}"


def wait_asleep() -> None:
    """Let threads sleep while they wait for each other, not spin; libraries read this when they are loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # GNU's and Intel's OpenMP: torch
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the least: NumPy

"""Number of CPU threads of a command: the option, and a default that depends on the model sizes."""

import os
from typing import TYPE_CHECKING

import click

from llorch.cli.options import WholeNumber, group, page_option

if TYPE_CHECKING:
    from llorch.families.config import ModelConfig

_REQUESTED = "llorch.runtime.threads"  # key of the number of threads in click's context


def _remember(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Store the requested number of threads in the context, for `use_threads`."""
    ctx.meta[_REQUESTED] = value


threads_option = group(  # `use_threads` reads it
    "Machine",
    page_option(
        "--threads", type=WholeNumber(min=1, max=1024), expose_value=False, callback=_remember,
        help="Number of CPU threads.  [default: OMP_NUM_THREADS, else all; 1 for small models]",
    ),
)  # fmt: skip


def use_threads(*configs: "ModelConfig", recorded: int | None = None) -> str:
    """Limit threads to the user's number, else `recorded` (of the run to resume), else a default; describe it."""
    from llorch.files.tensor_names import count_parameters
    from llorch.runtime.threads import VARIABLES, is_small, limit_threads, n_cores

    ctx = click.get_current_context()
    n_threads = ctx.meta.get(_REQUESTED) or recorded
    if n_threads is None:
        for name in VARIABLES:
            if os.environ.get(name):
                return f"threads: {name}={os.environ[name]}"
        n_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of a mesh on this machine
        is_small_model = all(is_small(count_parameters(config)) for config in configs)
        if not is_small_model and n_local_ranks == 1:
            return "threads: all"
        n_threads = 1 if is_small_model else max(1, n_cores() // n_local_ranks)
    ctx.with_resource(limit_threads(n_threads))
    return f"threads: {n_threads}"


def allowed_cores() -> int:
    """Return how many cores a command may use at once: `--threads` if given, else the cores of the process."""
    from llorch.runtime.threads import VARIABLES, n_cores

    settings = [click.get_current_context().meta.get(_REQUESTED), *(os.environ.get(name) for name in VARIABLES)]
    return next((int(setting) for setting in settings if setting and str(setting).isdigit()), n_cores())

"""The number of CPU threads of a command: the option, and the default that suits its models."""

import os
from typing import TYPE_CHECKING

import click

from llorch.cli.options import WholeNumber, group, page_option

if TYPE_CHECKING:
    from llorch.families.config import ModelConfig

SPINS = "3000"  # of a waiting thread, some 0.1 ms: from one product of a token to the next, and no more
_WANTED = "llorch.runtime.threads"


def _remember(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Keep the wanted number of threads in the context, for `use_threads`."""
    ctx.meta[_WANTED] = value


threads_option = group(  # for whatever computes; `use_threads` reads it
    "Machine",
    page_option(
        "--threads", type=WholeNumber(min=1, max=1024), expose_value=False, callback=_remember,
        help="Number of CPU threads.  [default: OMP_NUM_THREADS, else all; 1 for small models]",
    ),
)  # fmt: skip


def use_threads(*configs: "ModelConfig", recorded: int | None = None) -> str:
    """Use the threads that the user says (`recorded`: said when the run began) or that suit; says how many."""
    from llorch.files.tensor_names import count_parameters
    from llorch.runtime.threads import VARIABLES, is_small, limited, n_cores

    ctx = click.get_current_context()
    n = ctx.meta.get(_WANTED) or recorded
    if n is None:
        for name in VARIABLES:
            if os.environ.get(name):
                return f"threads: {name}={os.environ[name]}"
        n_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of a mesh that share this machine
        small = all(is_small(count_parameters(config)) for config in configs)
        if not small and n_here == 1:
            return "threads: all"
        n = 1 if small else max(1, n_cores() // n_here)
    ctx.with_resource(limited(n))
    return f"threads: {n}"


def allowed_cores() -> int:
    """Return how many cores a command may use at once: `--threads` if given, else the cores of the process."""
    from llorch.runtime.threads import VARIABLES, n_cores

    said = [click.get_current_context().meta.get(_WANTED), *(os.environ.get(name) for name in VARIABLES)]
    return next((int(n) for n in said if n and str(n).isdigit()), n_cores())


def wait_asleep() -> None:
    """Let threads that wait for each other soon sleep, not spin for long; libraries read this when they are loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:  # GNU's and Intel's OpenMP: torch
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the least: NumPy

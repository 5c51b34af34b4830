"""Ranks of a mesh that start in a tenth of a second: copies of a process that has imported torch and llorch already.

`distributed.launch.on_ranks` starts every rank as a new Python process, which imports torch for some seconds.
Inside `warm_ranks` the same launcher lets Python's fork server start them. The fork server lives as long as the test
process. Every case still has ranks of its own, so a mistake that is planted in them ends with them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1]
PRELOADED = ("helpers.warm_modules",)


@cache
def start_server() -> None:
    """Start the fork server of this process, which imports what ranks need."""
    forkserver.set_forkserver_preload([*PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        forkserver.ensure_running()


@contextmanager
def warm_ranks() -> Iterator[None]:
    """Start ranks by the fork server until the end of the block."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from llorch.pytorch.distributed import launch

    start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "LaunchConfig", partial(launch.LaunchConfig, start_method="forkserver"))
        # torch reads every line of the stack here, for a log that is off: a third of a second for each start in a test
        patch.setattr(dynamic_rendezvous, "get_method_name", lambda: "")
        yield

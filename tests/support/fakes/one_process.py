"""Work of the ranks of a mesh, done by this process alone, where what a command says of a mesh is the subject."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import pytest


@contextmanager
def resume_in_one_process() -> Iterator[list[Mapping[str, int]]]:
    """Let the runs of `verify_resume` on a mesh be runs without one; refuse what the ranks would refuse.

    Yields:
        The axes of every run.
    """
    from llorch.cli.inputs import model_path
    from llorch.files import open_weights
    from llorch.pytorch.distributed.sharding_plan import cannot_split
    from llorch.pytorch.train import verify_resume

    started: list[Mapping[str, int]] = []

    def run_alone(
        n_ranks: int, work: Callable, axes: Mapping[str, int], _: int, settings, folder: Path, stop_at
    ) -> None:
        assert (work, n_ranks) == (verify_resume.run_as_rank, prod(axes.values()))
        assert cannot_split(open_weights(model_path(settings.model)).config, axes["tp"]) is None
        started.append(axes)
        verify_resume._run_here(settings, folder, stop_at=stop_at, resume=(folder / verify_resume.RUN).exists())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llorch.pytorch.distributed.launch.on_ranks", run_alone)
        yield started

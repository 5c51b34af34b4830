"""Prove, on the machine at hand, that a run that was stopped and taken up again is the run that was not, bit by bit.

    straight    N steps
    halves      N/2 steps, then SIGTERM, so that a snapshot is written; the rest in a process of its own
    controls    as halves, but part of the snapshot is lost in between: this has to be noticed, or nothing was proven

Each is a run as `llorch lora train` makes it, in a folder of its own, on a mesh with ranks of its own; weights, moments
and log are compared.
"""

import gc
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llorch.runtime.errors import CheckpointMismatch, UserError
from llorch.runtime.threads import limited
from llorch.runtime.worker import PIPE, end_with_parent, python, run
from llorch.training.log import LOG
from llorch.training.settings import TrainSettings
from llorch.training.settings_file import settings_from
from llorch.training.snapshot_files import Snapshot
from llorch.training.snapshots import SnapshotStore

if TYPE_CHECKING:
    from llorch.pytorch.train.trainer import StepReport, Training

ADAPTER = "adapter_model.safetensors"
RUN = "run.json"
LOST = ("moments", "place")  # what a control loses


@dataclass(frozen=True)
class Compared:
    """One tensor of both runs."""

    name: str  # `adapter/...`, `optimizer/...`, or the file of the adapter
    n_values: int
    differing_bits: int  # all of them where dtype or shape differ or one run lacks the tensor

    @property
    def kind(self) -> str:
        """The group of the tensor: `adapter`, `optimizer`, or the file of the adapter."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class RunComparison:
    """Two runs."""

    tensors: tuple[Compared, ...]  # of the snapshots at the end, and the adapter as it was written
    n_lines: int  # of the longer log
    differing_lines: int  # those that are not equal, byte by byte

    @property
    def equal(self) -> bool:
        """True if no bit differs."""
        return not self.differing_lines and not any(tensor.differing_bits for tensor in self.tensors)


@dataclass(frozen=True)
class Proof:
    """The result of the comparison."""

    steps: int
    stopped_at: int  # step at which the halves were cut
    halves: RunComparison  # straight run against halves
    controls: Mapping[str, RunComparison]  # what was lost, and the comparison that must not be equal

    @property
    def holds(self) -> bool:
        """True if the halves are equal and every control is not."""
        return self.halves.equal and not any(control.equal for control in self.controls.values())


def verify_resume(
    settings: TrainSettings,
    folder: Path,
    *,
    control: bool,
    axes: Mapping[str, int] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Make runs of `settings.steps`, at least 2, below an empty folder and compare them; with `axes` on a mesh."""
    steps = settings.steps or 0
    if steps < 2:
        raise UserError(f"verify-resume: expected at least 2 steps, one for each half of the run, got {settings.steps}")
    middle = steps // 2
    settings = replace(settings, save_every=0, eval_every=middle, keep=1, tensorboard=False)
    straight, halves = folder / "straight", folder / "halves"
    tell(f"{steps} steps without a stop")
    _run(settings, straight, axes)
    tell(f"{middle} steps, then a stop")
    _run(settings, halves, axes, stop_at=middle)
    _give_memory_back()
    controls = {what: _without(what, halves) for what in LOST if control}

    def finished(run: Path) -> RunComparison:
        tell(f"{steps - middle} more steps in a new process ({run.name})")
        _go_on_elsewhere(run, axes)
        return compare_runs(straight, run)

    return Proof(steps, middle, finished(halves), {what: finished(copy) for what, copy in controls.items()})


def compare_runs(one: Path, other: Path) -> RunComparison:
    """Compare all tensors and the log that two finished runs left."""
    ours, theirs = _tensors(one), _tensors(other)
    names = sorted(ours.keys() | theirs.keys())
    lines = list(zip_longest(*((run / LOG).read_bytes().splitlines(keepends=True) for run in (one, other))))
    tensors = tuple(_compared(name, ours.get(name), theirs.get(name)) for name in names)
    return RunComparison(tensors, len(lines), sum(a != b for a, b in lines))


class _Quiet:
    """Observer of a run: cuts the validation set to the size of one pass, and may stop the run."""

    def __init__(self, stop_at: int | None = None) -> None:
        self._stop_at = stop_at

    def begins(self, training: "Training") -> None:
        """Cut the validation data to one batch."""
        from llorch.training.batch import Examples

        valid = training.data.valid
        few = (valid[i] for i in range(min(len(valid), training.settings.batch_size)))
        training.data = replace(training.data, valid=Examples(few))

    def made(self, report: "StepReport") -> None:
        """Raise SIGTERM after the step at which the run is to be stopped."""
        if report.step == self._stop_at:
            signal.raise_signal(signal.SIGTERM)

    def validated(self, step: int, loss: float) -> None:
        pass

    def note(self, line: str) -> None:
        pass


def _run(settings: TrainSettings, folder: Path, axes: Mapping[str, int] | None, *, stop_at: int | None = None) -> None:
    """Train, here or on ranks; to the end, or until a signal as of someone else."""
    if axes is None:
        return _run_here(settings, folder, stop_at=stop_at)
    import torch

    from llorch.pytorch.distributed.launch import on_ranks

    on_ranks(prod(axes.values()), run_as_rank, axes, torch.get_num_threads(), settings, folder, stop_at)


def run_as_rank(
    axes: Mapping[str, int], n_threads: int, settings: TrainSettings, folder: Path, stop_at: int | None
) -> None:
    """Begin a run on a mesh, or go on with the one in the folder, as one of its ranks."""
    from llorch.pytorch.distributed.launch import leave, start

    resume = (folder / RUN).exists()  # it is written once all have joined
    with limited(n_threads):
        _run_here(settings, folder, stop_at=stop_at, resume=resume, mesh=start(axes, device=settings.device))
        leave()


def _run_here(settings: TrainSettings, folder: Path, *, stop_at: int | None = None, **how: Any) -> None:
    """Train in this process; the stop at `stop_at` is no error."""
    from llorch.pytorch.train.run import Run
    from llorch.training.stopping import Stopped

    try:
        Run(settings, folder, _Quiet(stop_at), **how).run()
    except Stopped as stopped:
        if stop_at is None or stopped.exit_code != 128 + signal.SIGTERM:
            raise


def _give_memory_back() -> None:
    """Leave the device to the processes to come."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no device


def _go_on_elsewhere(folder: Path, axes: Mapping[str, int] | None) -> None:
    """Finish a run in new processes."""
    if axes is not None:
        from llorch.pytorch.train.run import saved_settings

        return _run(settings_from((RUN, saved_settings(folder))), folder, axes)
    ended = run(python("llorch.pytorch.train.verify_resume:finish_here", str(folder)), seconds=None, stdin=PIPE)
    if ended.status:
        last = ended.last_words or "no message"
        raise CheckpointMismatch(f"verify-resume: the second half ended with code {ended.status}: {last}")


def finish_here(folder: str) -> None:
    """Finish a run in this process, which ends with the one that started it."""
    end_with_parent()
    from llorch.pytorch.train.run import saved_settings, saved_threads  # and torch with it

    path = Path(folder)
    with limited(saved_threads(path) or 1):
        _run_here(settings_from((RUN, saved_settings(path))), path, resume=True)


def _newest(folder: Path) -> Snapshot:
    from llorch.pytorch.train.snapshot_parts import read_parts

    found = SnapshotStore(folder).newest(read_parts)
    assert found is not None, f"{folder} has no snapshot"
    return found


def _without(what: str, run: Path) -> Path:
    """Copy a run, and save its snapshot again without part of it, as a program would that never kept it.

    The moments begin anew; the place, on which data, dropout and rate depend, is that of the step before.
    """
    folder = shutil.copytree(run, run.with_name(what))
    found = _newest(folder)
    tensors, record = dict(found.tensors), dict(found.record)
    for name in tensors:
        if what == "moments" and name.startswith("optimizer/") and name != "optimizer/step":
            tensors[name] = np.zeros_like(tensors[name])
    if what == "place":
        record["step"] -= 1
    SnapshotStore(folder, keep=1).save(found.step, tensors, record)
    return folder


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the last snapshot, and the bytes of the adapter."""
    return {**_newest(folder).tensors, ADAPTER: np.fromfile(folder / ADAPTER, np.uint8)}


def _compared(name: str, one: np.ndarray | None, other: np.ndarray | None) -> Compared:
    """Count the bits that differ; arrays of other dtype or shape differ in all bits."""
    largest = max((array for array in (one, other) if array is not None), key=lambda array: array.nbytes)
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return Compared(name, largest.size, 8 * largest.nbytes)
    bits = np.bitwise_count(one.reshape(-1).view(np.uint8) ^ other.reshape(-1).view(np.uint8))
    return Compared(name, one.size, int(bits.sum(dtype=np.int64)))

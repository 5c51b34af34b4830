"""Verify on this machine that a run that was stopped and resumed equals an uninterrupted run, bit by bit.

    straight    N steps
    halves      N/2 steps, then SIGTERM, so that a snapshot is written; the rest in a new process
    controls    as halves, but part of the snapshot is removed in between: the comparison must detect this

Each is a run like `llorch lora train`, in its own folder, and on a mesh with its own processes (ranks). Weights,
AdamW's moments and the logs are compared with those of the straight run.
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
from llorch.runtime.threads import limit_threads
from llorch.runtime.worker import PIPE, end_with_parent, python, run
from llorch.training.log import LOG
from llorch.training.settings import TrainSettings
from llorch.training.settings_file import settings_from
from llorch.training.snapshot_files import Snapshot
from llorch.training.snapshots import SnapshotStore

if TYPE_CHECKING:
    from llorch.pytorch.train.run import AnyTraining
    from llorch.pytorch.train.trainer import StepReport

ADAPTER = "adapter_model.safetensors"
RUN = "run.json"
LOST = ("moments", "place")  # removed by the controls: AdamW's moments, or the place in the data (the step count)


@dataclass(frozen=True)
class Compared:
    """Comparison of one tensor of both runs."""

    name: str  # `adapter/...`, `optimizer/...`, or the file of the adapter
    n_values: int
    differing_bits: int  # all bits if dtype or shape differ, or one run lacks the tensor

    @property
    def kind(self) -> str:
        """The group of the tensor: `adapter`, `optimizer`, or the file of the adapter."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class RunComparison:
    """Comparison of two runs."""

    tensors: tuple[Compared, ...]  # of the last snapshots, and the adapter file
    n_lines: int  # of the longer log
    differing_lines: int  # lines that are not equal, byte by byte

    @property
    def equal(self) -> bool:
        """True if no bit differs."""
        return not self.differing_lines and not any(tensor.differing_bits for tensor in self.tensors)


@dataclass(frozen=True)
class Proof:
    """Comparisons of the stopped run, and of each control, with the straight run."""

    steps: int
    stopped_at: int  # step of the stop
    halves: RunComparison
    controls: Mapping[str, RunComparison]  # removed part -> comparison that must not be equal

    @property
    def holds(self) -> bool:
        """True if the halves are equal and every control is not."""
        return self.halves.equal and not any(control.equal for control in self.controls.values())


def verify_resume(
    settings: TrainSettings, folder: Path, *, control: bool, axes: Mapping[str, int] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Proof:  # fmt: skip
    """Make runs of `settings.steps`, at least 2, in an empty folder and compare them; `control`: with the controls.

    With `axes`, the number of ranks of each axis by name, on a mesh. `tell` gets one line at the start of each run.
    """
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
    controls = {part: _copy_without(part, halves) for part in LOST if control}  # copies, before `halves` continues

    def finish(run: Path) -> RunComparison:
        tell(f"{steps - middle} more steps in a new process ({run.name})")
        _finish_in_new_process(run, axes)
        return compare_runs(straight, run)

    return Proof(steps, middle, finish(halves), {part: finish(copied_run) for part, copied_run in controls.items()})


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare all tensors and the logs of two finished runs."""
    first_tensors, second_tensors = _tensors(first), _tensors(second)
    names = sorted(first_tensors.keys() | second_tensors.keys())
    lines = list(zip_longest(*((run / LOG).read_bytes().splitlines(keepends=True) for run in (first, second))))
    tensors = tuple(_compare(name, first_tensors.get(name), second_tensors.get(name)) for name in names)
    return RunComparison(tensors, len(lines), sum(a != b for a, b in lines))


class _Quiet:
    """Watcher of a run that prints nothing, cuts the validation set to one batch, and may stop the run."""

    def __init__(self, stop_at: int | None = None) -> None:
        self._stop_at = stop_at

    def begins(self, training: "AnyTraining") -> None:
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
    """Train, in this process or on ranks; to the end, or until the SIGTERM after step `stop_at`."""
    if axes is None:
        return _run_here(settings, folder, stop_at=stop_at)
    import torch

    from llorch.pytorch.distributed.launch import on_ranks

    on_ranks(prod(axes.values()), run_as_rank, axes, torch.get_num_threads(), settings, folder, stop_at)


def run_as_rank(
    axes: Mapping[str, int], n_threads: int, settings: TrainSettings, folder: Path, stop_at: int | None
) -> None:
    """Start a run on a mesh, or resume the run in the folder, as one of its ranks."""
    from llorch.pytorch.distributed.launch import leave, start

    resume = (folder / RUN).exists()  # written once all ranks have joined
    with limit_threads(n_threads):
        _run_here(settings, folder, stop_at=stop_at, resume=resume, mesh=start(axes, device=settings.device))
        leave()


def _run_here(settings: TrainSettings, folder: Path, *, stop_at: int | None = None, **options: Any) -> None:
    """Train in this process; the stop at `stop_at` is no error."""
    from llorch.pytorch.train.run import Run
    from llorch.training.stopping import Stopped

    try:
        Run(settings, folder, _Quiet(stop_at), **options).run()
    except Stopped as stopped:
        if stop_at is None or stopped.exit_code != 128 + signal.SIGTERM:
            raise


def _give_memory_back() -> None:
    """Free device memory for the next processes."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # no effect without a device


def _finish_in_new_process(folder: Path, axes: Mapping[str, int] | None) -> None:
    """Finish a run in new processes."""
    if axes is not None:
        from llorch.pytorch.train.run import saved_settings

        return _run(settings_from((RUN, saved_settings(folder))), folder, axes)
    ended = run(python("llorch.pytorch.train.verify_resume:finish_here", str(folder)), seconds=None, stdin=PIPE)
    if ended.status:
        last = ended.error_line or "no message"
        raise CheckpointMismatch(f"verify-resume: the second half ended with code {ended.status}: {last}")


def finish_here(folder: str) -> None:
    """Finish a run in this process, which ends with its parent."""
    end_with_parent()
    from llorch.pytorch.train.run import saved_settings, saved_threads  # imports torch

    path = Path(folder)
    with limit_threads(saved_threads(path) or 1):
        _run_here(settings_from((RUN, saved_settings(path))), path, resume=True)


def _newest(folder: Path) -> Snapshot:
    from llorch.pytorch.train.snapshot_parts import read_parts

    snapshot = SnapshotStore(folder).newest(read_parts)
    assert snapshot is not None, f"{folder} has no snapshot"
    return snapshot


def _copy_without(part: str, run: Path) -> Path:
    """Copy a run, and save its snapshot again without a part of `LOST`, as a program with this bug would.

    Without the moments, these restart at zero. Without the place, data, dropout and rate repeat the last step's.
    """
    folder = shutil.copytree(run, run.with_name(part))
    snapshot = _newest(folder)
    tensors, record = dict(snapshot.tensors), dict(snapshot.record)
    for name in tensors:
        if part == "moments" and name.startswith("optimizer/") and name != "optimizer/step":
            tensors[name] = np.zeros_like(tensors[name])
    if part == "place":
        record["step"] -= 1
    SnapshotStore(folder, keep=1).save(snapshot.step, tensors, record)
    return folder


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the last snapshot, and the bytes of the adapter."""
    return {**_newest(folder).tensors, ADAPTER: np.fromfile(folder / ADAPTER, np.uint8)}


def _compare(name: str, first: np.ndarray | None, second: np.ndarray | None) -> Compared:
    """Count differing bits; arrays of different dtype or shape differ in all bits."""
    largest = max((array for array in (first, second) if array is not None), key=lambda array: array.nbytes)
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return Compared(name, largest.size, 8 * largest.nbytes)
    bits = np.bitwise_count(first.reshape(-1).view(np.uint8) ^ second.reshape(-1).view(np.uint8))
    return Compared(name, first.size, int(bits.sum(dtype=np.int64)))

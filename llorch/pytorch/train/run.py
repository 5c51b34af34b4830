"""A training run in its own folder: steps, log, validations, snapshots, and at the end the adapter.

    run.json                settings and identity (all that determines the bits, see `TrainingPlan.identity`)
    rows.txt                a digest for each example, to name the row that changed
    log.jsonl               one line per step and validation; equal runs have equal bytes
    timing.jsonl            wall times
    snapshots/              states to resume from
    curve.svg               the loss
    adapter_config.json, adapter_model.safetensors       the trained adapter in PEFT's format

A validation comes after the snapshot of its step, in time and in the log, so a resumed run repeats it.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from torch.distributed.device_mesh import DeviceMesh

from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.lora.adapter import Adapter
from llorch.lora.peft_format import OF_WHOLE, write_peft
from llorch.pytorch.distributed.launch import Ranks
from llorch.pytorch.train.numpy_training import NumpyTraining
from llorch.pytorch.train.plan import TrainingPlan, plan_training
from llorch.pytorch.train.sharded_snapshots import ShardedSaver
from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.pytorch.train.trainer import StepReport, Training
from llorch.runtime.errors import FormatError, LearnerFault, MissingExtra, UserError
from llorch.training.data.dataset import first_change, write_rows
from llorch.training.log import LOG, NoLog, RunLog, draw_curve, read_log, require_tensorboard
from llorch.training.resume import differences, require_same
from llorch.training.settings import TrainSettings
from llorch.training.snapshots import SnapshotStore, is_leftover
from llorch.training.stopping import Stopped, StopRequest

RUN, CURVE = "run.json", "curve.svg"
_LIMIT = 1 << 20  # maximum bytes of run.json
_LENGTH_KEYS = ("total_steps", "warmup_steps")  # identity keys that more steps change
AnyTraining = Training | NumpyTraining


@runtime_checkable
class Watcher(Protocol):
    """Observer of a training run: `llorch lora train` prints what it receives."""

    def begins(self, training: AnyTraining) -> None:
        """Receive the training once model and data, and the state of a resumed run, are loaded."""
        ...

    def made(self, report: StepReport) -> None:
        """Receive the report of a step."""
        ...

    def validated(self, step: int, loss: float) -> None:
        """Receive the validation loss after a step."""
        ...

    def note(self, line: str) -> None:
        """Tell the user a useful fact."""
        ...


@dataclass(frozen=True)
class RunResult:
    """Result of a complete run."""

    steps: int  # including steps before a resume
    loss: float  # of the last step
    valid_loss: Mapping[str, tuple[int, float]] | None  # (step, loss) of "first", "best" and "last"
    seconds: float  # since this start, without loading
    n_parameters: int  # number of trained parameters


def saved_settings(folder: Path) -> Mapping[str, Any]:
    """Read the settings of the run in a folder; FileNotFoundError without a run, FormatError if they are no object."""
    if not (folder / RUN).is_file():
        raise FileNotFoundError(f"{folder}: expected {RUN} of a run to resume, got none; start it without --resume")
    run_record = read_json(folder / RUN, limit=_LIMIT)
    settings = run_record.get("settings")
    if not isinstance(settings, dict):
        raise FormatError("Malformed", "settings: expected the object that llorch lora train writes", path=folder / RUN)
    return settings


def saved_threads(folder: Path) -> int | None:
    """Return the number of threads that computed an existing run; None if its record has no number."""
    environment: object = read_json(folder / RUN, limit=_LIMIT)
    for name in ("identity", "environment", "threads"):
        environment = environment.get(name) if isinstance(environment, dict) else None
    return environment if isinstance(environment, int) and environment > 0 else None


class Run:
    """A training run and its folder."""

    def __init__(
        self, settings: TrainSettings, folder: Path, watcher: Watcher, *, resume: bool = False,
        allow_change: bool = False, mesh: DeviceMesh | None = None,
        load_training: Callable[[TrainingPlan], AnyTraining] = Training,
    ) -> None:  # fmt: skip
        """Check the folder, then load model and data; nothing is written yet.

        On a mesh all ranks make the same run; only the first reads and writes the folder and notifies the watcher.

        With `resume`, continue from the newest snapshot, or from step 0 if there is none. A complete run continues if
        the settings ask for more steps: from there the learning rate follows the schedule of the new total.
        `allow_change` continues although data, settings or versions differ from the snapshot's, and records this.
        `load_training` loads the model: `Training` on torch, or `NumpyTraining`.
        """
        self._ranks = Ranks(mesh)
        self._ranks.first(lambda: self._require_place(folder, resume))
        self._folder, self._watcher, self._resume, self._allow_change = folder, watcher, resume, allow_change
        self._store = SnapshotStore(folder, keep=settings.keep)
        if settings.tensorboard:
            require_tensorboard()
        self._training = load_training(plan_training(settings, mesh))
        self._ranks.require_alike(self._training.plan.identity())
        self._saver: ShardedSaver | None = None
        self._changes: list[str] = []

    def run(self) -> RunResult:
        """Train to the end; after an interruption of any kind, the newest snapshot in the folder is a complete one."""
        with StopRequest(patient=self._ranks.mesh is not None) as stop, ExitStack() as exit_stack:
            lock_note = self._ranks.first(lambda: exit_stack.enter_context(self._store.lock()))
            if lock_note:
                self._watcher.note(lock_note)
            self._ranks.first(lambda: self._require_place(self._folder, self._resume))  # check again under the lock
            offset = self._restore() if self._resume else 0
            if self._ranks.is_first:
                self._write_record()
            self._saver = None if self._ranks.mesh is None else ShardedSaver(self._store, timeout=self._ranks.timeout)
            self._watcher.begins(self._training)
            begin = time.perf_counter()
            with self._open_log(offset) as log:
                self._loop(log, stop)
            seconds, adapter = time.perf_counter() - begin, self._training.adapter  # a collective call
            return self._ranks.first(lambda: self._write_result(adapter, seconds))

    def _open_log(self, offset: int) -> NoLog:
        """Open the log at a byte offset on the first rank; on other ranks return a log that writes nothing."""
        if not self._ranks.is_first:
            return NoLog()
        return RunLog(self._folder, offset=offset, tensorboard=self._training.settings.tensorboard)

    def _loop(self, log: NoLog, stop: StopRequest) -> None:
        """Validate, stop, step and save, in this order, until the last step; raise `Stopped` after a signal."""
        training, every = self._training, self._training.settings.save_every
        while True:
            offset = log.synced() if self._is_due(training.settings.eval_every) else None
            if offset is not None:
                self._validate(log, stop)
            if number := self._stopped_by(stop):
                self._save(log.synced() if offset is None else offset)
                self._wait_for_snapshot()
                raise Stopped(number, self._describe_saved())
            if training.step == training.total_steps:
                return self._wait_for_snapshot()
            self._step(log)
            if training.step == training.total_steps or (every and training.step % every == 0):
                self._save(log.synced())

    def _stopped_by(self, stop: StopRequest) -> int:
        """Return the number of a signal that any rank received, or 0."""
        return self._ranks.largest(stop.number or 0)

    def _describe_saved(self) -> str:
        done = f"{self._training.step} of {self._training.total_steps} steps"
        return f"stopped after {done}, which are saved in {self._folder}; continue with --resume"

    def _step(self, log: NoLog) -> None:
        begin = time.perf_counter()
        try:
            report = self._training.run_step()
        except LearnerFault:  # the learner repairs the function and continues
            self._save(log.synced())
            self._watcher.note(self._describe_saved())
            raise
        record = {
            "step": report.step, "loss": report.loss, "norm": report.norm, "learning_rate": report.learning_rate,
            "trained_tokens": report.n_trained, "tokens": report.n_tokens,
        }  # fmt: skip
        log.step(record, seconds=time.perf_counter() - begin)
        self._watcher.made(report)
        if self._saver is not None:
            self._saver.poll()

    def _validate(self, log: NoLog, stop: StopRequest) -> None:
        if not len(self._training.data.valid):
            return
        loss = self._training.validate(stop=lambda: self._stopped_by(stop) > 0)
        if loss is not None:
            log.validation({"step": self._training.step, "valid_loss": loss})
            self._watcher.validated(self._training.step, loss)

    def _is_due(self, every: int) -> bool:
        """Tell if this step is the first, the last, or a multiple of `every`; 0 means only first and last."""
        step = self._training.step
        return step in (0, self._training.total_steps) or (every > 0 and step % every == 0)

    def _save(self, offset: int) -> None:
        """Save a snapshot with the current length of the log in bytes."""
        training = self._training
        record = {
            "step": training.step, "log_offset": offset, "identity": training.plan.identity(), "changes": self._changes,
        }  # fmt: skip
        if self._saver is None:
            self._store.save(training.step, training.state()[0], record)
        else:  # on a mesh, with torch
            self._saver.save(training.step, cast(Training, training).tensors(), record)

    def _wait_for_snapshot(self) -> None:
        """Wait until the current snapshot is written."""
        if self._saver is not None:
            self._saver.wait()

    def _restore(self) -> int:
        """Load the newest snapshot; return the log offset at which the run continues."""
        newest = self._store.newest(read_parts)
        if newest is None:
            self._watcher.note("there is no snapshot yet, so the run starts at step 0")
            return 0
        for reason in newest.skipped:
            self._watcher.note(f"passed over: {reason}")
        record = newest.record
        saved_identity, identity = record["identity"], self._training.plan.identity()
        mesh_changes = self._pop_mesh_change(saved_identity, identity)
        is_longer = newest.step == saved_identity["total_steps"] < identity["total_steps"]
        expected = saved_identity | {name: identity[name] for name in _LENGTH_KEYS} if is_longer else saved_identity
        changes = require_same(
            expected, identity, allow_change=self._allow_change, path=newest.path,
            data_change=lambda: first_change(self._training.data, self._folder),
        )  # fmt: skip
        if newest.step > self._training.total_steps:
            raise UserError(
                f"{newest.path}: expected at most the {self._training.total_steps} steps of the run, got a snapshot of "
                f"step {newest.step}; raise --steps, or train in another folder"
            )
        for line in changes:
            self._watcher.note(f"not bit-exact any more: {line}")
        if is_longer:
            changes += self._note_more_steps(saved_identity, identity)
        changes += mesh_changes
        self._changes = [*record["changes"], *(f"after step {newest.step}: {line}" for line in changes)]
        self._training.load(newest.tensors, record)
        return int(record["log_offset"])

    def _pop_mesh_change(self, saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
        """Note a change of the mesh; remove it from both identities, because a run may continue on another mesh."""
        saved_mesh, mesh = (_shape(identity.pop("mesh", {})) for identity in (saved, current))
        if saved_mesh == mesh:
            return []
        self._watcher.note(
            f"the run started on {saved_mesh} and continues on {mesh}: from here sums have another order, so the last "
            "bits differ from a run without the change"
        )
        return [f"mesh: saved {saved_mesh}, now {mesh}"]

    def _note_more_steps(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
        """Note the schedule of a complete run that continues; return the differences."""
        done, total = saved["total_steps"], current["total_steps"]
        schedule = self._training.settings.schedule
        is_constant = schedule == "constant" and saved["warmup_steps"] == current["warmup_steps"]
        bits = "and the bits equal" if is_constant else "so the bits differ from"
        self._watcher.note(
            f"the run ended after {done} steps and continues to {total}; from here its rate follows the {schedule} "
            f"schedule of {total} steps, {bits} a run that was started with {total} steps"
        )
        changes = differences(*({name: identity[name] for name in _LENGTH_KEYS} for identity in (saved, current)))
        return [*changes.values()]

    def _write_record(self) -> None:
        training = self._training
        record = {
            "settings": training.settings.as_json(), "identity": training.plan.identity(), "changes": self._changes
        }  # fmt: skip
        with new_file(self._folder / RUN) as path:
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_rows(training.data, self._folder)

    def _write_result(self, adapter: Adapter, seconds: float) -> RunResult:
        """Write the adapter and the loss curve, and return the result."""
        training, records = self._training, read_log(self._folder / LOG)
        write_peft(adapter, self._folder, base=training.plan.base)
        if adapter.is_multimodal:
            self._watcher.note(f"{self._folder}: {OF_WHOLE}")
        try:
            draw_curve(records, self._folder / CURVE, title=f"{training.settings.model} on {training.settings.data}")
        except MissingExtra as error:
            self._watcher.note(f"no {CURVE}: {error}")
        losses = [record["loss"] for record in records if "loss" in record]
        valid = [(record["step"], record["valid_loss"]) for record in records if "valid_loss" in record]
        ends = {"first": valid[0], "best": min(valid, key=lambda pair: pair[1]), "last": valid[-1]} if valid else None
        return RunResult(training.step, losses[-1], ends, seconds, adapter.n_parameters)

    @staticmethod
    def _require_place(folder: Path, resume: bool) -> None:
        if resume:
            saved_settings(folder)
        elif (folder / RUN).exists():
            raise UserError(
                f"{folder}: the folder holds a run already; continue it with --resume, or choose another folder"
            )
        elif folder.exists() and (not folder.is_dir() or not all(is_leftover(path.name) for path in folder.iterdir())):
            raise UserError(f"{folder}: expected a new or empty folder for the run; choose another folder")


def _shape(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items()) or "one process"

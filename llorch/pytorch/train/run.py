"""A run in a folder of its own: steps, log, validations, snapshots, and at the end the adapter.

    run.json                settings and identity
    rows.txt                a digest for each example, to name the row that changed
    log.jsonl               one line per step and validation; equal runs have equal bytes
    timing.jsonl            wall times
    snapshots/              states to resume from
    curve.svg               the loss
    adapter_config.json, adapter_model.safetensors       the trained adapter, as PEFT has it

A validation stands behind the snapshot of its step, in the log as in time, so a resumed run makes it again.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.distributed.device_mesh import DeviceMesh

from llorch.files.new_file import new_file
from llorch.files.strict_json import read_json
from llorch.lora.adapter import Adapter
from llorch.lora.peft_format import OF_WHOLE, write_peft
from llorch.pytorch.distributed.launch import Ranks
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.sharded_snapshots import ShardedSaver
from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.pytorch.train.trainer import StepReport, Training
from llorch.runtime.errors import FormatError, MissingExtra, UserError
from llorch.training.data.dataset import first_change, write_rows
from llorch.training.log import LOG, NoLog, RunLog, draw_curve, read_log, require_tensorboard
from llorch.training.resume import differences, require_same
from llorch.training.settings import TrainSettings
from llorch.training.snapshots import SnapshotStore, is_leftover
from llorch.training.stopping import Stopped, StopRequest

RUN, CURVE = "run.json", "curve.svg"
_LIMIT = 1 << 20  # bytes of run.json
_OF_THE_LENGTH = ("total_steps", "warmup_steps")  # parts of the identity


@runtime_checkable
class Watcher(Protocol):
    """Is told what a run does."""

    def begins(self, training: Training) -> None:
        """Take the training: model and data are loaded, and so is the state of a resumed run."""
        ...

    def made(self, report: StepReport) -> None:
        """Take the report of a step that was made."""
        ...

    def validated(self, step: int, loss: float) -> None:
        """Take the loss on the validation set after a step."""
        ...

    def note(self, line: str) -> None:
        """Tell the user something that is good to know."""
        ...


@dataclass(frozen=True)
class RunResult:
    """A run that came to its end."""

    steps: int  # all of them, also those before it was resumed
    loss: float  # of the last step
    valid_loss: Mapping[str, tuple[int, float]] | None  # step and loss of the first, the best and the last validation
    seconds: float  # from this start, loading not included
    n_parameters: int  # trained numbers


def saved_settings(folder: Path) -> Mapping[str, Any]:
    """Read the settings of a run; FileNotFoundError without a run, FormatError where they are no object."""
    if not (folder / RUN).is_file():
        raise FileNotFoundError(f"{folder}: expected {RUN} of a run to resume, got none; start it without --resume")
    values = read_json(folder / RUN, limit=_LIMIT)
    settings = values.get("settings")
    if not isinstance(settings, dict):
        raise FormatError("Malformed", "settings: expected the object that llorch lora train writes", path=folder / RUN)
    return settings


def saved_threads(folder: Path) -> int | None:
    """Return the number of threads that computed an existing run; None where its record does not say."""
    environment: object = read_json(folder / RUN, limit=_LIMIT)
    for name in ("identity", "environment", "threads"):
        environment = environment.get(name) if isinstance(environment, dict) else None
    return environment if isinstance(environment, int) and environment > 0 else None


class Run:
    """One training run and its folder."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: Path,
        watcher: Watcher,
        *,
        resume: bool = False,
        allow_change: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Look at the folder, then load model and data; nothing is written yet.

        On a mesh all ranks make the same run, of which the first reads and writes the folder and tells what happens.

        With `resume` go on from the newest snapshot, or from the start where there is none. A run that is over goes on
        where the settings ask for more steps: those made stay, the rate follows the schedule of all steps.
        `allow_change` goes on although something has changed, which is noted in the log of the run.
        """
        self._ranks = Ranks(mesh)
        self._ranks.first(lambda: self._require_place(folder, resume))
        self._folder, self._watcher, self._resume, self._allow_change = folder, watcher, resume, allow_change
        self._store = SnapshotStore(folder, keep=settings.keep)
        if settings.tensorboard:
            require_tensorboard()
        self._training = Training(plan_training(settings, mesh))
        self._ranks.require_alike(self._training.plan.identity())
        self._saver: ShardedSaver | None = None
        self._changes: list[str] = []

    def run(self) -> RunResult:
        """Train to the end; whatever stops it, the last snapshot is whole."""
        with StopRequest(patient=self._ranks.mesh is not None) as stop, ExitStack() as held:
            without = self._ranks.first(lambda: held.enter_context(self._store.lock()))
            if without:
                self._watcher.note(without)
            self._ranks.first(lambda: self._require_place(self._folder, self._resume))  # someone may have been here
            offset = self._restore() if self._resume else 0
            if self._ranks.is_first:
                self._write_record()
            self._saver = None if self._ranks.mesh is None else ShardedSaver(self._store, timeout=self._ranks.timeout)
            self._watcher.begins(self._training)
            begin = time.perf_counter()
            with self._opened_log(offset) as log:
                self._loop(log, stop)
            seconds, adapter = time.perf_counter() - begin, self._training.adapter  # all ranks give their parts of it
            return self._ranks.first(lambda: self._written(adapter, seconds))

    def _opened_log(self, offset: int) -> NoLog:
        """Open the log at a byte offset on the first rank; on other ranks return a log that writes nothing."""
        if not self._ranks.is_first:
            return NoLog()
        return RunLog(self._folder, offset=offset, tensorboard=self._training.settings.tensorboard)

    def _loop(self, log: NoLog, stop: StopRequest) -> None:
        training, every = self._training, self._training.settings.save_every
        while True:
            offset = log.synced() if self._is_due(training.settings.eval_every) else None
            if offset is not None:
                self._validate(log, stop)
            if number := self._stopped_by(stop):
                self._save(log.synced() if offset is None else offset)
                self._saved()
                done = f"{training.step} of {training.total_steps} steps"
                raise Stopped(
                    number, f"stopped after {done}, which are saved in {self._folder}; continue with --resume"
                )
            if training.step == training.total_steps:
                return self._saved()
            self._step(log)
            if training.step == training.total_steps or (every and training.step % every == 0):
                self._save(log.synced())

    def _stopped_by(self, stop: StopRequest) -> int:
        """Return the number of the signal that one of the ranks was sent, or 0."""
        return self._ranks.largest(stop.number or 0)

    def _step(self, log: NoLog) -> None:
        begin = time.perf_counter()
        report = self._training.run_step()
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
        """Tell if this step is the first, the last, or a multiple of `every`; 0 means never between."""
        step = self._training.step
        return step in (0, self._training.total_steps) or (every > 0 and step % every == 0)

    def _save(self, offset: int) -> None:
        """Save a snapshot that remembers the length of the log in bytes."""
        training = self._training
        record = {
            "step": training.step, "log_offset": offset, "identity": training.plan.identity(), "changes": self._changes,
        }  # fmt: skip
        if self._saver is None:
            self._store.save(training.step, training.state()[0], record)
        else:
            self._saver.save(training.step, training.tensors(), record)

    def _saved(self) -> None:
        """Wait for the snapshot that is being written."""
        if self._saver is not None:
            self._saver.wait()

    def _restore(self) -> int:
        """Load the newest snapshot; returns where the log goes on."""
        found = self._store.newest(read_parts)
        if found is None:
            self._watcher.note("there is no snapshot yet, so the run starts at step 0")
            return 0
        for reason in found.skipped:
            self._watcher.note(f"passed over: {reason}")
        record = found.record
        saved, now = record["identity"], self._training.plan.identity()
        moved = self._moved(saved, now)
        longer = found.step == saved["total_steps"] < now["total_steps"]
        expected = saved | {name: now[name] for name in _OF_THE_LENGTH} if longer else saved
        changes = require_same(
            expected, now, allow_change=self._allow_change, path=found.path,
            data_change=lambda: first_change(self._training.data, self._folder),
        )  # fmt: skip
        if found.step > self._training.total_steps:
            raise UserError(
                f"{found.path}: expected at most the {self._training.total_steps} steps of the run, got a snapshot of "
                f"step {found.step}; raise --steps, or train in another folder"
            )
        for line in changes:
            self._watcher.note(f"not bit-exact any more: {line}")
        if longer:
            changes += self._lengthened(saved, now)
        changes += moved
        self._changes = [*record["changes"], *(f"after step {found.step}: {line}" for line in changes)]
        self._training.load(found.tensors, record)
        return int(record["log_offset"])

    def _moved(self, saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
        """Say that a run goes on on another mesh, which is no change of anything else; takes the mesh from both."""
        before, after = (_shape(identity.pop("mesh", {})) for identity in (saved, now))
        if before == after:
            return []
        self._watcher.note(
            f"the run started on {before} and continues on {after}: from here sums have another order, so the last "
            "bits differ from a run without the change"
        )
        return [f"mesh: saved {before}, now {after}"]

    def _lengthened(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        """Say what becomes of the schedule of a run that was over and goes on; returns what is different."""
        done, total = saved["total_steps"], now["total_steps"]
        schedule = self._training.settings.schedule
        constant = schedule == "constant" and saved["warmup_steps"] == now["warmup_steps"]
        bits = "and the bits equal" if constant else "so the bits differ from"
        self._watcher.note(
            f"the run ended after {done} steps and continues to {total}; from here its rate follows the {schedule} "
            f"schedule of {total} steps, {bits} a run that was started with {total} steps"
        )
        changes = differences(*({name: values[name] for name in _OF_THE_LENGTH} for values in (saved, now)))
        return [*changes.values()]

    def _write_record(self) -> None:
        training = self._training
        values = {
            "settings": training.settings.as_json(),
            "identity": training.plan.identity(),
            "changes": self._changes,
        }
        with new_file(self._folder / RUN) as path:
            path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_rows(training.data, self._folder)

    def _written(self, adapter: Adapter, seconds: float) -> RunResult:
        """Write the adapter and the loss curve, and summarise the run."""
        training, records = self._training, read_log(self._folder / LOG)
        write_peft(adapter, self._folder, base=training.plan.base)
        if adapter.of_whole:
            self._watcher.note(f"{self._folder}: {OF_WHOLE}")
        try:
            draw_curve(records, self._folder / CURVE, title=f"{training.settings.model} on {training.settings.data}")
        except MissingExtra as error:
            self._watcher.note(f"no {CURVE}: {error}")
        losses = [record["loss"] for record in records if "loss" in record]
        valid = [(record["step"], record["valid_loss"]) for record in records if "valid_loss" in record]
        ends = {"first": valid[0], "best": min(valid, key=lambda one: one[1]), "last": valid[-1]} if valid else None
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

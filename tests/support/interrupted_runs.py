"""Small training runs in this process that are stopped and taken up again."""

import signal
from pathlib import Path
from typing import Any

from llorch.train.settings import TrainSettings


class Watching:
    """Keeps what a run says; may send SIGTERM to this process after a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.losses: list[float] = []
        self.notes: list[str] = []

    def begins(self, training: Any) -> None:
        pass

    def made(self, report: Any) -> None:
        self.losses.append(report.loss)
        if report.step == self.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def validated(self, step: int, loss: float) -> None:
        pass

    def note(self, line: str) -> None:
        self.notes.append(line)


def settings_for(data: Path, **others: Any) -> TrainSettings:
    """Seven steps over data that has four steps to an epoch, the fourth smaller; everything that draws is on."""
    values: dict[str, Any] = {
        "model": "micro-llama", "data": str(data), "r": 2, "target_modules": ("q_proj", "down_proj"), "dropout": 0.2,
        "batch_size": 2, "accumulation": 2, "steps": 7, "save_every": 2, "eval_every": 3, "lr": 1e-2,
    }  # fmt: skip
    return TrainSettings(**values | others)


def run(folder: Path, settings: TrainSettings, *, stop_at: int | None = None, **how: bool) -> Watching:
    """Run in this process, to the end or to a stop."""
    from llorch.pytorch.train.run import Run
    from llorch.train.stopping import Stopped

    watching = Watching(stop_at)
    try:
        Run(settings, folder, watching, **how).run()
    except Stopped:
        assert stop_at is not None
    return watching

"""Small training runs: ragged rows of token ids on built-in models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

IDS = 250  # fewer than any built-in model has
LENGTHS = (5, 19, 11, 3, 26, 8, 14, 9)


def ragged_rows(n_rows: int = 8, *, seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of several lengths that can be learned: each id is followed by the next one; a prompt is not learned."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(n_rows):
        length = LENGTHS[number % len(LENGTHS)] + number // len(LENGTHS)
        ids = ((rng.integers(IDS) + np.arange(length)) % IDS).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def write_rows(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_data(folder: Path, *, n_rows: int = 8) -> Path:
    """A data set with a validation set."""
    write_rows(folder / "data" / "train.jsonl", ragged_rows(n_rows))
    write_rows(folder / "data" / "valid.jsonl", ragged_rows(5, seed=9))
    return folder / "data"


def small_settings(folder: Path, **overrides: Any) -> Any:
    """Settings of a run of 4 steps on 8 rows; `given` wins."""
    from llorch.training.settings import TrainSettings

    defaults: Mapping[str, Any] = {
        "model": "micro-qwen3", "data": str(small_data(folder)), "r": 3, "alpha": 5.0, "lr": 5e-3, "steps": 4,
        "batch_size": 8, "warmup_steps": 0,
    }  # fmt: skip
    return TrainSettings(**{**defaults, **overrides})


def run_steps(settings: Any, *, steps: int) -> Any:
    """A training after some steps."""
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training

    training = Training(plan_training(settings))
    for _ in range(steps):
        training.run_step()
    return training


def losses_on_mesh(settings: Any, axes: Mapping[str, int], steps: int) -> list[float]:
    """What every rank of a mesh finds in some steps."""
    from llorch.pytorch.distributed.launch import leave, start
    from llorch.pytorch.train.plan import plan_training
    from llorch.pytorch.train.trainer import Training

    training = Training(plan_training(settings, start(axes)))
    losses = [training.run_step().loss for _ in range(steps)]
    leave()
    return losses


def bits(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Tensors as bytes, to compare every bit."""
    return {name: array.tobytes() for name, array in tensors.items()}


def gradients(training: Any) -> dict[str, np.ndarray]:
    """Gradients of a first step that was not clipped, from Adam's first moments."""
    tensors, _ = training.state()
    return {name: array / (1 - 0.9) for name, array in tensors.items() if name.endswith(".m")}


def distance(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Largest difference as a share of the largest value, of all tensors."""
    assert actual.keys() == expected.keys()
    assert actual
    return max(float(np.abs(actual[n] - expected[n]).max() / (np.abs(expected[n]).max() or 1.0)) for n in expected)


class Silent:
    """Watches a run and keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begins(self, training: Any) -> None:
        """Nothing to do."""

    def made(self, report: Any) -> None:
        """Nothing to do."""

    def validated(self, step: int, loss: float) -> None:
        """Nothing to do."""

    def note(self, line: str) -> None:
        """Keep it."""
        self.notes.append(line)

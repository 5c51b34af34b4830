"""The progress of a training run on a terminal."""

from types import SimpleNamespace

import pytest

from llorch.cli.lora import training_progress
from llorch.cli.lora.training_progress import TrainingProgress


def test_training_progress_on_a_terminal_shows_a_bar_with_the_numbers_of_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(training_progress, "description", lambda training: [])
    with TrainingProgress() as progress:
        progress.begins(SimpleNamespace(total_steps=4, step=0))  # pyright: ignore[reportArgumentType]
        progress.made(SimpleNamespace(step=4, loss=0.5, norm=1.0, learning_rate=0.1))  # pyright: ignore[reportArgumentType]
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "loss 0.5000" in shown

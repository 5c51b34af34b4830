"""Faults on one rank, and llorch as a program with a fault: `FAULT=name:rank python faulty_ranks.py lora train ...`.

Ranks that the program starts import this file and plant the fault, too. A rank is frozen or killed in step 6:
snapshots are written beside the steps, and that of step 2 is whole only when that of step 4 begins. A fault happens in
the first start only.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from llorch.cli import main
from llorch.pytorch.train import plan, step
from llorch.pytorch.train.plan import TrainingPlan
from llorch.pytorch.train.trainer import Training
from llorch.runtime.launched_rank import n_restarts

FAULT_STEP = 6


def on_rank(rank: str, owner: Any, name: str, faulty: Callable[..., Any]) -> None:
    """Replace a function on one rank; the other one is the first argument of the new one."""
    sound = getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        is_there = os.environ.get("RANK") == rank and n_restarts() == 0
        return faulty(sound, *args, **kwargs) if is_there else sound(*args, **kwargs)

    setattr(owner, name, either)


def _sent(number: int, step: int) -> Callable[..., Any]:
    def run_step(sound: Callable[..., Any], training: Training) -> Any:
        if training.step == step - 1:
            os.kill(os.getpid(), number)
        return sound(training)

    return run_step


def _nan(sound: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    loss = sound(*args, **kwargs)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * torch.nan)
    return loss


@contextmanager
def _full(sound: object, self: object, path: object, mode: str) -> Iterator[Any]:
    with open("/dev/full", mode) as stream:
        yield stream


def _missing(sound: object, model: str) -> None:
    raise FileNotFoundError(2, "No such file or directory", "/models/of-this-machine")


def _of_another_version(sound: Callable[..., Any], *args: Any) -> Any:
    found = sound(*args)
    return found | {"packages": found["packages"] | {"torch": "1.0"}}


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "killed": (Training, "run_step", _sent(signal.SIGKILL, FAULT_STEP)),
    "frozen": (Training, "run_step", _sent(signal.SIGSTOP, FAULT_STEP)),
    "nan": (step, "batch_loss", _nan),
    "full": (filesystem.FileSystem, "create_stream", _full),
    "missing": (plan, "find", _missing),
    "version": (plan, "environment", _of_another_version),
    "file": (TrainingPlan, "identity", lambda sound, planned: sound(planned) | {"base": "sha256:another"}),
}


def inject(fault: str) -> None:
    """Replace what `name:rank` names, in this process; nothing if it is empty."""
    if fault:
        name, rank = fault.split(":")
        on_rank(rank, *FAULTS[name])


inject(os.environ.get("FAULT", ""))
if __name__ == "__main__":
    main(prog_name="llorch")

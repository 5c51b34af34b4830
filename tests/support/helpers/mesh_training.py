"""Training on every rank of a mesh, with mistakes of training on several ranks to plant."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from helpers.training_runs import Silent
from llorch.files import open_weights
from llorch.judging.expectations.training import stored
from llorch.judging.runners import training_torch as torch_runner
from llorch.pytorch.device import target
from llorch.pytorch.distributed import parallel
from llorch.pytorch.distributed.dtensor import whole
from llorch.pytorch.distributed.launch import leave, start
from llorch.pytorch.train import adamw, step, trainer
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.run import Run
from llorch.pytorch.train.trainer import Training
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import PASS


class OwnMeans(step.OnMesh):
    """Every rank divides by its own tokens, and ranks are averaged."""

    def rows_of(self, batch: Any) -> tuple[Any, float]:
        rows, counts = super().rows_of(batch)
        return rows, counts * batch.n_trained / (self.data_parallel.size() * max(1, rows.n_trained))


def late() -> None:
    """Adapters that come after the model was shared out: nobody knows of them, so nobody sums their gradients."""
    where: Any = parallel
    right = where.fully_shard

    def without_adapters(part: Any, **kwargs: Any) -> None:
        right(part, ignored_params={p for p in part.parameters() if p.requires_grad}, **kwargs)

    where.fully_shard = without_adapters


def own_means() -> None:
    for where in (trainer, torch_runner):
        vars(where)["OnMesh"] = OwnMeans


def rank_seeds() -> None:
    """Every rank draws its own dropout."""
    where: Any = step
    right = where.token_keys
    where.token_keys = lambda *args, seed, **kwargs: right(*args, seed=seed + torch.distributed.get_rank(), **kwargs)


INJECTED: Mapping[str, Callable[[], None]] = {
    "": lambda: None,
    "mean of means": own_means,
    "attached late": late,
    "averaged": lambda: setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
    "counted twice": lambda: setattr(
        adamw, "gather_all", lambda parts: {name: torch.cat([whole(part)] * 2) for name, part in parts.items()}
    ),
    "unsummed factor": lambda: setattr(parallel, "_own_part", lambda part: part.to_local()),
    "seed of the rank": rank_seeds,
}


def compare_training(model: str, axes: Mapping[str, int], dtype: str, fault: str = "") -> tuple[int, list[str]]:
    """Checkpoints 15 to 20 on a mesh: how many rows, and which failed, `17 gradient.q_proj.lora_A`."""
    INJECTED[fault]()
    return compare_live(model, stored(model)[1], axes, dtype)


def compare_live(model: str, golden: Any, axes: Mapping[str, int], dtype: str) -> tuple[int, list[str]]:
    """Likewise, of a golden that is at hand."""
    torch.set_num_threads(1)
    weights = open_weights(builtin_path(model))
    comparisons = list(torch_runner.compare_mesh(model, weights, golden, target("cpu", dtype, "torch"), start(axes)))
    leave()
    return len(comparisons), [f"{c.stage_ref.checkpoint} {c.stage_ref.name}" for c in comparisons if c.verdict != PASS]


def made_run(settings: Any, folder: Path, axes: Mapping[str, int], fault: str = "", **options: Any) -> list[str]:
    """A run in its folder; what the first rank was told."""
    INJECTED[fault]()
    torch.set_num_threads(1)
    watcher = Silent()
    Run(settings, folder, watcher, mesh=start(axes), **options).run()
    leave()
    return watcher.notes


def second_step(settings: Any, axes: Mapping[str, int], fault: str = "") -> dict[str, np.ndarray]:
    """What a second step makes, as anybody's trainer would write it down."""
    INJECTED[fault]()
    torch.set_num_threads(1)
    training: Any = Training(plan_training(settings, start(axes)))
    for parameter in training.parameters.values():  # so that no gradient is zero
        with torch.no_grad():
            parameter.add_(0.02)
    training._optimizer.step_count = 0
    stepper, optimizer = training._stepper, training._optimizer
    batches = training.plan.order.step(0)
    found = {f"param.{name}": whole(p.detach()).clone() for name, p in training.parameters.items()}
    made: dict[str, Any] = {f"step1.{name}": value for name, value in found.items()}
    loss = stepper.backward(batches, number=1)
    made |= {f"step2.grad.{name}": whole(p.grad).clone() for name, p in training.parameters.items()}
    made |= {"step2.loss": torch.tensor(loss), "step2.grad_norm": torch.tensor(optimizer.clip(stepper.max_norm))}
    made |= {f"step2.clipped.{name}": whole(p.grad).clone() for name, p in training.parameters.items()}
    for number, batch in enumerate(batches, start=1):
        rows = {"input_ids": batch.ids, "labels": batch.labels, "attention_mask": (batch.positions >= 0).astype(int)}
        made |= {f"step2.micro{number}.{name}": torch.from_numpy(array) for name, array in rows.items()}
    leave()
    return {name: value.numpy() for name, value in made.items()}

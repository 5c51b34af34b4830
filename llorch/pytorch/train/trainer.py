"""Training of an adapter, one optimizer step at a time, and what it changes on data; nothing here writes files."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llorch.files import open_weights
from llorch.files.hub import find
from llorch.lora.adapter import Adapter
from llorch.lora.files import adapter_for
from llorch.model.model import OpenModel
from llorch.pytorch.device import target
from llorch.pytorch.distributed.dtensor import own, part_of
from llorch.pytorch.lora.adapters import activate, adapter_of, attach, trainable_parameters
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.memory import StepMemory, bytes_of, kept_bytes, step_memory
from llorch.pytorch.train.plan import TrainingPlan
from llorch.pytorch.train.step import Alone, NonFiniteLoss, OnMesh, Stepper, mean_loss
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError, UserError
from llorch.training.data import PackedRows, TrainingData, batches, read_data
from llorch.training.settings import TrainSettings

BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW, as torch has them


@dataclass(frozen=True)
class StepReport:
    """One optimizer step."""

    step: int  # its number, from 1
    loss: float  # mean over its trained tokens, before the update
    norm: float  # of all gradients together, before they are clipped
    learning_rate: float
    n_trained: int
    n_tokens: int  # padding not counted


class Training:
    """A model, an adapter, its optimizer and its data, at some step."""

    def __init__(self, plan: TrainingPlan) -> None:
        """Load the model of a plan and put the new adapter beside it, or this rank's part of both, on a mesh."""
        settings = self.settings = plan.settings
        self.plan, self.data, self.target, self.ranks = plan, plan.data, plan.target, plan.ranks
        self.total_steps = plan.total_steps
        self._worker = self._loaded()
        self.module = self._worker.module
        self.parameters = trainable_parameters(self.module)
        self._optimizer = AdamW(
            self.parameters, betas=BETAS, eps=EPS, weight_decay=settings.weight_decay,
            lr_ratio=settings.lora_plus_ratio, eight_bit=settings.eight_bit,
        )  # fmt: skip
        self._stepper = Stepper(
            self._worker, self._optimizer, self.target.device, label_smoothing=settings.label_smoothing,
            chunk=settings.chunk or None, max_norm=settings.max_grad_norm or math.inf, seed=settings.seed,
        )  # fmt: skip
        self.step = 0

    @property
    def adapter(self) -> Adapter:
        """The adapter as it is now, beside the base as it is in its file."""
        return adapter_of(self.module)

    @property
    def memory(self) -> StepMemory | None:
        """Memory of the largest step, as far as it is known before the first; None on a mesh."""
        if self._kept is None:
            return None
        settings, lengths = self.settings, self.data.train.lengths
        longest = self.data.settings.max_length if settings.packing else int(lengths.max())
        gradients = bytes_of(self.parameters.values())
        return step_memory(
            self.plan.weights.config,
            self._kept,
            n_tokens=min(settings.batch_size, len(self.data.rows(self.data.train))) * longest,
            width=self.target.dtype.itemsize,
            chunk=settings.chunk,
            recomputed=settings.gradient_checkpointing,
            trained=gradients + bytes_of(self._optimizer.state().values()),
            device=self.target.device,
        )

    def run_step(self) -> StepReport:
        """Make one optimizer step; where the loss or a gradient is not finite nothing is changed."""
        made, rate = self.plan.order.step(self.step), self.plan.rate(self.step)
        try:
            loss, norm = self._stepper.step(made, rate, number=self.step)
        except NonFiniteLoss as error:
            raise self._non_finite(str(error)) from None
        self.step += 1
        n_tokens = sum(int((batch.positions >= 0).sum()) for batch in made)
        return StepReport(self.step, loss, norm, rate, sum(batch.n_trained for batch in made), n_tokens)

    def validate(self, *, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over the trained tokens of the validation set, which is not empty; see `mean_loss`."""
        made = batches(self.data.rows(self.data.valid), self.settings.batch_size)
        loss = mean_loss(self._worker, made, self.target.device, chunk=self.settings.chunk or None, stop=stop)
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteLoss(
                f"step {self.step}: expected a finite validation loss, got {loss:g}; train again with a lower --lr, or "
                "look at the data with llorch data show"
            )
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Return `adapter/...` and `optimizer/...`, not copied: the next step changes them."""
        found: dict[str, Tensor] = {f"adapter/{name}": value.detach() for name, value in self.parameters.items()}
        return found | {f"optimizer/{name}": value for name, value in self._optimizer.state().items()}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return everything that the steps to come depend on, except `identity`.

        Tensors `adapter/...` and `optimizer/...`, and what is no tensor. On the CPU they are the arrays in use, which
        the next step changes: a save needs no second copy of them.
        """
        return {name: value.cpu().numpy() for name, value in self.tensors().items()}, {"step": self.step}

    def load(self, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        saved = _below("adapter/", tensors)
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise UserError(
                "snapshot: expected this adapter's matrices and rank, got others; use the settings of the run"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own(parameter).copy_(part_of(saved[name], parameter))
        self._optimizer.load(_below("optimizer/", tensors))
        self.step = int(record["step"])

    def _loaded(self) -> Alone:
        """Load the model with the new adapter."""
        plan, settings, mesh = self.plan, self.settings, self.ranks.mesh
        length = self.data.settings.max_length
        module = load_for_training(
            plan.weights, self.target, residency=settings.weights, batch=settings.batch_size, n_tokens=length, mesh=mesh
        )
        minus = plan.initial if settings.init == "pissa" else None
        attach(module, plan.initial, trainable=True, minus=minus)
        self._kept = kept_bytes(module, self.target.device) if mesh is None else None
        if settings.gradient_checkpointing:
            checkpoint_gradients(module)
        return Alone(module) if mesh is None else OnMesh(module, mesh)

    def _non_finite(self, what: str) -> NonFiniteLoss:
        """Drop the gradients, and return the error that names the rows of this step."""
        self._optimizer.zero_grad()
        sources = [example.source for row in self.plan.order.rows(self.step) for example in row]
        shown = ", ".join(sources[:8]) + (f" and {len(sources) - 8} more" if len(sources) > 8 else "")
        return NonFiniteLoss(
            f"step {self.step + 1}: expected a finite loss and gradient, got {what}, from {shown}; this step was not "
            "applied; lower --lr, or look at these rows with llorch data show"
        )


def _below(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, under names without it."""
    return {name.removeprefix(prefix): torch.from_numpy(a) for name, a in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Judgement:
    """Losses of the base alone and with an adapter."""

    base: str  # what is known of the base that the adapter was trained on
    split: str
    n_rows: int
    n_trained: int  # tokens that the loss is the mean over
    without: float
    with_adapter: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """exp(loss), without and with the adapter."""
        return math.exp(self.without), math.exp(self.with_adapter)


def judge_adapter(
    settings: TrainSettings, adapter: str | Path, *, split: str | None, any_base: bool = False
) -> Judgement:
    """Compute the loss of a model on data, with and without an adapter.

    `adapter` is a PEFT directory or a LoRA GGUF file; `split` is `train`, `valid` or `test`, None the last one that
    there is.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    read, base = adapter_for(weights, adapter, any_base=any_base)
    data = read_data(find_data(settings.data), OpenModel(weights), settings.data_settings)
    split, rows = _rows(data, split, settings.data)
    at = target(settings.device, settings.dtype_name)
    n_tokens = data.settings.max_length
    module = load_for_training(weights, at, residency=settings.weights, batch=settings.batch_size, n_tokens=n_tokens)
    attach(module, read)
    made = list(batches(rows, settings.batch_size))
    with_adapter = mean_loss(Alone(module), made, at.device, chunk=settings.chunk or None)
    activate(module, None)
    without = mean_loss(Alone(module), made, at.device, chunk=settings.chunk or None)
    assert with_adapter is not None
    assert without is not None
    return Judgement(base, split, len(rows), sum(batch.n_trained for batch in made), without, with_adapter)


def _rows(data: TrainingData, split: str | None, name: str) -> tuple[str, PackedRows]:
    """Return the name of a split and its rows; None picks the last split that has rows, of train, valid, test."""
    splits = {name: examples for name in ("train", "valid", "test") if len(examples := getattr(data, name))}
    chosen = split or list(splits)[-1]
    if chosen not in splits:
        raise FormatError("Missing", f"data: expected one of the splits {', '.join(splits)}, got {split}", path=name)
    return chosen, data.rows(splits[chosen])

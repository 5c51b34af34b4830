"""Training of an adapter, one optimizer step at a time, and its losses on data; nothing here writes files."""

import math
from collections.abc import Callable, Iterable, Mapping
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
from llorch.pytorch.train.memory import StepMemory, bytes_of, kept_bytes, product_copies, step_memory
from llorch.pytorch.train.plan import TrainingPlan
from llorch.pytorch.train.step import Alone, NonFiniteLoss, OnMesh, Stepper, mean_loss
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError, UserError
from llorch.training.batch import Batch
from llorch.training.data import PackedRows, TrainingData, batches, read_data
from llorch.training.settings import TrainSettings

BETAS, EPS = (0.9, 0.999), 1e-8  # AdamW's defaults in torch


@dataclass(frozen=True)
class StepReport:
    """Numbers of one optimizer step."""

    step: int  # number of the step, from 1
    loss: float  # mean over its tokens in the loss, before the update
    norm: float  # of all gradients, before clipping
    learning_rate: float
    n_trained: int
    n_tokens: int  # without padding


@dataclass(frozen=True)
class ModelSize:
    """Size of the model of a training."""

    n_trained: int  # parameters of the adapter
    n_frozen: int  # parameters of the base
    n_bytes: int  # of both, and of buffers


def count_tokens(step_batches: Iterable[Batch]) -> int:
    """Count the tokens of a step's batches, without padding."""
    return sum(int((batch.positions >= 0).sum()) for batch in step_batches)


class Training:
    """State of a training: model, adapter, optimizer and data after `step` steps."""

    def __init__(self, plan: TrainingPlan) -> None:
        """Load the model of a plan and attach the new adapter; on a mesh, this rank's part of both."""
        settings = self.settings = plan.settings
        self.plan, self.data, self.target, self.ranks = plan, plan.data, plan.target, plan.ranks
        self.total_steps = plan.total_steps
        self._worker = self._load_worker()
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
        """The current adapter, for the base as it is in its file (PiSSA trains against a changed base)."""
        return adapter_of(self.module)

    @property
    def device_name(self) -> str:
        """Description of the device."""
        return str(self.target.device)

    @property
    def size(self) -> ModelSize:
        """Numbers of trained and frozen parameters, and the bytes of both."""
        n_trained = sum(parameter.numel() for parameter in self.parameters.values())
        n_all = sum(parameter.numel() for parameter in self.module.parameters())
        tensors = (*self.module.parameters(), *self.module.buffers())
        return ModelSize(n_trained, n_all - n_trained, sum(t.numel() * t.element_size() for t in tensors))

    @property
    def memory(self) -> StepMemory | None:
        """Estimated memory of the largest step; None on a mesh."""
        if self._kept is None:
            return None
        settings, lengths = self.settings, self.data.train.lengths
        longest = self.data.settings.max_length if settings.packing else int(lengths.max())
        gradients = bytes_of(self.parameters.values())
        return step_memory(
            self.plan.weights.config, self._kept,
            n_tokens=min(settings.batch_size, len(self.data.rows(self.data.train))) * longest,
            width=self.target.dtype.itemsize, chunk=settings.chunk, recomputed=settings.gradient_checkpointing,
            trained=gradients + bytes_of(self._optimizer.state().values()),
            copies=product_copies(self.module, self.target.device), device=self.target.device,
        )  # fmt: skip

    def run_step(self) -> StepReport:
        """Make one optimizer step; if the loss or a gradient is not finite, nothing changes."""
        step_batches, rate = self.plan.order.step(self.step), self.plan.rate(self.step)
        try:
            loss, norm = self._stepper.step(step_batches, rate, number=self.step)
        except NonFiniteLoss as error:
            raise self._non_finite(str(error)) from None
        self.step += 1
        n_trained = sum(batch.n_trained for batch in step_batches)
        return StepReport(self.step, loss, norm, rate, n_trained, count_tokens(step_batches))

    def validate(self, *, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over the tokens in the loss of the validation set (not empty); see `mean_loss`."""
        valid_batches = batches(self.data.rows(self.data.valid), self.settings.batch_size)
        loss = mean_loss(self._worker, valid_batches, self.target.device, chunk=self.settings.chunk or None, stop=stop)
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteLoss(
                f"step {self.step}: expected a finite validation loss, got {loss:g}; train again with a lower --lr, or "
                "look at the data with llorch data show"
            )
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, `adapter/...` and `optimizer/...`, not copied: the next step changes them."""
        adapter: dict[str, Tensor] = {f"adapter/{name}": tensor.detach() for name, tensor in self.parameters.items()}
        return adapter | {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return everything that the next steps depend on, except `TrainingPlan.identity`: arrays, and a JSON record.

        On the CPU the arrays are those in use, which the next step changes: saving needs no second copy.
        """
        return {name: tensor.cpu().numpy() for name, tensor in self.tensors().items()}, {"step": self.step}

    def load(self, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        adapter_tensors = _select_prefix("adapter/", tensors)
        if {n: t.shape for n, t in adapter_tensors.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise UserError(
                "snapshot: expected this adapter's matrices and rank, got others; use the settings of the run"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own(parameter).copy_(part_of(adapter_tensors[name], parameter))
        self._optimizer.load(_select_prefix("optimizer/", tensors))
        self.step = int(record["step"])

    def _load_worker(self) -> Alone:
        """Load the model, measure its activations without a mesh, and attach the new adapter."""
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

    def _non_finite(self, numbers: str) -> NonFiniteLoss:
        """Delete the gradients, and return the error that names the rows of this step."""
        self._optimizer.zero_grad()
        sources = [example.source for row in self.plan.order.rows(self.step) for example in row]
        text = ", ".join(sources[:8]) + (f" and {len(sources) - 8} more" if len(sources) > 8 else "")
        return NonFiniteLoss(
            f"step {self.step + 1}: expected a finite loss and gradient, got {numbers}, from {text}; this step was not "
            "applied; lower --lr, or look at these rows with llorch data show"
        )


def _select_prefix(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, with the prefix removed."""
    return {name.removeprefix(prefix): torch.from_numpy(a) for name, a in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Judgement:
    """Losses of the base without and with an adapter."""

    base: str  # what is known about the base that the adapter was trained on
    split: str  # part of the data: `train`, `valid` or `test`
    n_rows: int
    n_trained: int  # number of tokens in the loss
    without: float
    with_adapter: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexities exp(loss) without and with the adapter."""
        return math.exp(self.without), math.exp(self.with_adapter)


def judge_adapter(
    settings: TrainSettings, adapter: str | Path, *, split: str | None, any_base: bool = False
) -> Judgement:
    """Compute the loss of a model on data, with and without an adapter.

    `adapter`: a PEFT directory or LoRA GGUF file. `split`: `train`, `valid` or `test`; None: the last non-empty split.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    loaded_adapter, base = adapter_for(weights, adapter, any_base=any_base)
    splits = read_data(find_data(settings.data), OpenModel(weights), settings.data_settings)
    split, rows = _rows(splits, split, settings.data)
    backend = target(settings.device, settings.dtype_name)
    n_tokens = splits.settings.max_length
    module = load_for_training(
        weights, backend, residency=settings.weights, batch=settings.batch_size, n_tokens=n_tokens
    )
    attach(module, loaded_adapter)
    split_batches = list(batches(rows, settings.batch_size))
    with_adapter = mean_loss(Alone(module), split_batches, backend.device, chunk=settings.chunk or None)
    activate(module, None)
    without = mean_loss(Alone(module), split_batches, backend.device, chunk=settings.chunk or None)
    assert with_adapter is not None
    assert without is not None
    return Judgement(base, split, len(rows), sum(batch.n_trained for batch in split_batches), without, with_adapter)


def _rows(training_data: TrainingData, split: str | None, name: str) -> tuple[str, PackedRows]:
    """Return the name of a split and its rows; None picks the last non-empty split of train, valid, test."""
    splits = {name: examples for name in ("train", "valid", "test") if len(examples := getattr(training_data, name))}
    split_name = split or list(splits)[-1]
    if split_name not in splits:
        raise FormatError("Missing", f"data: expected one of the splits {', '.join(splits)}, got {split}", path=name)
    return split_name, training_data.rows(splits[split_name])

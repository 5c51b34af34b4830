"""Training of an adapter, one optimizer step at a time; nothing here writes files."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llorch.builtin import find_data
from llorch.config import FAMILIES
from llorch.errors import FormatError
from llorch.files import Weights, open_weights
from llorch.files.strict_json import read_settings
from llorch.hub import find
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.initial import initial_adapter
from llorch.model import Opened
from llorch.pytorch.device import target
from llorch.pytorch.distributed.dtensor import own, part_of
from llorch.pytorch.distributed.launch import Ranks
from llorch.pytorch.distributed.parallel import axes_of
from llorch.pytorch.lora.adapters import adapter_of, attach, trainable_parameters
from llorch.pytorch.lora.dropout import MASKS
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.memory import StepMemory, bytes_of, kept_bytes, step_memory
from llorch.pytorch.train.step import NonFiniteLoss, Stepper, mean_loss
from llorch.pytorch.train.worker import Alone, OnMesh
from llorch.torchrun import own_device
from llorch.train.data import TrainingData, TrainingOrder, batches, read_data
from llorch.train.data.ends import say_unnamed, trained_ends
from llorch.train.resume import environment
from llorch.train.schedules import learning_rate
from llorch.train.settings import TrainSettings

BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW, as torch has them
_SPOKEN_FOR = {  # settings that change no bit of a step, or that other parts of the identity speak for
    "model", "data", "epochs", "steps", "warmup_steps", "warmup_ratio", "gradient_checkpointing", "device",
    "eval_every", "save_every", "keep", "tensorboard", "valid",
}  # fmt: skip


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

    def __init__(self, settings: TrainSettings, mesh: DeviceMesh | None = None) -> None:
        """Load model and data and put a new adapter beside the model, or this rank's part of both, on a mesh."""
        self._weights = open_weights(find(settings.model))
        config = self._weights.config
        _require_mesh(settings, mesh)
        self.settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
        self.target = target(own_device(settings.device) if mesh else settings.device, self.settings.dtype_name)
        self.data = read_data(find_data(settings.data), Opened(self._weights), self.settings.data_settings)
        counts = {"batch_size": settings.batch_size, "accumulation": settings.accumulation}
        self.plan = TrainingOrder(self.data.rows(self.data.train), **counts, seed=settings.seed)
        self.total_steps = settings.steps or settings.epochs * self.plan.steps_per_epoch
        self.base = identity_of(self._weights, settings.model)
        self._initial = initial_adapter(settings.lora, self._weights, init=settings.init, seed=settings.seed)
        self.ranks = Ranks(mesh)
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
    def notes(self) -> list[str]:
        """Findings in the data, and requests of the model that llorch does not train: a sentence each."""
        return [
            *self.data.notes,
            *_left_out(self._weights),
            *_unnamed_ends(self.data, Opened(self._weights)),
            *_of_tied(self._initial, self._weights),
        ]

    @property
    def memory(self) -> StepMemory | None:
        """Memory of the largest step, as far as it is known before the first; None on a mesh."""
        if self._kept is None:
            return None
        settings, lengths = self.settings, self.data.train.lengths
        longest = self.data.settings.max_length if settings.packing else int(lengths.max())
        gradients = bytes_of(self.parameters.values())
        return step_memory(
            self._weights.config,
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
        made, rate = self.plan.step(self.step), self._rate()
        try:
            loss, norm = self._stepper.step(made, rate, number=self.step)
        except NonFiniteLoss as error:
            raise self._non_finite(str(error)) from None
        self.step += 1
        n_tokens = sum(int((batch.positions >= 0).sum()) for batch in made)
        return StepReport(self.step, loss, norm, rate, sum(batch.n_trained for batch in made), n_tokens)

    def validate(self, *, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over the trained tokens of the validation set, which is not empty; see `mean_loss`."""
        made = batches(self.data.rows(self.data.valid), self.settings.batch_size)
        loss = mean_loss(self._worker, made, self.target.device, chunk=self.settings.chunk or None, stop=stop)
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteLoss(
                f"step {self.step}: expected a finite validation loss, got {loss:g}; train again with a lower --lr, or "
                "look at the data with llorch data show"
            )
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """`adapter/...` and `optimizer/...`, in use: the next step changes them. On a mesh a rank has parts."""
        found: dict[str, Tensor] = {f"adapter/{name}": value.detach() for name, value in self.parameters.items()}
        return found | {f"optimizer/{name}": value for name, value in self._optimizer.state().items()}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything that the steps to come depend on, besides what `identity` says.

        Tensors `adapter/...` and `optimizer/...`, and what is no tensor. On the CPU they are the arrays in use, which
        the next step changes: a save needs no second copy of them.
        """
        return {name: value.cpu().numpy() for name, value in self.tensors().items()}, {"step": self.step}

    def load(self, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        saved = _below("adapter/", tensors)
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise ValueError(
                "snapshot: expected this adapter's matrices and rank, got others; use the settings of the run"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own(parameter).copy_(part_of(saved[name], parameter))
        self._optimizer.load(_below("optimizer/", tensors))
        self.step = int(record["step"])

    def identity(self) -> dict[str, Any]:
        """Return the values that have to be equal for later steps to be the same, bit by bit; JSON."""
        settings = {name: value for name, value in self.settings.as_json().items() if name not in _SPOKEN_FOR}
        flat = self._initial.flat()
        return {
            "base": self.base.digest,
            "data": self.data.digest,
            "initial_adapter": hashlib.sha256(b"".join(flat[name].tobytes() for name in flat)).hexdigest(),
            "settings": settings,
            "total_steps": self.total_steps,
            "warmup_steps": self.settings.warmup_for(self.total_steps),
            "environment": environment(str(self.target.device)),
            **({"dropout": MASKS} if self.settings.dropout else {}),
            **({} if self.ranks.mesh is None else {"mesh": axes_of(self.ranks.mesh)}),
        }

    def _loaded(self) -> Alone:
        """Load the model with the new adapter."""
        settings, length = self.settings, self.data.settings.max_length
        mesh = self.ranks.mesh
        module = load_for_training(
            self._weights,
            self.target,
            residency=settings.weights,
            batch=settings.batch_size,
            n_tokens=length,
            mesh=mesh,
        )
        minus = self._initial if settings.init == "pissa" else None
        attach(module, self._initial, trainable=True, minus=minus)
        self._kept = kept_bytes(module, self.target.device) if mesh is None else None
        if settings.gradient_checkpointing:
            checkpoint_gradients(module)
        return Alone(module) if mesh is None else OnMesh(module, mesh)

    def _rate(self) -> float:
        return learning_rate(
            self.step,
            schedule=self.settings.schedule,
            peak=cast(float, self.settings.lr),
            warmup_steps=self.settings.warmup_for(self.total_steps),
            total_steps=self.total_steps,
        )

    def _non_finite(self, what: str) -> NonFiniteLoss:
        self._optimizer.zero_grad()
        sources = [example.source for row in self.plan.rows(self.step) for example in row]
        shown = ", ".join(sources[:8]) + (f" and {len(sources) - 8} more" if len(sources) > 8 else "")
        return NonFiniteLoss(
            f"step {self.step + 1}: expected a finite loss and gradient, got {what}, from {shown}; this step was not "
            "applied; lower --lr, or look at these rows with llorch data show"
        )


def _require_mesh(settings: TrainSettings, mesh: DeviceMesh | None) -> None:
    """Refuse settings that a mesh cannot do."""
    if mesh is None:
        return
    if settings.eight_bit:
        raise ValueError(
            "mesh: moments of 8 bits cannot be split over ranks, because blocks share scales; train without --eight-bit"
        )
    if (n_ranks := mesh["dp"].size()) > settings.batch_size:
        raise ValueError(
            f"mesh: expected a --batch-size of at least {n_ranks}, one row for each of the {n_ranks} ranks of dp, got "
            f"{settings.batch_size}; use a larger --batch-size, or fewer ranks"
        )


def _left_out(weights: Weights) -> list[str]:
    """Name the loss that llorch does not train, where a folder asks transformers for it.

    This loss keeps routers from always choosing the same experts.
    """
    if weights.config.experts is None or not FAMILIES[weights.config.family].aux_loss:
        return []
    whole = read_settings(Path(weights.path) / "config.json")
    text = whole.get("text_config")
    values = text if isinstance(text, dict) else whole
    if not values.get("output_router_logits"):
        return []
    return [
        "config.json asks for an auxiliary loss that balances the experts (output_router_logits, "
        f"router_aux_loss_coef {values.get('router_aux_loss_coef', 0.001)}): it is not trained, the loss is cross "
        "entropy alone"
    ]


def _of_tied(adapter: Adapter, weights: Weights) -> list[str]:
    """Matrices that are one in the base and two with an adapter, which not every program can load."""
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not outer or not weights.config.tie_word_embeddings:
        return []
    return [
        f"{' and '.join(outer)} of a tied base: llorch lora export refuses such an adapter as GGUF, and PEFT's merge "
        "changes both matrices; use llorch lora merge, which writes two matrices"
    ]


def _unnamed_ends(data: TrainingData, model: Opened) -> list[str]:
    """End tokens of the data at which transformers would not stop, because the base does not name them."""
    try:
        told = say_unnamed(trained_ends(data.train, model), model)
    except FormatError:
        return []  # token ids need no vocabulary
    return [told] if told else []


def _below(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): torch.from_numpy(a) for name, a in tensors.items() if name.startswith(prefix)}

"""Plan of a training run: every input that it needs, resolved once, before the model is loaded."""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh

from llorch.families.table import FAMILIES
from llorch.files import Weights, open_weights
from llorch.files.hub import find
from llorch.lora.adapter import Adapter
from llorch.lora.base import BaseIdentity, identity_of
from llorch.lora.initial import initial_adapter
from llorch.model.model import OpenModel
from llorch.pytorch.device import Target, target
from llorch.pytorch.distributed.launch import Ranks, axes_of
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.lora.dropout import MASKS
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError, UserError
from llorch.runtime.launched_rank import own_device
from llorch.training.adamw import learning_rate
from llorch.training.data import TrainingData, TrainingOrder, read_data
from llorch.training.data.dataset import say_unnamed, trained_ends
from llorch.training.resume import environment
from llorch.training.settings import TrainSettings, say_dropout, text_settings

_SPOKEN_FOR = {  # settings that change no bit of a step, or that other parts of the identity speak for
    "model", "data", "epochs", "steps", "warmup_steps", "warmup_ratio", "gradient_checkpointing", "device",
    "eval_every", "save_every", "keep", "tensorboard", "valid",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingPlan:
    """Inputs of a training run, each resolved once; see `plan_training`."""

    settings: TrainSettings  # without defaults that depend on model, device or day
    weights: Weights  # of the base, opened
    target: Target
    data: TrainingData  # as tokens
    order: TrainingOrder
    total_steps: int
    base: BaseIdentity
    initial: Adapter  # before the first step
    ranks: Ranks

    @property
    def notes(self) -> list[str]:
        """Findings in the data, and requests of the model that llorch does not train: a sentence each."""
        return [
            *self.data.notes,
            *_left_out(self.weights),
            *filter(None, [say_dropout(self.weights)]),
            *_unnamed_ends(self.data, OpenModel(self.weights)),
            *_of_tied(self.initial, self.weights),
        ]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        schedule, total, peak = self.settings.schedule, self.total_steps, cast(float, self.settings.lr)
        warmup = self.settings.warmup_for(total)
        return learning_rate(step, schedule=schedule, peak=peak, warmup_steps=warmup, total_steps=total)

    def identity(self) -> dict[str, Any]:
        """Return the values that have to be equal for later steps to be the same, bit by bit; JSON."""
        settings = {name: value for name, value in self.settings.as_json().items() if name not in _SPOKEN_FOR}
        flat = self.initial.flat()
        return {
            "base": self.base.digest,
            "data": self.data.digest,
            "initial_adapter": hashlib.sha256(b"".join(flat[name].tobytes() for name in flat)).hexdigest(),
            "settings": settings,
            "total_steps": self.total_steps,
            "warmup_steps": self.settings.warmup_for(self.total_steps),
            "environment": environment(str(self.target.device)),
            **self._packed_products(),
            **({"dropout": MASKS} if self.settings.dropout else {}),
            **({} if self.ranks.mesh is None else {"mesh": axes_of(self.ranks.mesh)}),
        }

    def _packed_products(self) -> dict[str, bool]:
        """Tell if compiled kernels multiply packed matrices on the CPU, because torch adds in another order."""
        if self.settings.weights == "decoded" or self.target.device.type != "cpu":
            return {}
        return {"compiled_kernels": library() is not None}


def plan_training(settings: TrainSettings, mesh: DeviceMesh | None = None) -> TrainingPlan:
    """Open the base, read the data as tokens, order it, and draw the new adapter; no model is loaded yet.

    Raises:
        FileNotFoundError: There is no such model, or no such data.
        FormatError: A row of the data, or the base, cannot be used.
        ValueError: A setting does not fit the model, the data or the mesh.
        MissingDevice: The device is not on this machine.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    _require_mesh(settings, mesh)
    full = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    at = target(own_device(settings.device) if mesh else settings.device, full.dtype_name)
    data = read_data(find_data(settings.data), OpenModel(weights), full.data_settings)
    counts = {"batch_size": settings.batch_size, "accumulation": settings.accumulation}
    order = TrainingOrder(data.rows(data.train), **counts, seed=settings.seed)
    steps = settings.steps or settings.epochs * order.steps_per_epoch
    base = identity_of(weights, settings.model)
    initial = initial_adapter(settings.lora, weights, init=settings.init, seed=settings.seed)
    return TrainingPlan(full, weights, at, data, order, steps, base, initial, Ranks(mesh))


def _require_mesh(settings: TrainSettings, mesh: DeviceMesh | None) -> None:
    """Refuse settings that a mesh cannot do."""
    if mesh is None:
        return
    if settings.eight_bit:
        raise UserError(
            "mesh: moments of 8 bits cannot be split over ranks, because blocks share scales; train without --eight-bit"
        )
    if (n_ranks := mesh["dp"].size()) > settings.batch_size:
        raise UserError(
            f"mesh: expected a --batch-size of at least {n_ranks}, one row for each of the {n_ranks} ranks of dp, got "
            f"{settings.batch_size}; use a larger --batch-size, or fewer ranks"
        )


def _left_out(weights: Weights) -> list[str]:
    """Name the loss that balances experts, which llorch does not train, where a folder asks for it."""
    if FAMILIES[weights.config.family].router != "softmax" or weights.config.experts is None:
        return []
    values = text_settings(weights)
    if not values.get("output_router_logits"):
        return []
    return [
        "config.json asks for an auxiliary loss that balances the experts (output_router_logits, "
        f"router_aux_loss_coef {values.get('router_aux_loss_coef', 0.001)}): it is not trained, the loss is cross "
        "entropy alone"
    ]


def _of_tied(adapter: Adapter, weights: Weights) -> list[str]:
    """Note matrices that are one in the base and two with an adapter, which not every program can load."""
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not outer or not weights.config.tie_word_embeddings:
        return []
    return [
        f"{' and '.join(outer)} of a tied base: llorch lora export refuses such an adapter as GGUF, and PEFT's merge "
        "changes both matrices; use llorch lora merge, which writes two matrices"
    ]


def _unnamed_ends(data: TrainingData, model: OpenModel) -> list[str]:
    """End tokens of the data at which transformers would not stop, because the base does not name them."""
    try:
        told = say_unnamed(trained_ends(data.train, model), model)
    except FormatError:
        return []  # token ids need no vocabulary
    return [told] if told else []

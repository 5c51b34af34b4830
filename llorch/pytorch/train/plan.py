"""Plan of a training run: all inputs, resolved once, before the model is loaded. The base is the model to adapt."""

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
from llorch.ops.compiled.library import library
from llorch.pytorch.device import Target, target
from llorch.pytorch.distributed.launch import Ranks, axes_of
from llorch.pytorch.lora.dropout import MASKS
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError, UserError
from llorch.runtime.launched_rank import rank_device
from llorch.training.adamw import learning_rate
from llorch.training.data import TrainingData, TrainingOrder, read_data
from llorch.training.data.dataset import describe_unnamed_ends, trained_ends
from llorch.training.resume import environment
from llorch.training.settings import TrainSettings, describe_base_dropout, text_settings

_NOT_IN_IDENTITY = {  # settings without effect on a step's bits, or covered by other keys of the identity
    "model", "data", "epochs", "steps", "warmup_steps", "warmup_ratio", "gradient_checkpointing", "device",
    "eval_every", "save_every", "keep", "tensorboard", "valid",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingPlan:
    """Inputs of a training run, resolved once; see `plan_training`."""

    settings: TrainSettings  # all defaults resolved
    weights: Weights  # opened weights of the base
    target: Target
    data: TrainingData  # tokenised
    order: TrainingOrder
    total_steps: int
    base: BaseIdentity
    initial: Adapter  # adapter before the first step
    ranks: Ranks
    on_numpy: bool = False  # True if the NumPy reference computes the steps, not torch

    @property
    def notes(self) -> list[str]:
        """Notes on the data, and on features of the model that llorch does not train: one sentence each."""
        return [
            *self.data.notes, *_untrained_loss_notes(self.weights),
            *filter(None, [describe_base_dropout(self.weights)]),
            *_eos_notes(self.data, OpenModel(self.weights)), *_tied_notes(self.initial, self.weights),
        ]  # fmt: skip

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        schedule, total, peak = self.settings.schedule, self.total_steps, cast(float, self.settings.lr)
        warmup = self.settings.warmup_for(total)
        return learning_rate(step, schedule=schedule, peak=peak, warmup_steps=warmup, total_steps=total)

    def identity(self) -> dict[str, Any]:
        """Return, as JSON, the values that must be equal for a resumed run to be equal bit by bit."""
        settings = {name: setting for name, setting in self.settings.as_json().items() if name not in _NOT_IN_IDENTITY}
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
            **({"arithmetic": "numpy"} if self.on_numpy else {}),
        }

    def _packed_products(self) -> dict[str, bool]:
        """Record if compiled kernels multiply packed matrices on the CPU: torch adds in another order."""
        if self.settings.weights == "decoded" or self.target.device.type != "cpu":
            return {}
        return {"compiled_kernels": library() is not None}


def plan_training(settings: TrainSettings, mesh: DeviceMesh | None = None) -> TrainingPlan:
    """Open the base, tokenise and order the data, and draw the new adapter; no model is loaded yet.

    Raises:
        FileNotFoundError: The model or the data do not exist.
        FormatError: A row of the data, or the base, cannot be used.
        UserError: A setting does not fit the model, the data or the mesh.
        MissingDevice: The device is not on this machine.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    _require_mesh(settings, mesh)
    resolved = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    backend = target(rank_device(settings.device) if mesh else settings.device, resolved.dtype_name)
    tokens = read_data(find_data(settings.data), OpenModel(weights), resolved.data_settings)
    batch_sizes = {"batch_size": settings.batch_size, "accumulation": settings.accumulation}
    order = TrainingOrder(tokens.rows(tokens.train), **batch_sizes, seed=settings.seed)
    steps = settings.steps or settings.epochs * order.steps_per_epoch
    base = identity_of(weights, settings.model)
    initial = initial_adapter(settings.lora, weights, init=settings.init, seed=settings.seed)
    return TrainingPlan(resolved, weights, backend, tokens, order, steps, base, initial, Ranks(mesh))


def _require_mesh(settings: TrainSettings, mesh: DeviceMesh | None) -> None:
    """Refuse settings that a mesh does not support."""
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


def _untrained_loss_notes(weights: Weights) -> list[str]:
    """Note the load-balancing loss of experts, which llorch does not train, if the config asks for it."""
    if FAMILIES[weights.config.family].router != "softmax" or weights.config.experts is None:
        return []
    text_config = text_settings(weights)
    if not text_config.get("output_router_logits"):
        return []
    return [
        "config.json asks for an auxiliary loss that balances the experts (output_router_logits, "
        f"router_aux_loss_coef {text_config.get('router_aux_loss_coef', 0.001)}): it is not trained, the loss is cross "
        "entropy alone"
    ]


def _tied_notes(adapter: Adapter, weights: Weights) -> list[str]:
    """Note an adapter on tied embeddings: it makes the two matrices different, which not every program can load."""
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not outer or not weights.config.tie_word_embeddings:
        return []
    return [
        f"{' and '.join(outer)} of a tied base: llorch lora export refuses such an adapter as GGUF, and PEFT's merge "
        "changes both matrices; use llorch lora merge, which writes two matrices"
    ]


def _eos_notes(tokens: TrainingData, model: OpenModel) -> list[str]:
    """Note EOS tokens of the data at which transformers would not stop, because the base does not name them."""
    try:
        note = describe_unnamed_ends(trained_ends(tokens.train, model), model)
    except FormatError:
        return []  # token ids need no vocabulary
    return [note] if note else []

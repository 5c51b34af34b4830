"""Modules of the torch model that add adapters to a frozen matrix; see `llorch.pytorch.lora.adapters`.

The product of an adapter, scaling * B A x, is computed as B (A x). Its backward pass saves memory: torch would save the
input again, in float32. Here the input is saved in its own dtype, shared by the modules of a layer, and the mask of
dropout (`llorch.pytorch.lora.dropout`) as a byte per element. An input that `recomputable` made is computed again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, LoraTensors
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget, MatrixPart
from llorch.pytorch.batch_invariant.reproducible import FixedRows, in_tiles
from llorch.pytorch.distributed.dtensor import whole as all_of
from llorch.pytorch.kernels.quantised_linear import TILE, PackedMatrix, tiles
from llorch.pytorch.lora.dropout import DropoutModule, salt_of
from llorch.pytorch.models.experts import ExpertIds, PerExpert, grouped

_ORIGIN = "origin"  # attribute of a tensor: the function and the inputs that it is an output of


def delta(
    x: Float[Tensor, "*rows in"], lora_A: Float[Tensor, "r in"], lora_B: Float[Tensor, "out r"], *, scaling: float,
    mask: Bool[Tensor, "*rows in"] | None = None, share: float = 0.0, onto: Float[Tensor, "*rows out"] | None = None,
) -> Float[Tensor, "*rows out"]:  # fmt: skip
    """Compute scaling * (x A^T) B^T in the dtype of A; dropout at the rate `share` leaves the `mask` of `x`.

    `onto` is the base's output: the product is added to it, and the sum rounded once to the dtype of `onto`.
    """
    if torch.is_grad_enabled():
        return DeltaFunction.apply(x, lora_A, lora_B, scaling, mask, share, onto)  # type: ignore[return-value]
    product = linear(_project(x, lora_A, scaling, mask, share), lora_B)
    return product if onto is None else (onto + product).to(onto.dtype)


def fixed_product(x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "*rows out"]:
    """Compute x @ weight.T so that a row does not depend on other rows; see `batch_invariant.reproducible`."""
    return in_tiles(lambda tile: linear(tile, weight), x, (linear, *weight.shape))


def recomputable(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Compute function(*inputs); `DeltaFunction` saves the inputs in place of the output, and computes it again."""
    y = function(*inputs)
    setattr(y, _ORIGIN, (function, inputs))
    return y


class DeltaFunction(torch.autograd.Function):
    """Autograd function of `delta`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, mask: Tensor | None, share: float,
        onto: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Multiply; save the input in its own dtype, or its origin."""
        projected = _project(x, lora_A, scaling, mask, share)
        ctx.function, inputs = getattr(x, _ORIGIN, (None, (x,)))
        ctx.save_for_backward(lora_A, lora_B, projected, mask, *inputs)
        ctx.scaling, ctx.share = scaling, share
        product = linear(projected, lora_B)
        return product if onto is None else torch.add(onto, product, out=torch.empty_like(onto))  # rounded once

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x`, A, B and `onto`, by position; None for arguments without a gradient."""
        lora_A, lora_B, projected, mask, *inputs = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1]).to(lora_B.dtype)
        d_projected = (rows @ lora_B) * ctx.scaling
        d_x = d_A = d_B = None
        if ctx.needs_input_grad[2]:
            d_B = rows.mT @ projected.reshape(len(rows), -1)
        if ctx.needs_input_grad[1]:
            x = inputs[0] if ctx.function is None else ctx.function(*inputs)
            d_A = d_projected.mT @ _masked_input(x, mask, ctx.share, lora_A.dtype).reshape(len(rows), -1)
        if ctx.needs_input_grad[0]:
            d_x = (d_projected @ lora_A).view(*grad.shape[:-1], -1)
            d_x = (d_x if mask is None else d_x * mask / (1 - ctx.share)).to(inputs[0].dtype)
        return d_x, d_A, d_B, None, None, None, grad if ctx.needs_input_grad[6] else None


def _project(x: Tensor, lora_A: Tensor, scaling: float, mask: Tensor | None, share: float) -> Float[Tensor, "*rows r"]:
    """Compute the input of B; scaling is applied here because it is cheapest at rank r."""
    return linear(_masked_input(x, mask, share, lora_A.dtype), lora_A) * scaling


def _masked_input(x: Tensor, mask: Tensor | None, share: float, dtype: torch.dtype) -> Tensor:
    """Return the input in a dtype, without the dropped features; the others are divided by 1 - share."""
    return x.to(dtype) if mask is None else x.to(dtype) * mask / (1 - share)


def unsharded(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, for a process that shares no tensors with others."""
    return tensor


@dataclass(frozen=True)
class AdapterSetting:
    """Settings of an adapter on one module, without its parameters."""

    config: LoraConfig
    scaling: float
    target: LoraTarget
    salt: int  # of its dropout masks, see `lora.dropout`
    rows: Tensor | None = None  # rows of lora_B for this module, if several modules share lora_B

    def module_rows(self, lora_B: Tensor) -> Tensor:
        """Return the rows of lora_B, or of magnitudes, that belong to this module."""
        return lora_B if self.rows is None else lora_B[self.rows]


class LoraModule(DropoutModule):
    """Frozen module of any kind with adapters."""

    def __init__(self, base_layer: Any, *, fixed: bool) -> None:
        """Wrap a module; without an adapter nothing changes. `fixed`: no row of the output may depend on other rows."""
        super().__init__()
        self.base_layer = base_layer
        self.fixed = fixed
        # set by `distributed.parallel`: the part of a parameter that a rank computes with, and row lengths of the
        # complete matrix from those of a rank's columns
        self.own: Callable[[Tensor], Tensor] = unsharded
        self.join_lengths: Callable[[Tensor], Tensor] = unsharded
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ParameterDict()
        self.start_A = nn.ParameterDict()  # initial adapter of PiSSA; its product is subtracted from the adapter's
        self.start_B = nn.ParameterDict()
        self.active: tuple[tuple[str, Tensor | None], ...] = ()  # active: name, sequences that use it (None: all)
        self._settings: dict[str, AdapterSetting] = {}
        self._lengths: dict[str, Tensor] = {}  # cached |W + scaling * B A| of frozen DoRA adapters
        self.train(base_layer.training)

    @property
    def names(self) -> list[str]:
        """Names of the adapters on this module."""
        return list(self._settings)

    def add(
        self, name: str, config: LoraConfig, target: LoraTarget, tensors: LoraTensors, *, dtype: torch.dtype,
        trainable: bool, minus: LoraTensors | None, part: MatrixPart, shared: "LoraModule | None" = None,
    ) -> None:  # fmt: skip
        """Add an adapter with parameters in `dtype`; it is not active yet. `minus`: see `adapters.attach`.

        If a target has several modules, this module is a `part`; all but the first use the parameters of `shared`, the
        first.
        """
        device = next(tensor for tensor in (*self.base_layer.parameters(), *self.base_layer.buffers())).device
        dictionaries = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.lora_magnitude_vector}
        for kind, array in tensors.arrays().items():
            content = torch.tensor(array, dtype=dtype, device=device)
            parameter = nn.Parameter(content, requires_grad=trainable)
            dictionaries[kind][name] = parameter if shared is None else shared.parameters_of(name)[kind]
        if minus is not None:
            for starts, array in ((self.start_A, minus.lora_A), (self.start_B, minus.lora_B)):
                starts[name] = nn.Parameter(torch.tensor(array, dtype=dtype, device=device), requires_grad=False)
        rows = None if part.rows is None else torch.tensor(part.rows, device=device)
        self._settings[name] = AdapterSetting(config, config.scaling_of(target), target, salt_of(target.name), rows)

    def remove(self, name: str) -> None:
        """Remove an adapter if it is here; views of this module, which share its dictionaries, keep it."""
        for attribute in ("lora_A", "lora_B", "lora_magnitude_vector", "start_A", "start_B"):
            remaining = {key: parameter for key, parameter in getattr(self, attribute).items() if key != name}
            setattr(self, attribute, nn.ParameterDict(remaining))
        self._settings = {key: setting for key, setting in self._settings.items() if key != name}
        self._lengths = {key: length for key, length in self._lengths.items() if key != name}
        self.active = tuple(pair for pair in self.active if pair[0] != name)

    def activate(self, name: str | None) -> None:
        """Use one adapter for all sequences, or none."""
        self.active = ((name, None),) if name in self._settings else ()  # type: ignore[assignment] (None is no key)

    def config_of(self, name: str) -> LoraConfig:
        """Return the configuration of an adapter."""
        return self._settings[name].config

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter by kind; empty if it is not here."""
        dictionaries: dict[str, Any] = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.lora_magnitude_vector}
        return {kind: dictionary[name] for kind, dictionary in dictionaries.items() if name in dictionary}

    def start_of(self, name: str) -> LoraTensors | None:
        """Return the factors of the subtracted product (`minus`), as float32; None if there are none."""
        if name not in self.start_A:
            return None
        return LoraTensors(as_float32(self.start_A[name]), as_float32(self.start_B[name]))

    def forward(self, x: Tensor, *expert_ids: Tensor) -> Tensor:
        """Add the outputs of active adapters to the base's output; experts also take the ids of selected experts."""
        y = self.base_layer(x, *expert_ids)
        for name, rows in self.active:
            if rows is None:
                y = self.adapted(name, x, y, *expert_ids)
            else:
                adapted_rows = self.adapted(name, x[rows], y[rows], *(ids[rows] for ids in expert_ids))
                y = y.index_copy(0, rows, adapted_rows)
        return y

    def adapted(self, name: str, x: Tensor, y: Tensor, *expert_ids: Tensor) -> Tensor:
        """Compute the output with one adapter from the output `y` of the base."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the text that torch prints for the module."""
        return f"adapters={', '.join(self.names)}"

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self.own(self.lora_A[name]), self._settings[name].module_rows(self.own(self.lora_B[name]))

    def _length(self, name: str) -> Tensor:
        """Compute |W + scaling * B A|, one L2 norm per output; cached while neither A nor B is trained."""
        if name in self._lengths:
            return self._lengths[name]
        lora_A, lora_B = self._factors(name)
        length = self._lengths_of(lora_A, lora_B, self._settings[name].scaling)
        if not (lora_A.requires_grad or lora_B.requires_grad):
            self._lengths[name] = length
        return length

    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        """Compute |W + scaling * B A|, one L2 norm per output."""
        raise NotImplementedError


class LoraLinear(LoraModule):
    """Linear layer with adapters and the interface of `nn.Linear`."""

    def adapted(
        self, name: str, x: Float[Tensor, "*rows in"], y: Float[Tensor, "*rows out"], *expert_ids: Tensor
    ) -> Float[Tensor, "*rows out"]:
        """See `LoraModule.adapted`."""
        setting = self._settings[name]
        lora_A, lora_B = self._factors(name)
        share = setting.config.lora_dropout if self.training else 0.0
        mask = self.mask_of(x, share, salt=setting.salt) if share else None
        options: Any = {"scaling": setting.scaling, "mask": mask, "share": share}
        if not (self.fixed or name in self.start_A or name in self.lora_magnitude_vector):  # plain LoRA: one addition
            return delta(x, lora_A, lora_B, **options, onto=y)
        update = self._delta(x, lora_A, lora_B, **options)
        if name in self.start_A:
            start_A, start_B = self.own(self.start_A[name]), setting.module_rows(self.own(self.start_B[name]))
            update = update - self._delta(x, start_A, start_B, scaling=setting.scaling)
        if name in self.lora_magnitude_vector:
            scale = setting.module_rows(self.own(self.lora_magnitude_vector[name])) / self._length(name)  # DoRA
            base = y if mask is None else self.base_layer((x.to(update.dtype) * mask / (1 - share)).to(x.dtype))
            bias = bias_of(self.base_layer)
            update = (scale - 1) * (base if bias is None else base - bias) + scale * update
        return (y + update).to(y.dtype)

    def _delta(self, x: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float, **dropout: Any) -> Tensor:
        """Compute the adapter's product, with a fixed order of sums if rows must be independent."""
        if self.fixed:
            return fixed_product(fixed_product(x.to(lora_A.dtype), lora_A) * scaling, lora_B)
        return delta(x, lora_A, lora_B, scaling=scaling, **dropout)

    @torch.no_grad()
    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Float[Tensor, " out"]:
        def length(rows: slice, tile: Tensor) -> Tensor:
            return torch.linalg.vector_norm(tile.to(lora_A.dtype) + scaling * (lora_B[rows] @ lora_A), dim=1)

        return self.join_lengths(torch.cat([length(*row_tile) for row_tile in weight_tiles(self.base_layer)]))


class LoraExperts(LoraModule):
    """Matrices of all experts with adapters, a separate pair per expert."""

    def adapted(self, name: str, x: PerExpert, y: PerExpert, *expert_ids: ExpertIds) -> PerExpert:
        """See `LoraModule.adapted`."""
        setting, (ids,) = self._settings[name], expert_ids
        all_A, all_B = setting.target.by_expert(self.lora_A[name], self.lora_B[name])
        all_B = all_B if setting.rows is None else all_B[:, setting.rows]
        product = fixed_product if self.fixed else linear

        def multiply(expert: int, rows: Tensor) -> Tensor:
            return product(product(rows, all_A[expert]) * setting.scaling, all_B[expert])

        return (y + grouped(multiply, x.to(all_A.dtype), ids, len(all_A))).to(y.dtype)


class LoraEmbedding(LoraModule):
    """Embedding with adapters and the interface of `nn.Embedding`; it has no dropout, as in PEFT."""

    def adapted(
        self, name: str, x: Int[Tensor, "*rows"], y: Float[Tensor, "*rows out"], *expert_ids: Tensor
    ) -> Float[Tensor, "*rows out"]:
        """See `LoraModule.adapted`."""
        lora_A, lora_B, scaling = self.lora_A[name], self.lora_B[name], self._settings[name].scaling
        product = fixed_product if self.fixed else linear
        update = product(embedding(x, lora_A.mT) * scaling, lora_B)
        if name in self.lora_magnitude_vector:
            scale = self.lora_magnitude_vector[name] / self._length(name)
            update = (scale - 1) * y + scale * update
        return (y + update).to(y.dtype)

    @torch.no_grad()
    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Float[Tensor, " out"]:
        """Compute the L2 norm of each output; the matrix of an embedding has tokens as rows and outputs as columns."""

        def squares(rows: slice, tile: Tensor) -> Tensor:
            return (tile.to(lora_A.dtype) + scaling * (lora_A[:, rows].mT @ lora_B.mT)).square().sum(0)

        return torch.stack([squares(*row_tile) for row_tile in weight_tiles(self.base_layer)]).sum(0).sqrt()


def weight_tiles(base: Any) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
    """Yield the matrix of a base module in tiles of rows: stored dtype if dense, float32 if packed."""
    base = base.kernel if isinstance(base, FixedRows) else base
    if isinstance(base, PackedMatrix):
        yield from tiles(base.fields, base.ggml_type, torch.float32)
        return
    step = max(1, TILE // base.weight.shape[1])
    for start in range(0, len(base.weight), step):
        yield slice(start, start + step), base.weight[start : start + step]


def bias_of(projection: Any) -> Float[Tensor, " out"] | None:
    """Return the bias that a projection adds to its product, or None."""
    return projection.kernel.bias if isinstance(projection, FixedRows) else projection.bias


def as_float32(tensor: Tensor) -> Float32[np.ndarray, "*shape"]:
    """Copy a tensor to NumPy as float32; if ranks have parts of it, all ranks must call this."""
    return all_of(tensor.detach()).to("cpu", torch.float32).numpy().copy()

"""Modules of the torch model that have adapters beside their frozen matrix; see `llorch.pytorch.lora.adapters`.

Their product, scaling * B A x, goes through the narrow middle first, with a lean backward pass: torch would keep the
input once more, in float32. Here it is kept as it came, which the modules of a layer share, and the mask of dropout
(`llorch.pytorch.lora.dropout`) as a byte per element.
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
from llorch.pytorch.lora.dropout import Dropping, salt_of
from llorch.pytorch.models.experts import Chosen, PerExpert, grouped


def delta(
    x: Float[Tensor, "*rows in"],
    lora_A: Float[Tensor, "r in"],
    lora_B: Float[Tensor, "out r"],
    *,
    scaling: float,
    mask: Bool[Tensor, "*rows in"] | None = None,
    share: float = 0.0,
    onto: Float[Tensor, "*rows out"] | None = None,
) -> Float[Tensor, "*rows out"]:
    """Compute scaling * (x A^T) B^T in the dtype of A; dropout leaves `mask` of `x` and drops a `share` of it.

    `onto` is a result of the base: then their sum is computed, rounded to its dtype.
    """
    if torch.is_grad_enabled():
        return DeltaFunction.apply(x, lora_A, lora_B, scaling, mask, share, onto)  # type: ignore[return-value]
    product = linear(_narrow(x, lora_A, scaling, mask, share), lora_B)
    return product if onto is None else (onto + product).to(onto.dtype)


def fixed_product(x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "*rows out"]:
    """Compute x @ weight.T so that a row does not depend on its company; see `batch_invariant.reproducible`."""
    return in_tiles(lambda tile: linear(tile, weight), x, (linear, *weight.shape))


class DeltaFunction(torch.autograd.Function):
    """See `delta`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, mask: Tensor | None, share: float,
        onto: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Multiply; remembers the input as it came."""
        narrow = _narrow(x, lora_A, scaling, mask, share)
        ctx.save_for_backward(x, lora_A, lora_B, narrow, mask)
        ctx.scaling, ctx.share = scaling, share
        product = linear(narrow, lora_B)
        return product if onto is None else torch.add(onto, product, out=torch.empty_like(onto))  # rounded once

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, A, B and the base's result; None for gradients that are not needed."""
        x, lora_A, lora_B, narrow, mask = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1]).to(lora_B.dtype)
        d_narrow = (rows @ lora_B) * ctx.scaling
        d_x = d_A = d_B = None
        if ctx.needs_input_grad[2]:
            d_B = rows.mT @ narrow.reshape(len(rows), -1)
        if ctx.needs_input_grad[1]:
            d_A = d_narrow.mT @ _wide(x, mask, ctx.share, lora_A.dtype).reshape(len(rows), -1)
        if ctx.needs_input_grad[0]:
            d_x = (d_narrow @ lora_A).view(x.shape)
            d_x = (d_x if mask is None else d_x * mask / (1 - ctx.share)).to(x.dtype)
        return d_x, d_A, d_B, None, None, None, grad if ctx.needs_input_grad[6] else None


def _narrow(x: Tensor, lora_A: Tensor, scaling: float, mask: Tensor | None, share: float) -> Float[Tensor, "*rows r"]:
    """Compute the input of B; it is scaled already, because scaling is cheapest there."""
    return linear(_wide(x, mask, share, lora_A.dtype), lora_A) * scaling


def _wide(x: Tensor, mask: Tensor | None, share: float, dtype: torch.dtype) -> Tensor:
    """Return the input in a dtype, without the dropped features; kept ones are divided by 1 - share."""
    return x.to(dtype) if mask is None else x.to(dtype) * mask / (1 - share)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, for a process that shares nothing with others."""
    return tensor


@dataclass(frozen=True)
class AdapterSetting:
    """The settings of an adapter, beside its parameters, on one module."""

    config: LoraConfig
    scaling: float
    target: LoraTarget
    salt: int  # of its dropout
    rows: Tensor | None = None  # of lora_B, where the adapter belongs to several modules

    def of_module(self, lora_B: Tensor) -> Tensor:
        """Return the rows of lora_B, or of magnitudes, that belong to this module."""
        return lora_B if self.rows is None else lora_B[self.rows]


class LoraModule(Dropping):
    """A frozen module, whatever multiplies there, and the adapters beside it."""

    def __init__(self, base_layer: Any, *, fixed: bool) -> None:
        """Wrap a module; without an adapter nothing changes. `fixed`: no row may depend on the other rows."""
        super().__init__()
        self.base_layer = base_layer
        self.fixed = fixed
        self.own: Callable[[Tensor], Tensor] = whole  # what of a parameter this process computes with
        self.joined: Callable[[Tensor], Tensor] = whole  # lengths of rows of which it may have a part
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ParameterDict()
        self.start_A = nn.ParameterDict()  # of PiSSA, taken off what the adapter makes
        self.start_B = nn.ParameterDict()
        self.parts: tuple[tuple[str, Tensor | None], ...] = ()  # active: name, sequences it is for (None: all)
        self._settings: dict[str, AdapterSetting] = {}
        self._lengths: dict[str, Tensor] = {}  # of frozen adapters with DoRA
        self.train(base_layer.training)

    @property
    def names(self) -> list[str]:
        """Adapters beside this module."""
        return list(self._settings)

    def add(
        self,
        name: str,
        config: LoraConfig,
        target: LoraTarget,
        tensors: LoraTensors,
        *,
        dtype: torch.dtype,
        trainable: bool,
        minus: LoraTensors | None,
        part: MatrixPart,
        shared: "LoraModule | None" = None,
    ) -> None:
        """Put an adapter beside the module, its parameters in `dtype`; it is not yet active.

        If a target has several modules, this module is a `part`; those after the first have its parameters, `shared`.
        """
        device = next(tensor for tensor in (*self.base_layer.parameters(), *self.base_layer.buffers())).device
        stores = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.lora_magnitude_vector}
        for kind, array in tensors.arrays().items():
            values = torch.tensor(array, dtype=dtype, device=device)
            made = nn.Parameter(values, requires_grad=trainable)
            stores[kind][name] = made if shared is None else shared.parameters_of(name)[kind]
        if minus is not None:
            for store, array in ((self.start_A, minus.lora_A), (self.start_B, minus.lora_B)):
                store[name] = nn.Parameter(torch.tensor(array, dtype=dtype, device=device), requires_grad=False)
        rows = None if part.rows is None else torch.tensor(part.rows, device=device)
        self._settings[name] = AdapterSetting(config, config.scaling_of(target), target, salt_of(target.name), rows)

    def remove(self, name: str) -> None:
        """Forget an adapter, if it is here; copies of this module, which share its dictionaries, keep it."""
        for store in ("lora_A", "lora_B", "lora_magnitude_vector", "start_A", "start_B"):
            kept = {key: parameter for key, parameter in getattr(self, store).items() if key != name}
            setattr(self, store, nn.ParameterDict(kept))
        self._settings = {key: setting for key, setting in self._settings.items() if key != name}
        self._lengths = {key: length for key, length in self._lengths.items() if key != name}
        self.parts = tuple(part for part in self.parts if part[0] != name)

    def activate(self, name: str | None) -> None:
        """Use one adapter for all sequences, or none."""
        self.parts = ((name, None),) if name in self._settings else ()  # type: ignore[assignment] (None is no key)

    def config_of(self, name: str) -> LoraConfig:
        """Return the configuration with which an adapter was made."""
        return self._settings[name].config

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter by kind; none if it is not here."""
        stores: dict[str, Any] = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.lora_magnitude_vector}
        return {kind: store[name] for kind, store in stores.items() if name in store}

    def start_of(self, name: str) -> LoraTensors | None:
        """Return the factors whose product is taken off the adapter's result, as float32; None if there are none."""
        if name not in self.start_A:
            return None
        return LoraTensors(as_float32(self.start_A[name]), as_float32(self.start_B[name]))

    def forward(self, x: Tensor, *chosen: Tensor) -> Tensor:
        """Add the results of active adapters to the base's; modules of experts take the ids of those chosen, too."""
        y = self.base_layer(x, *chosen)
        for name, rows in self.parts:
            if rows is None:
                y = self.adapted(name, x, y, *chosen)
            else:
                some = self.adapted(name, x[rows], y[rows], *(ids[rows] for ids in chosen))
                y = y.index_copy(0, rows, some)
        return y

    def adapted(self, name: str, x: Tensor, y: Tensor, *chosen: Tensor) -> Tensor:
        """Compute the result with one adapter, given the result `y` of the base."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the text that torch prints of the module."""
        return f"adapters={', '.join(self.names)}"

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self.own(self.lora_A[name]), self._settings[name].of_module(self.own(self.lora_B[name]))

    def _length(self, name: str) -> Tensor:
        """Compute |W + scaling * B A| along the input; kept while nothing that it depends on is trained."""
        if name in self._lengths:
            return self._lengths[name]
        lora_A, lora_B = self._factors(name)
        length = self._lengths_of(lora_A, lora_B, self._settings[name].scaling)
        if not (lora_A.requires_grad or lora_B.requires_grad):
            self._lengths[name] = length
        return length

    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        """Compute |W + scaling * B A| along the input."""
        raise NotImplementedError


class LoraLinear(LoraModule):
    """A projection with adapters, with the interface of `nn.Linear`."""

    def adapted(
        self, name: str, x: Float[Tensor, "*rows in"], y: Float[Tensor, "*rows out"], *chosen: Tensor
    ) -> Float[Tensor, "*rows out"]:
        """See `LoraModule.adapted`."""
        setting = self._settings[name]
        lora_A, lora_B = self._factors(name)
        share = setting.config.lora_dropout if self.training else 0.0
        mask = self.mask_of(x, share, salt=setting.salt) if share else None
        how: Any = {"scaling": setting.scaling, "mask": mask, "share": share}
        if not (self.fixed or name in self.start_A or name in self.lora_magnitude_vector):
            return delta(x, lora_A, lora_B, **how, onto=y)
        added = self._delta(x, lora_A, lora_B, **how)
        if name in self.start_A:
            start_A, start_B = self.own(self.start_A[name]), setting.of_module(self.own(self.start_B[name]))
            added = added - self._delta(x, start_A, start_B, scaling=setting.scaling)
        if name in self.lora_magnitude_vector:
            scale = setting.of_module(self.own(self.lora_magnitude_vector[name])) / self._length(name)
            base = y if mask is None else self.base_layer((x.to(added.dtype) * mask / (1 - share)).to(x.dtype))
            bias = bias_of(self.base_layer)
            added = (scale - 1) * (base if bias is None else base - bias) + scale * added
        return (y + added).to(y.dtype)

    def _delta(self, x: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float, **dropout: Any) -> Tensor:
        """Compute what an adapter adds to the layer's output, in a fixed order of sums if batches must not matter."""
        if self.fixed:
            return fixed_product(fixed_product(x.to(lora_A.dtype), lora_A) * scaling, lora_B)
        return delta(x, lora_A, lora_B, scaling=scaling, **dropout)

    @torch.no_grad()
    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Float[Tensor, " out"]:
        def length(part: slice, tile: Tensor) -> Tensor:
            return torch.linalg.vector_norm(tile.to(lora_A.dtype) + scaling * (lora_B[part] @ lora_A), dim=1)

        return self.joined(torch.cat([length(*each) for each in weight_tiles(self.base_layer)]))


class LoraExperts(LoraModule):
    """The matrices of all experts with adapters, each with a pair of its own."""

    def adapted(self, name: str, x: PerExpert, y: PerExpert, *chosen: Chosen) -> PerExpert:
        """See `LoraModule.adapted`."""
        setting, (ids,) = self._settings[name], chosen
        every_A, every_B = setting.target.by_expert(self.lora_A[name], self.lora_B[name])
        every_B = every_B if setting.rows is None else every_B[:, setting.rows]
        product = fixed_product if self.fixed else linear

        def multiply(expert: int, rows: Tensor) -> Tensor:
            return product(product(rows, every_A[expert]) * setting.scaling, every_B[expert])

        return (y + grouped(multiply, x.to(every_A.dtype), ids, len(every_A))).to(y.dtype)


class LoraEmbedding(LoraModule):
    """An embedding with adapters, with the interface of `nn.Embedding`; it has no dropout, as in PEFT."""

    def adapted(
        self, name: str, x: Int[Tensor, "*rows"], y: Float[Tensor, "*rows out"], *chosen: Tensor
    ) -> Float[Tensor, "*rows out"]:
        """See `LoraModule.adapted`."""
        lora_A, lora_B, scaling = self.lora_A[name], self.lora_B[name], self._settings[name].scaling
        product = fixed_product if self.fixed else linear
        added = product(embedding(x, lora_A.mT) * scaling, lora_B)
        if name in self.lora_magnitude_vector:
            scale = self.lora_magnitude_vector[name] / self._length(name)
            added = (scale - 1) * y + scale * added
        return (y + added).to(y.dtype)

    @torch.no_grad()
    def _lengths_of(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Float[Tensor, " out"]:
        """Compute the length of each output column of the adapted matrix, by which DoRA divides."""

        def squares(part: slice, tile: Tensor) -> Tensor:
            return (tile.to(lora_A.dtype) + scaling * (lora_A[:, part].mT @ lora_B.mT)).square().sum(0)

        return torch.stack([squares(*each) for each in weight_tiles(self.base_layer)]).sum(0).sqrt()


def weight_tiles(lora_module: Any) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
    """Yield the matrix of a module, some rows at a time: as stored where dense, float32 where packed."""
    lora_module = lora_module.kernel if isinstance(lora_module, FixedRows) else lora_module
    if isinstance(lora_module, PackedMatrix):
        yield from tiles(lora_module.fields, lora_module.ggml_type, torch.float32)
        return
    step = max(1, TILE // lora_module.weight.shape[1])
    for start in range(0, len(lora_module.weight), step):
        yield slice(start, start + step), lora_module.weight[start : start + step]


def bias_of(lora_module: Any) -> Float[Tensor, " out"] | None:
    """Return the bias that a projection adds to its product; None where it has none."""
    return lora_module.kernel.bias if isinstance(lora_module, FixedRows) else lora_module.bias


def as_float32(tensor: Tensor) -> Float32[np.ndarray, "*shape"]:
    """Copy a tensor for NumPy, in the dtype of adapters; if ranks have parts of it, all ranks have to call this."""
    return all_of(tensor.detach()).to("cpu", torch.float32).numpy().copy()

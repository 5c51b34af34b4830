"""Cache of the torch path: fixed storage, and the slots of a pass's tokens in it.

Attention stores keys and values of every token. A delta net (linear attention) stores a state of constant size.

The slot of a token is its position minus the first position, in every sequence of a batch. Padding has position -1
anywhere in a row, and is written to one extra slot that no token sees. So the slots of a sequence do not depend on the
other sequences or on padding, and storage never moves, as a CUDA graph requires.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.families.layers import Bound, DeltaNet
from llorch.ops.rope import rope_tables
from llorch.runtime.errors import UserError

NewRows = Float[Tensor, "batch seq kv_heads head_dim"]
Context = Float[Tensor, "batch kv_heads ctx head_dim"]
Visible = Bool[Tensor, "batch 1 seq ctx"] | None  # None: causal mask without padding


@dataclass(frozen=True)
class PassPlacement:
    """Slots, angles and masks of the tokens of one pass."""

    slots: Int[Tensor, "batch seq"]  # padding has the last slot of the cache
    cos: Float[Tensor, "batch seq half"]  # cosines of each token's angles, at least float32
    sin: Float[Tensor, "batch seq half"]
    visible: Visible
    ctx: int  # number of slots that attention reads
    near: Mapping[Bound, Visible] = field(default_factory=dict)  # masks of layers with a window or chunks (`Bound`)
    heat: Float[Tensor, "batch seq"] | None = None  # factor of queries by position, as in Llama 4: its temperature
    real: Bool[Tensor, "batch seq"] | None = None  # False for padding; None: no padding


@dataclass(frozen=True)
class State:
    """State of a delta net for each sequence."""

    conv: Float[Tensor, "batch taps conv_width"]  # last inputs of the convolution, oldest first
    delta: Float[Tensor, "batch v_heads key_dim value_dim"]  # at least float32 in every run

    @classmethod
    def empty(cls, net: DeltaNet, batch: int, dtype: torch.dtype, device: torch.device) -> "State":
        """Return the state before the first token: zeros."""
        matrix = (net.n_value_heads, net.key_head_dim, net.value_head_dim)
        return cls(
            torch.zeros(batch, net.conv_kernel - 1, net.conv_width, dtype=dtype, device=device),
            torch.zeros(batch, *matrix, dtype=torch.promote_types(dtype, torch.float32), device=device),
        )


class Cache:
    """Keys and values of a batch for every layer, (batch, kv_heads, n_slots + 1, head_dim), or delta net states."""

    # Page table of a paged cache, whose storage has one row; None: each sequence is a row that starts at slot 0.
    pages: Int[Tensor, "batch pages"] | None = None

    def __init__(
        self, config: ModelConfig, *, batch: int, n_slots: int, dtype: torch.dtype, device: torch.device,
        first_position: int = 0,
    ) -> None:  # fmt: skip
        """Allocate zeros: an invisible slot has probability 0, and 0 times NaN would be NaN."""
        end = first_position + n_slots
        if n_slots < 1 or first_position < 0 or end > config.max_position_embeddings:
            raise UserError(
                f"cache: expected positions within the context, got {first_position} to {end - 1}; the context has "
                f"{config.max_position_embeddings} tokens"
            )
        self._reserve(config, batch, n_slots + 1, batch, dtype, device)
        self._sequence = torch.arange(batch, device=device)[:, None]  # (batch, 1)
        self._set_positions(config, first_position, n_slots, dtype, device)

    def _reserve(
        self, config: ModelConfig, batch: int, n_slots: int, n_states: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate zero keys, values and states of all layers."""
        net, nets = config.delta_net, [i for i in range(config.n_layers) if config.layer(i).mixer == "delta_net"]
        sizes = [0 if i in nets else n_slots for i in range(config.n_layers)]
        self.keys, self.values = (
            [torch.zeros(batch, config.n_kv_heads, size, config.head_dim, dtype=dtype, device=device) for size in sizes]
            for _ in range(2)
        )
        self.states = {} if net is None else {i: State.empty(net, n_states, dtype, device) for i in nets}

    def _set_positions(
        self, config: ModelConfig, first_position: int, n_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compute RoPE tables and temperatures for `n_slots` positions, and for the slot of padding."""
        self.n_slots = n_slots
        self.first_position = first_position
        positions = np.arange(first_position, first_position + n_slots + 1)
        tables = rope_tables(positions, head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling)
        dtype_wide = torch.promote_types(dtype, torch.float32)
        self.cos, self.sin = (torch.from_numpy(table).to(device, dtype_wide) for table in tables)  # (n_slots + 1, half)
        heat = config.temperature and config.temperature.of(positions)
        self._heat = None if heat is None else torch.from_numpy(heat).to(device, dtype_wide)  # (n_slots + 1)
        self._bounds = {layer.bound for layer in config.layers if layer.bound is not None}
        self._slot = torch.arange(n_slots, device=device)

    @property
    def state_tensors(self) -> list[Tensor]:
        """Tensors of all states, which a pass overwrites; keys and values are only added."""
        return [tensor for state in self.states.values() for tensor in (state.conv, state.delta)]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache; their first axis is the sequence."""
        return [*self.keys, *self.values, *self.state_tensors]

    def forget(self) -> None:
        """Zero the states for new sequences; slots need no reset because they are overwritten before they are read."""
        for tensor in self.state_tensors:
            tensor.zero_()

    def clear(self) -> None:
        """Zero everything: old states would continue, and 0 times an old infinity in an invisible slot would be NaN."""
        for tensor in self.tensors:
            tensor.zero_()

    def require_device(self, **tensors: Tensor) -> None:
        """Refuse tensors, passed by name, that are on another device than the cache."""
        device = self.cos.device
        for name, tensor in tensors.items():
            if tensor.device != device:
                raise ValueError(
                    f"forward: expected one device, got the cache on {device} and {name} on {tensor.device}"
                )

    def place(self, positions: Int[Tensor, "batch seq"], *, ctx: int, causal: bool = False) -> PassPlacement:
        """Return slots, angles and masks of new tokens; padding has position -1. Reads nothing back from the device.

        `ctx` is the number of slots up to the last one in use. `causal` promises that there is no padding and that the
        tokens are the last of `ctx`: then no mask is needed.
        """
        self.require_device(positions=positions)
        slots = positions - self.first_position
        last_visible = slots.clamp(min=0)[:, None, :, None]  # padding sees slot 0: a softmax over nothing would be NaN
        slots = torch.where(positions < 0, self.n_slots, slots)
        visible = None if causal else self._slot[:ctx] <= last_visible
        near = {bound: self._bounded_mask(bound, positions, ctx, last_visible, visible) for bound in self._bounds}
        heat, real = None if self._heat is None else self._heat[slots], None if causal else positions >= 0
        return PassPlacement(slots, self.cos[slots], self.sin[slots], visible, ctx, near, heat, real)

    def _bounded_mask(
        self, bound: Bound, positions: Int[Tensor, "batch seq"], ctx: int, last_visible: Tensor, visible: Visible
    ) -> Visible:
        """Mark the slots that tokens see under a window or chunk; return `visible` if the bound excludes no slot."""
        kind, size = bound
        first_position = self.first_position
        if ctx <= size if kind == "window" else first_position // size == (first_position + ctx - 1) // size:
            return visible
        start = positions - size + 1 if kind == "window" else positions // size * size
        slot = self._slot[:ctx]
        return (slot <= last_visible) & (slot >= (start - first_position)[:, None, :, None])

    def append(self, layer: int, k: NewRows, v: NewRows, place: PassPlacement) -> tuple[Context, Context]:
        """Write rotated keys, and values, of the new tokens; return the keys and values of the whole context."""
        for storage, rows in ((self.keys[layer], k), (self.values[layer], v)):
            storage[self._sequence, :, place.slots] = rows.to(storage.dtype)
        return self.context(layer, place)

    def context(self, layer: int, place: PassPlacement) -> tuple[Context, Context]:
        """Return views of the keys and values that attention reads."""
        return self.keys[layer][:, :, : place.ctx], self.values[layer][:, :, : place.ctx]

    def state(self, layer: int) -> State | None:
        """Return the state of a layer's delta net before the pass; None: start from zeros."""
        return self.states[layer]

    def remember(self, layer: int, new: State) -> None:
        """Overwrite the state of a layer with the state after a pass."""
        self.states[layer].conv.copy_(new.conv)
        self.states[layer].delta.copy_(new.delta)


class NoCache(Cache):
    """Cache of a training pass: it returns the pass's keys and values unstored, so gradients flow."""

    def __init__(self, device: torch.device) -> None:
        """Create a cache without storage."""
        self.cos = torch.empty(0, device=device)

    def append(self, layer: int, k: NewRows, v: NewRows, place: PassPlacement) -> tuple[Context, Context]:
        """Return keys and values as a context, heads first."""
        return k.transpose(1, 2), v.transpose(1, 2)

    def state(self, layer: int) -> State | None:
        """Return None: every pass starts without a state."""
        return None

    def remember(self, layer: int, new: State) -> None:
        """Store nothing."""

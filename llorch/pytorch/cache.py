"""The cache of the torch path: fixed storage, and where the tokens of a pass stand in it.

Attention keeps keys and values of every token, a delta net a state of one size, which `clear` takes back to nothing.

A token's slot is its position (less that of the first one), in every sequence of a batch. Padding has position -1,
wherever it stands in a row, and is written to one slot more, which nobody sees. So the context of a sequence lies in
the same slots whatever its neighbours and its padding are, and storage never moves, as a CUDA graph needs it.
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
Visible = Bool[Tensor, "batch 1 seq ctx"] | None  # None: each token sees all before it, and there is no padding


@dataclass(frozen=True)
class PassPlacement:
    """The places of the tokens of one pass."""

    slots: Int[Tensor, "batch seq"]  # the last slot of the cache for padding
    cos: Float[Tensor, "batch seq half"]  # of each token's angles, at least float32
    sin: Float[Tensor, "batch seq half"]
    visible: Visible
    ctx: int  # slots that attention looks at
    near: Mapping[Bound, Visible] = field(default_factory=dict)  # of layers that do not look back all the way
    heat: Float[Tensor, "batch seq"] | None = None  # what tempered layers multiply queries with, at least float32
    real: Bool[Tensor, "batch seq"] | None = None  # which tokens are no padding; None: all


@dataclass(frozen=True)
class State:
    """The memory of a delta net for each sequence."""

    conv: Float[Tensor, "batch taps conv_width"]  # the last inputs of its convolution, the oldest first
    delta: Float[Tensor, "batch v_heads key_dim value_dim"]  # at least float32 in every run

    @classmethod
    def empty(cls, net: DeltaNet, batch: int, dtype: torch.dtype, device: torch.device) -> "State":
        """Make the state before the first token: zeros."""
        matrix = (net.n_value_heads, net.key_head_dim, net.value_head_dim)
        return cls(
            torch.zeros(batch, net.conv_kernel - 1, net.conv_width, dtype=dtype, device=device),
            torch.zeros(batch, *matrix, dtype=torch.promote_types(dtype, torch.float32), device=device),
        )


class Cache:
    """Keys and values of a batch for every layer, (batch, kv_heads, n_slots + 1, head_dim), or the state of a net."""

    # Where the context of each sequence of a pass lies in the only row; None: sequences are rows, all from slot 0 on.
    pages: Int[Tensor, "batch pages"] | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        n_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        first_position: int = 0,
    ) -> None:
        """Start empty; unseen slots are zero, because a probability of 0 times NaN would be NaN."""
        last = first_position + n_slots
        if n_slots < 1 or first_position < 0 or last > config.max_position_embeddings:
            raise UserError(
                f"cache: expected positions within the context, got {first_position} to {last - 1}; the context has "
                f"{config.max_position_embeddings} tokens"
            )
        self._reserve(config, batch, n_slots + 1, batch, dtype, device)
        self._sequence = torch.arange(batch, device=device)[:, None]  # (batch, 1)
        self._set_positions(config, first_position, n_slots, dtype, device)

    def _reserve(
        self, config: ModelConfig, batch: int, n_slots: int, n_states: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make empty keys, values and states of all layers."""
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
        """Make the tables of so many positions."""
        self.n_slots = n_slots
        self.first_position = first_position
        positions = np.arange(first_position, first_position + n_slots + 1)
        tables = rope_tables(positions, head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling)
        wide = torch.promote_types(dtype, torch.float32)
        self.cos, self.sin = (torch.from_numpy(table).to(device, wide) for table in tables)  # (n_slots + 1, half)
        heat = config.temperature and config.temperature.of(positions)
        self._heat = None if heat is None else torch.from_numpy(heat).to(device, wide)  # (n_slots + 1)
        self._bounds = {layer.bound for layer in config.layers if layer.bound is not None}
        self._slot = torch.arange(n_slots, device=device)

    @property
    def state_tensors(self) -> list[Tensor]:
        """Tensors that a pass changes for good; a slot that is written again forgets."""
        return [tensor for state in self.states.values() for tensor in (state.conv, state.delta)]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache; their first axis is the sequence."""
        return [*self.keys, *self.values, *self.state_tensors]

    def forget(self) -> None:
        """Take the states back to nothing; slots are written again."""
        for tensor in self.state_tensors:
            tensor.zero_()

    def clear(self) -> None:
        """Forget everything: a state would go on; invisible slots matter, too, as 0 times infinity would be NaN."""
        for tensor in self.tensors:
            tensor.zero_()

    def require_device(self, **others: Tensor) -> None:
        """Refuse tensors, given by name, on another device before they meet in a product."""
        here = self.cos.device
        for name, tensor in others.items():
            if tensor.device != here:
                raise ValueError(f"forward: expected one device, got the cache on {here} and {name} on {tensor.device}")

    def place(self, positions: Int[Tensor, "batch seq"], *, ctx: int, causal: bool = False) -> PassPlacement:
        """Find the places of new tokens, padding at -1; nothing is read back from the device.

        `ctx` are the slots up to the last one in use. `causal` promises that there is no padding and that the tokens
        are the last of `ctx`: then no mask is needed.
        """
        self.require_device(positions=positions)
        slots = positions - self.first_position
        seen_up_to = slots.clamp(min=0)[:, None, :, None]  # padding sees slot 0: a row that sees nothing would be NaN
        slots = torch.where(positions < 0, self.n_slots, slots)
        visible = None if causal else self._slot[:ctx] <= seen_up_to
        near = {bound: self._near(bound, positions, ctx, seen_up_to, visible) for bound in self._bounds}
        heat, real = None if self._heat is None else self._heat[slots], None if causal else positions >= 0
        return PassPlacement(slots, self.cos[slots], self.sin[slots], visible, ctx, near, heat, real)

    def _near(
        self, bound: Bound, positions: Int[Tensor, "batch seq"], ctx: int, seen_up_to: Tensor, visible: Visible
    ) -> Visible:
        """Mark the slots that tokens see under a bound; `visible` where the bound lies before all slots."""
        kind, size = bound
        first = self.first_position
        if ctx <= size if kind == "window" else first // size == (first + ctx - 1) // size:
            return visible
        start = positions - size + 1 if kind == "window" else positions // size * size
        slot = self._slot[:ctx]
        return (slot <= seen_up_to) & (slot >= (start - first)[:, None, :, None])

    def append(self, layer: int, k: NewRows, v: NewRows, place: PassPlacement) -> tuple[Context, Context]:
        """Write rotated keys and values of the new tokens; gives those of the context."""
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[self._sequence, :, place.slots] = new.to(store.dtype)
        return self.context(layer, place)

    def context(self, layer: int, place: PassPlacement) -> tuple[Context, Context]:
        """Return the keys and values that attention looks at, views of the cache."""
        return self.keys[layer][:, :, : place.ctx], self.values[layer][:, :, : place.ctx]

    def state(self, layer: int) -> State | None:
        """Return the state of a layer's delta net; None where there is no state yet and none is to be kept."""
        return self.states[layer]

    def remember(self, layer: int, new: State) -> None:
        """Write the state after a pass to where the one before it was."""
        self.states[layer].conv.copy_(new.conv)
        self.states[layer].delta.copy_(new.delta)


class NoCache(Cache):
    """The cache of a pass that is trained on: keys and values of this very pass, written nowhere, so gradients flow."""

    def __init__(self, device: torch.device) -> None:
        """Hold nothing."""
        self.cos = torch.empty(0, device=device)

    def append(self, layer: int, k: NewRows, v: NewRows, place: PassPlacement) -> tuple[Context, Context]:
        """Give back keys and values as a context, heads first."""
        return k.transpose(1, 2), v.transpose(1, 2)

    def state(self, layer: int) -> State | None:
        """Return None: every pass begins anew."""
        return None

    def remember(self, layer: int, new: State) -> None:
        """Keep nothing."""

"""The cache of the torch path: fixed storage, and where the tokens of a pass stand in it.

A token's slot is its position (less that of the first one), in every sequence of a batch. Padding has position -1,
wherever it stands in a row, and is written to one slot more, which nobody sees. So the context of a sequence lies in
the same slots whatever its neighbours and its padding are, and storage never moves, as a CUDA graph needs it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llorch.config import ModelConfig
from llorch.ops.rope import rope_tables

Visible = Bool[Tensor, "batch 1 seq ctx"] | None  # None: each token sees all before it, and there is no padding


@dataclass(frozen=True)
class Place:
    """Where the tokens of one pass stand."""

    slots: Int[Tensor, "batch seq"]  # the last slot of the cache for padding
    cos: Float[Tensor, "batch seq half"]  # of each token's angles, at least float32
    sin: Float[Tensor, "batch seq half"]
    visible: Visible
    ctx: int  # slots that attention looks at


class Cache:
    """Keys and values of a batch: a tensor per layer each, (batch, kv_heads, n_slots + 1, head_dim)."""

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
            raise ValueError(
                f"cache: positions {first_position} to {last - 1} must lie within the context of "
                f"{config.max_position_embeddings} tokens"
            )
        shape = (batch, config.n_kv_heads, n_slots + 1, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.n_slots = n_slots
        self.first_position = first_position
        tables = rope_tables(
            np.arange(first_position, last + 1),
            head_dim=config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
        )
        wide = torch.promote_types(dtype, torch.float32)
        self.cos, self.sin = (torch.from_numpy(table).to(device, wide) for table in tables)  # (n_slots + 1, half)
        self._slot = torch.arange(n_slots, device=device)
        self._sequence = torch.arange(batch, device=device)[:, None]  # (batch, 1)

    def require_device(self, **others: Tensor) -> None:
        """Refuse tensors, given by name, on another device before they meet in a product."""
        here = self.cos.device
        for name, tensor in others.items():
            if tensor.device != here:
                raise ValueError(
                    f"forward: the cache lies on {here}, {name} on {tensor.device}; put both on one device"
                )

    def place(self, positions: Int[Tensor, "batch seq"], *, ctx: int, causal: bool = False) -> Place:
        """Find the places of new tokens, padding at -1; nothing is read back from the device.

        `ctx` are the slots up to the last one in use. `causal` promises that there is no padding and that the tokens
        are the last of `ctx`: then no mask is needed.
        """
        self.require_device(positions=positions)
        slots = positions - self.first_position
        seen_up_to = slots.clamp(min=0)[:, None, :, None]  # padding sees slot 0: a row that sees nothing would be NaN
        slots = torch.where(positions < 0, self.n_slots, slots)
        visible = None if causal else self._slot[:ctx] <= seen_up_to
        return Place(slots, self.cos[slots], self.sin[slots], visible, ctx)

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch seq kv_heads head_dim"],
        v: Float[Tensor, "batch seq kv_heads head_dim"],
        place: Place,
    ) -> tuple[Float[Tensor, "batch kv_heads ctx head_dim"], Float[Tensor, "batch kv_heads ctx head_dim"]]:
        """Write rotated keys and values of the new tokens; gives those of the context, views of the cache."""
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[self._sequence, :, place.slots] = new.to(store.dtype)
        return self.keys[layer][:, :, : place.ctx], self.values[layer][:, :, : place.ctx]


class NoCache(Cache):
    """What a pass that is trained on uses: keys and values of this very pass, written nowhere, so gradients flow."""

    def __init__(self, device: torch.device) -> None:
        """Hold nothing."""
        self.cos = torch.empty(0, device=device)

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch seq kv_heads head_dim"],
        v: Float[Tensor, "batch seq kv_heads head_dim"],
        place: Place,
    ) -> tuple[Float[Tensor, "batch kv_heads ctx head_dim"], Float[Tensor, "batch kv_heads ctx head_dim"]]:
        """Give back keys and values as a context, heads first."""
        return k.transpose(1, 2), v.transpose(1, 2)

"""Mistakes of positions, masks and the cache of the torch path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llorch.ops.rope import rope_tables
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import CausalLM

Plant = Callable[[CausalLM, pytest.MonkeyPatch], None]


def method(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace a function or method by one made from it."""
    return lambda module, patch: patch.setattr(owner, name, make(getattr(owner, name)))


def placed(change: Callable[[Cache, PassPlacement, Tensor], dict[str, Any]]) -> Plant:
    """Change the places that the cache gives."""

    def make(place: Any) -> Any:
        def wrong(self: Cache, positions: Tensor, **how: Any) -> PassPlacement:
            right = place(self, positions, **how)
            return PassPlacement(**vars(right) | change(self, right, positions))

        return wrong

    return method(Cache, "place", make)


def off_by_one_in_padded_rows(cache: Cache, place: PassPlacement, positions: Tensor) -> dict[str, Any]:
    slots = (place.slots + (positions < 0).any(-1, keepdim=True)).clamp(max=cache.n_slots)
    return {"cos": cache.cos[slots], "sin": cache.sin[slots]}


def mask_by_columns(cache: Cache, place: PassPlacement, positions: Tensor) -> dict[str, Any]:
    columns = torch.arange(positions.shape[1])[None, None, :, None]
    return {"visible": (torch.arange(place.ctx) <= columns).expand(len(positions), 1, -1, -1)}


def padding_in_slot_0(cache: Cache, place: PassPlacement, positions: Tensor) -> dict[str, Any]:
    return {"slots": torch.where(positions < 0, 0, place.slots)}


def tables(change: Callable[[Cache, Any], None]) -> Plant:
    """Change the tables of angles of every cache."""

    def make(init: Any) -> Any:
        def wrong(self: Cache, config: Any, **how: Any) -> None:
            init(self, config, **how)
            change(self, config)

        return wrong

    return method(Cache, "__init__", make)


def of_other_angles(cache: Cache, config: Any, *, first: int, scaling: Any) -> None:
    n, head_dim, theta = cache.n_slots + 1, config.head_dim, config.rope_theta
    made = rope_tables(torch.arange(first, first + n).numpy(), head_dim=head_dim, theta=theta, scaling=scaling)
    cache.cos, cache.sin = (torch.from_numpy(table).to(cache.cos) for table in made)


def from_position_0(cache: Cache, config: Any) -> None:
    of_other_angles(cache, config, first=0, scaling=config.rope_scaling)


def unscaled(cache: Cache, config: Any) -> None:
    of_other_angles(cache, config, first=cache.first_position, scaling=None)


def in_bfloat16(cache: Cache, config: Any) -> None:
    cache.cos, cache.sin = (table.bfloat16().to(table.dtype) for table in (cache.cos, cache.sin))


def appended(change: Callable[..., Any]) -> Plant:
    """Change how the cache takes keys and values."""
    return method(Cache, "append", lambda append: lambda *given: change(append, *given))


def not_the_last(append: Any, cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
    return append(cache, layer, k * (torch.arange(k.shape[1]) < k.shape[1] - 1)[:, None, None], v, place)


def never_again(append: Any, cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
    """What an earlier answer wrote stays."""
    old = cache.keys[layer].clone()
    append(cache, layer, k, v, place)
    cache.keys[layer].copy_(torch.where(old.any(-1, keepdim=True), old, cache.keys[layer]))
    return cache.keys[layer][:, :, : place.ctx], cache.values[layer][:, :, : place.ctx]


def of_the_first_row(append: Any, cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
    return append(cache, layer, k[:1].expand_as(k), v, place)


def keys_as_values(append: Any, cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
    return append(cache, layer, k, k, place)


def of_one_layer(append: Any, cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
    return append(cache, 0, k, v, place)

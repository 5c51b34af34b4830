"""Rotation and the writing of the cache in one launch, against the page in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernel_tolerances import DTYPES, EPS, assert_rounded, random

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import keep_nothing, rope
from llorch.pytorch.causal_lm import rotate_and_cache as plain
from llorch.pytorch.kernels.triton.fused import rotate_and_cache

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
POSITIONS = [[[-1, -1, 3, 4, 5], [2, 3, 4, -1, 5]], [[7], [-1]], [[0, 1, 2]]]  # padding left, within, of a whole pass
N_SLOTS = 11
LAYER = 1
INNER = 3 * EPS * 6  # two products and their sum in float32; no two parts of a sum are together larger than 6


class Pass:
    """Inputs of one pass, the same for the kernel and its twin."""

    def __init__(
        self, config: Any, positions: list[list[int]], dtype: torch.dtype, device: torch.device, **sizes: int
    ) -> None:
        self.config = replace(config, **sizes)
        self.dtype, self.device = dtype, device
        self.positions = torch.tensor(positions, device=device)
        batch, seq = self.positions.shape
        heads, kv_heads, head_dim = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        kind = {"dtype": dtype, "device": device}
        self.q = random(batch, seq, heads, head_dim, **kind, seed=1)
        self.k, self.v = (random(batch, seq, kv_heads, head_dim, **kind, seed=seed) for seed in (2, 3))

    def cache(self, dtype: torch.dtype) -> Cache:
        """A cache whose every slot holds something, so that a write to a wrong one is seen."""
        made = Cache(self.config, batch=len(self.positions), n_slots=N_SLOTS, dtype=dtype, device=self.device)
        for seed, store in enumerate((*made.keys, *made.values)):
            store.copy_(random(*store.shape, dtype=self.dtype, device=self.device, seed=seed))
        return made

    def place(self, cache: Cache) -> PassPlacement:
        return cache.place(self.positions, ctx=9)

    def exact(self) -> tuple[torch.Tensor, Cache]:
        """Rotated queries and cache of the page, with the angles that the run has."""
        cache, place = self.cache(torch.float64), self.place(self.cache(self.dtype))
        place = replace(place, cos=place.cos.double(), sin=place.sin.double())
        q, _, _ = plain(self.q.double(), self.k.double(), self.v.double(), LAYER, place, cache, keep_nothing)
        return q, cache


@EVERY_DTYPE
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 8], ids=["whole heads", "a part of heads"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 20), (6, 2, 64), (7, 1, 128)], ids=str)
def test_queries_and_cache_are_those_of_the_page(
    config, positions, heads, kv_heads, head_dim, rotary_dim, dtype, device
):
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
    run = Pass(config, positions, dtype, device, **sizes)
    cache = run.cache(dtype)
    q, keys, values = rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep_nothing)
    exact_q, exact = run.exact()
    assert_rounded(q, exact_q, INNER * torch.ones_like(exact_q), device)
    seen = slice(0, N_SLOTS)  # which of several paddings the last slot holds is open
    for actual, expected in zip(cache.keys, exact.keys, strict=True):
        assert_rounded(actual[:, :, seen], expected[:, :, seen], INNER * torch.ones_like(expected[:, :, seen]), device)
    for actual, expected in zip(cache.values, exact.values, strict=True):
        assert torch.equal(actual[:, :, seen].double(), expected[:, :, seen])
    assert keys.data_ptr() == cache.keys[LAYER].data_ptr()
    assert values.data_ptr() == cache.values[LAYER].data_ptr()
    assert keys.shape == values.shape == (len(run.positions), kv_heads, 9, head_dim)


@EVERY_DTYPE
def test_padding_is_written_to_the_last_slot(config, dtype, device):
    run = Pass(config, [[4], [-1]], dtype, device)
    cache, before = run.cache(dtype), run.cache(dtype)
    rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep_nothing)
    assert torch.equal(cache.values[LAYER][1, :, N_SLOTS], run.v[1, 0])
    assert torch.equal(cache.values[LAYER][1, :, :N_SLOTS], before.values[LAYER][1, :, :N_SLOTS])
    assert torch.equal(cache.keys[LAYER][1, :, :N_SLOTS], before.keys[LAYER][1, :, :N_SLOTS])


def test_an_observer_is_given_every_stage(config, device):
    run = Pass(config, POSITIONS[0], torch.float32, device)
    cache, seen = run.cache(torch.float32), {}

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        seen[name] = array
        return array

    q, keys, values = rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep)
    assert list(seen) == ["q_rope", "k_rope", "k_cache", "v_cache"]
    assert q is seen["q_rope"]
    assert keys is seen["k_cache"]
    assert values is seen["v_cache"]
    place = run.place(cache)
    for name, x in (("q_rope", run.q), ("k_rope", run.k)):
        exact = rope(x.double(), place.cos.double(), place.sin.double())
        assert_rounded(seen[name], exact, INNER * torch.ones_like(exact), device)


def test_what_an_observer_hands_back_is_used_from_there_on(config, device):
    run = Pass(config, [[3, 4]], torch.float32, device)
    cache = run.cache(torch.float32)
    others = {"q_rope": run.q + 1, "k_rope": run.k + 2, "v_cache": torch.full((1, 2, 9, 6), 5.0, device=device)}

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        return others.get(name, array)

    q, keys, values = rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep)
    assert q is others["q_rope"]
    assert values is others["v_cache"]
    assert torch.equal(keys[:, :, 3:5].transpose(1, 2), others["k_rope"])
    assert torch.equal(cache.values[LAYER][:, :, 3:5].transpose(1, 2), run.v)


def test_heads_that_do_not_lie_side_by_side_are_read(config, device):
    run = Pass(config, [[3, 4]], torch.float32, device)
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (run.q, run.k, run.v)]
    caches = run.cache(torch.float32), run.cache(torch.float32)
    once, again = (
        rotate_and_cache(q, k, v, LAYER, run.place(cache), cache, keep_nothing)
        for (q, k, v), cache in zip((scattered, (run.q, run.k, run.v)), caches, strict=True)
    )
    for actual, expected in zip(once, again, strict=True):
        assert torch.equal(actual, expected)

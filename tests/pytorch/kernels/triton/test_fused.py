"""Norm, activation, projections, attention and rotation in one launch each, against the page in float64."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernel_tolerances import DTYPES, EPS, assert_rounded, random
from torch import nn

from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import RMSNorm, attention, keep_nothing, rms_norm, rope, swiglu
from llorch.pytorch.causal_lm import rotate_and_cache as plain
from llorch.pytorch.kernels.sdpa import sdpa_attention
from llorch.pytorch.kernels.triton import decode_attention as module
from llorch.pytorch.kernels.triton import dense_matvec, fused
from llorch.pytorch.kernels.triton.decode_attention import decode_attention
from llorch.pytorch.kernels.triton.dense_matvec import DenseLinear, multiply_row, share_launch
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm, rotate_and_cache

pytest.importorskip("triton", reason="NOT RUN: triton not installed")
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SUM = 40  # roundings on the way of a term through a sum: those of one thread, then those of the tree of threads


def norm(width: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    plain = RMSNorm(width, 1e-5)
    plain.weight = nn.Parameter(1 + random(width, dtype=dtype, device=device, seed=1), requires_grad=False)
    return plain


def linear(width: int, out: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> nn.Linear:
    plain = nn.Linear(width, out, bias=bias)
    plain.weight = nn.Parameter(random(out, width, dtype=dtype, device=device, seed=2), requires_grad=False)
    if bias:
        plain.bias = nn.Parameter(random(out, dtype=dtype, device=device, seed=3), requires_grad=False)
    return plain


def assert_product(actual: torch.Tensor, x: torch.Tensor, layer: Any, device: torch.device) -> None:
    """Each term passes so many sums, each off by half a step of a sum no larger than that of all sizes."""
    wide, weight = x.double(), layer.weight.double()
    bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.double()
    sizes = wide.abs() @ weight.abs().mT + bias.abs()
    assert_rounded(actual, wide @ weight.mT + bias, SUM * EPS * sizes, device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 300), (2, 3, 2500), (2, 5, 3, 20), (1, 7, 2, 64), (37, 128)], ids=str)
def test_norm_of_any_leading_rows_equals_the_reference(shape, dtype, device):
    x, plain = random(*shape, dtype=dtype, device=device, seed=4), norm(shape[-1], dtype, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    inner = (SUM / 2 + 6) * EPS * exact.abs()  # the root halves the error of the sum
    assert_rounded(FusedRMSNorm(plain)(x), exact, inner, device)


@EVERY_DTYPE
def test_norm_of_small_numbers_sees_epsilon(dtype, device):
    x, plain = random(3, 96, dtype=dtype, device=device, seed=5) * 0.003, norm(96, dtype, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    assert_rounded(FusedRMSNorm(plain)(x), exact, (SUM / 2 + 6) * EPS * exact.abs(), device)


def test_norm_reads_strided_rows(device):
    x = random(4, 3, 27, dtype=torch.float32, device=device, seed=6)[..., :20]
    plain = norm(20, torch.float32, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    assert_rounded(FusedRMSNorm(plain)(x), exact, (SUM / 2 + 6) * EPS * exact.abs(), device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 1025), (1, 9, 4864)], ids=str)
def test_swiglu_equals_the_reference(shape, dtype, device):
    gate, up = (random(*shape, dtype=dtype, device=device, seed=seed) * 4 for seed in (7, 8))
    exact = swiglu(gate.double(), up.double())
    inner = (1.5 * gate.double().abs() + 8) * EPS * exact.abs()  # exp is off by its argument's rounding
    assert_rounded(fused.swiglu(gate, up), exact, inner, device)


def test_swiglu_of_extreme_gates_neither_overflows_nor_vanishes(device):
    gate = torch.tensor([-1e4, -300.0, -80.0, 0.0, 80.0, 300.0, 1e4], device=device)
    up = torch.full_like(gate, 3.0)
    exact = swiglu(gate.double(), up.double())
    assert_rounded(fused.swiglu(gate, up), exact, (1.5 * gate.double().abs() + 8) * EPS * exact.abs(), device)


@EVERY_DTYPE
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("width", "out"), [(896, 5), (1500, 3), (20, 7), (300, 5), (4500, 3)])
def test_a_row_is_multiplied(width, out, bias, dtype, device):
    layer, x = linear(width, out, dtype, device, bias=bias), random(1, 1, width, dtype=dtype, device=device, seed=9)
    assert_product(DenseLinear(layer)(x), x, layer, device)


@EVERY_DTYPE
@pytest.mark.parametrize("out", [9, 17], ids=lambda out: f"{out} rows")
def test_a_program_takes_some_rows_of_a_tall_matrix(out, dtype, device, monkeypatch):
    monkeypatch.setattr(dense_matvec, "_PROGRAMS", 4)
    layer, x = linear(20, out, dtype, device, bias=True), random(1, 20, dtype=dtype, device=device, seed=9)
    assert_product(DenseLinear(layer)(x), x, layer, device)


def test_more_rows_than_one_go_to_torch(device):
    layer = linear(20, 7, torch.float32, device, bias=True)
    x = random(2, 20, dtype=torch.float32, device=device, seed=10)
    assert torch.equal(DenseLinear(layer)(x), layer(x))


@EVERY_DTYPE
@pytest.mark.parametrize("sizes", [(6, 3), (3, 6, 4)], ids=str)
def test_projections_of_one_input_share_one_launch(sizes, dtype, device):
    layers = [DenseLinear(linear(100, out, dtype, device, bias=True)) for out in sizes]
    x = random(1, 1, 100, dtype=dtype, device=device, seed=11)
    for actual, layer in zip(multiply_row(x, layers), layers, strict=True):
        assert_product(actual, x, layer, device)


def test_projections_return_the_products_of_their_input(device):
    first, second = (DenseLinear(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4))
    share_launch([first, second], multiply_row)
    x, other = (random(1, 20, dtype=torch.float32, device=device, seed=seed) for seed in (12, 13))
    for layer, given in ((first, x), (second, other), (first, other), (first, other), (second, x), (second, x)):
        assert_product(layer(given), given, layer, device)


class Interrupted(DenseLinear):
    """Lets another thread go first when its product is looked up."""

    interrupt: Any = None

    def __hash__(self) -> int:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            interrupt()
        return id(self)


def test_host_thread_gets_no_product_of_another_thread(device):
    first, second = (Interrupted(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4))
    share_launch([first, second], multiply_row)
    x, other = (random(1, 20, dtype=torch.float32, device=device, seed=seed) for seed in (15, 16))
    with ThreadPoolExecutor(1) as thread:
        first(x)
        second.interrupt = lambda: thread.submit(first, other).result()
        assert_product(second(x), x, second, device)


def test_projections_keep_no_product_after_all_are_returned(device):
    layers = [DenseLinear(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4)]
    together = share_launch(layers, multiply_row)
    x = random(1, 20, dtype=torch.float32, device=device, seed=14)
    before = [layer(x) for layer in layers]
    x.mul_(2)
    for layer, product in zip(layers, before, strict=True):
        assert torch.equal(layer(x), 2 * product)
    assert vars(together)["_input"] is None


@pytest.mark.slow
def test_every_kernel_compiles_for_a_device_and_loads_16_bytes_at_a_time(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[3] / "support/helpers/compile_kernels.py"
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 * 15 * 2
    assert not [line for line in lines if "narrow" in line]


N_SLOTS = 100
LOST = {torch.float32: 0.0, torch.bfloat16: 2.0**-16, torch.float16: 2.0**-20}  # of a probability held in two numbers
BATCH = 2


@pytest.fixture
def wide_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step take more slots in the interpreter, where steps are what attention costs."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "_BLOCK_BYTES", 2 * module._BLOCK_BYTES)


Run = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Run:
    kind = {"dtype": dtype, "device": device}
    q = random(BATCH, 1, heads, head_dim, **kind, seed=1)
    keys, values = (random(BATCH, kv_heads, N_SLOTS + 1, head_dim, **kind, seed=seed) for seed in (2, 3))
    return q, keys, values


def causal_visibility(*last: int, ctx: int, device: torch.device) -> torch.Tensor:
    return torch.arange(ctx, device=device) <= torch.tensor(last, device=device)[:, None, None, None]


def assert_attends(actual: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible) -> None:
    """A score is off by so many roundings of its sum, a probability by twice that, the result by that of each value."""
    stages: dict[str, torch.Tensor] = {}

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        stages[name] = array
        return array

    exact = attention(q.double(), keys.double(), values.double(), visible, keep)
    sizes = attention(q.double(), keys.double(), values.double().abs(), visible, keep_nothing)
    head_dim = q.shape[-1]
    score = head_dim * EPS * q.double().norm(dim=-1).max() * keys.double().norm(dim=-1).max() / math.sqrt(head_dim)
    assert_rounded(actual, exact, (2 * score + keys.shape[2] * EPS + LOST[q.dtype]) * sizes, q.device)
    assert stages["attn_probs"].shape[-1] == keys.shape[2]


@pytest.mark.usefixtures("wide_blocks")
@EVERY_DTYPE
@pytest.mark.parametrize("ctx", [1, 33, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 20), (6, 2, 64), (7, 1, 128)], ids=str)
def test_attention_equals_the_reference(ctx, heads, kv_heads, head_dim, dtype, device):
    q, keys, values = run(heads, kv_heads, head_dim, dtype, device)
    context = keys[:, :, :ctx], values[:, :, :ctx]
    assert_attends(decode_attention(q, *context, None, keep_nothing), q, *context, None)
    visible = causal_visibility(ctx // 2, 0, ctx=ctx, device=device)
    assert_attends(decode_attention(q, *context, visible, keep_nothing), q, *context, visible)


@pytest.mark.usefixtures("wide_blocks")
@pytest.mark.parametrize("programs", [1, 6, 1000], ids=lambda n: f"{n} programs")
@EVERY_DTYPE
def test_attention_does_not_depend_on_the_number_of_splits(dtype, programs, device, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    q, keys, values = run(6, 2, 20, dtype, device)
    visible = causal_visibility(99, 40, ctx=N_SLOTS + 1, device=device)
    assert_attends(decode_attention(q, keys, values, visible, keep_nothing), q, keys, values, visible)


@pytest.mark.usefixtures("wide_blocks")
@EVERY_DTYPE
def test_masked_slots_are_not_read(dtype, device):
    q, keys, values = run(6, 2, 20, dtype, device)
    visible = causal_visibility(50, 3, ctx=N_SLOTS + 1, device=device)
    before = decode_attention(q, keys, values, visible, keep_nothing)
    unseen = ~visible[:, 0, 0]
    for store in (keys, values):
        store.transpose(1, 2)[unseen] = math.nan
    assert torch.equal(decode_attention(q, keys, values, visible, keep_nothing), before)


@EVERY_DTYPE
def test_large_scores_overflow_nowhere(dtype, device):
    q, keys, values = run(6, 2, 20, dtype, device)
    q, visible = q * 30, causal_visibility(99, 40, ctx=N_SLOTS + 1, device=device)
    assert_attends(decode_attention(q, keys, values, visible, keep_nothing), q, keys, values, visible)


def test_keys_and_values_may_have_different_strides(device):
    q, keys, values = run(6, 2, 20, torch.float32, device)
    expected = decode_attention(q, keys, values, None, keep_nothing)
    apart = values.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode_attention(q, keys, apart, None, keep_nothing), expected)
    assert torch.equal(decode_attention(q, keys.mT.contiguous().mT, values, None, keep_nothing), expected)


def test_more_tokens_than_one_go_to_torch(device):
    _, keys, values = run(6, 2, 20, torch.float32, device)
    q = random(BATCH, 3, 6, 20, dtype=torch.float32, device=device, seed=4)
    expected = sdpa_attention(q, keys, values, None, keep_nothing)
    assert torch.equal(decode_attention(q, keys, values, None, keep_nothing), expected)


POSITIONS = [[[-1, -1, 3, 4, 5], [2, 3, 4, -1, 5]], [[7], [-1]], [[0, 1, 2]]]  # padding left, within, of a whole pass
N_ROTATED_SLOTS = 11
LAYER = 1
INNER = 3 * EPS * 6  # two products and their sum in float32; no two parts of a sum are together larger than 6


class PrefillPass:
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
        made = Cache(self.config, batch=len(self.positions), n_slots=N_ROTATED_SLOTS, dtype=dtype, device=self.device)
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
def test_queries_and_cache_equal_the_reference(config, positions, heads, kv_heads, head_dim, rotary_dim, dtype, device):
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
    run = PrefillPass(config, positions, dtype, device, **sizes)
    cache = run.cache(dtype)
    q, keys, values = rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep_nothing)
    exact_q, exact = run.exact()
    assert_rounded(q, exact_q, INNER * torch.ones_like(exact_q), device)
    seen = slice(0, N_ROTATED_SLOTS)  # which of several paddings the last slot holds is open
    for actual, expected in zip(cache.keys, exact.keys, strict=True):
        assert_rounded(actual[:, :, seen], expected[:, :, seen], INNER * torch.ones_like(expected[:, :, seen]), device)
    for actual, expected in zip(cache.values, exact.values, strict=True):
        assert torch.equal(actual[:, :, seen].double(), expected[:, :, seen])
    assert keys.data_ptr() == cache.keys[LAYER].data_ptr()
    assert values.data_ptr() == cache.values[LAYER].data_ptr()
    assert keys.shape == values.shape == (len(run.positions), kv_heads, 9, head_dim)


@EVERY_DTYPE
def test_padding_is_written_to_the_last_slot(config, dtype, device):
    run = PrefillPass(config, [[4], [-1]], dtype, device)
    cache, before = run.cache(dtype), run.cache(dtype)
    rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep_nothing)
    assert torch.equal(cache.values[LAYER][1, :, N_ROTATED_SLOTS], run.v[1, 0])
    assert torch.equal(cache.values[LAYER][1, :, :N_ROTATED_SLOTS], before.values[LAYER][1, :, :N_ROTATED_SLOTS])
    assert torch.equal(cache.keys[LAYER][1, :, :N_ROTATED_SLOTS], before.keys[LAYER][1, :, :N_ROTATED_SLOTS])


def test_observer_receives_every_stage(config, device):
    run = PrefillPass(config, POSITIONS[0], torch.float32, device)
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


def test_array_returned_by_an_observer_is_used_from_there_on(config, device):
    run = PrefillPass(config, [[3, 4]], torch.float32, device)
    cache = run.cache(torch.float32)
    others = {"q_rope": run.q + 1, "k_rope": run.k + 2, "v_cache": torch.full((1, 2, 9, 6), 5.0, device=device)}

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        return others.get(name, array)

    q, keys, values = rotate_and_cache(run.q, run.k, run.v, LAYER, run.place(cache), cache, keep)
    assert q is others["q_rope"]
    assert values is others["v_cache"]
    assert torch.equal(keys[:, :, 3:5].transpose(1, 2), others["k_rope"])
    assert torch.equal(cache.values[LAYER][:, :, 3:5].transpose(1, 2), run.v)


def test_strided_heads_are_read(config, device):
    run = PrefillPass(config, [[3, 4]], torch.float32, device)
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (run.q, run.k, run.v)]
    caches = run.cache(torch.float32), run.cache(torch.float32)
    once, again = (
        rotate_and_cache(q, k, v, LAYER, run.place(cache), cache, keep_nothing)
        for (q, k, v), cache in zip((scattered, (run.q, run.k, run.v)), caches, strict=True)
    )
    for actual, expected in zip(once, again, strict=True):
        assert torch.equal(actual, expected)

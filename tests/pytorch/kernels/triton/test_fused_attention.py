"""Attention of one new token per sequence, split between programs, against the page in float64."""

import math

import pytest
import torch
from helpers.kernel_tolerances import DTYPES, EPS, assert_rounded, random

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.pytorch.causal_lm import attention, keep_nothing
from llorch.pytorch.kernels.sdpa import sdpa_attention
from llorch.pytorch.kernels.triton import decode_attention as module
from llorch.pytorch.kernels.triton.decode_attention import decode_attention

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


def seen_up_to(*last: int, ctx: int, device: torch.device) -> torch.Tensor:
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
def test_it_is_the_attention_of_the_page(ctx, heads, kv_heads, head_dim, dtype, device):
    q, keys, values = run(heads, kv_heads, head_dim, dtype, device)
    context = keys[:, :, :ctx], values[:, :, :ctx]
    assert_attends(decode_attention(q, *context, None, keep_nothing), q, *context, None)
    visible = seen_up_to(ctx // 2, 0, ctx=ctx, device=device)
    assert_attends(decode_attention(q, *context, visible, keep_nothing), q, *context, visible)


@pytest.mark.usefixtures("wide_blocks")
@pytest.mark.parametrize("programs", [1, 6, 1000], ids=lambda n: f"{n} programs")
@EVERY_DTYPE
def test_any_number_of_parts_gives_the_same_attention(dtype, programs, device, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    q, keys, values = run(6, 2, 20, dtype, device)
    visible = seen_up_to(99, 40, ctx=N_SLOTS + 1, device=device)
    assert_attends(decode_attention(q, keys, values, visible, keep_nothing), q, keys, values, visible)


@pytest.mark.usefixtures("wide_blocks")
@EVERY_DTYPE
def test_slots_that_nobody_sees_are_not_read(dtype, device):
    q, keys, values = run(6, 2, 20, dtype, device)
    visible = seen_up_to(50, 3, ctx=N_SLOTS + 1, device=device)
    before = decode_attention(q, keys, values, visible, keep_nothing)
    unseen = ~visible[:, 0, 0]
    for store in (keys, values):
        store.transpose(1, 2)[unseen] = math.nan
    assert torch.equal(decode_attention(q, keys, values, visible, keep_nothing), before)


@EVERY_DTYPE
def test_large_scores_overflow_nowhere(dtype, device):
    q, keys, values = run(6, 2, 20, dtype, device)
    q, visible = q * 30, seen_up_to(99, 40, ctx=N_SLOTS + 1, device=device)
    assert_attends(decode_attention(q, keys, values, visible, keep_nothing), q, keys, values, visible)


def test_keys_and_values_may_lie_in_memory_in_different_ways(device):
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

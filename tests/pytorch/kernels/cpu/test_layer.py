import ctypes
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from helpers.kernel_tolerances import distance
from helpers.refusals import refuses
from torch import nn

from llorch.files import open_weights
from llorch.ops.compiled.library import library
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import attention, keep_nothing, rms_norm, rotate_and_cache, swiglu
from llorch.pytorch.kernels.cpu.layer import FEW, HALF, CpuAttention, CpuRMSNorm, CpuRotate, CpuSwiglu
from llorch.runtime.builtin import builtin_path

COMPILED = cast(ctypes.CDLL, library())  # that it is not None is tested in ops/compiled/test_library.py
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # half a step of eight bits, as root mean square less than that
DTYPES = pytest.mark.parametrize("dtype", HALF, ids=str)


def random_values(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert distance(actual, expected) < CLOSE[dtype]


@DTYPES
@pytest.mark.parametrize("width", [64, 37, 896])
@pytest.mark.parametrize("rows", [1, 40])
def test_norm_equals_the_reference(rows, width, dtype):
    gain = nn.Parameter(random_values(width, dtype=dtype, seed=1), requires_grad=False)
    x = random_values(1, rows, width, dtype=dtype)
    assert_close(CpuRMSNorm(gain, 1e-5, COMPILED)(x), rms_norm(x.double(), gain.double(), eps=1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 4864), (2, 7, 256), (3, 5)])
def test_swiglu_equals_the_reference(shape, dtype):
    gate, up = 30 * random_values(*shape, dtype=dtype), random_values(*shape, dtype=dtype, seed=1)
    assert_close(CpuSwiglu(COMPILED)(gate, up), swiglu(gate.double(), up.double()), dtype)


def test_swiglu_is_right_at_every_bfloat16_gate():
    gate = torch.linspace(-80, 100, 16 * 4096)
    expected = swiglu(gate.double(), torch.ones_like(gate).double())
    off = (CpuSwiglu(COMPILED)(gate, torch.ones_like(gate)).double() - expected).abs() / expected.abs().clamp(min=1e-30)
    assert off.max() < 4 * 2**-23


def test_swiglu_of_a_very_negative_gate_is_zero():
    assert CpuSwiglu(COMPILED)(torch.full((16,), -1000.0), torch.ones(16)).abs().max() == 0


def cache(dtype: torch.dtype, batch: int = 2) -> Cache:
    config = open_weights(builtin_path("micro-qwen3")).config
    return Cache(config, batch=batch, n_slots=12, dtype=dtype, device=torch.device("cpu"), first_position=100)


def heads(dtype: torch.dtype, seq: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    config = open_weights(builtin_path("micro-qwen3")).config
    q = random_values(2, seq, config.n_heads, config.head_dim, dtype=dtype)
    k, v = random_values(2, 2, seq, config.n_kv_heads, config.head_dim, dtype=dtype, seed=1)
    return q, k, v


@DTYPES
def test_rotation_and_cache_equal_the_reference(dtype):
    positions = torch.tensor([[-1, 103, 104], [108, 109, 110]])  # padding, and two sequences at different places
    made = []
    for rotate in (CpuRotate(COMPILED), rotate_and_cache):
        store, trace = cache(dtype), {}
        place = store.place(positions, ctx=11)
        q, keys, values = rotate(*heads(dtype), 1, place, store, lambda name, x, trace=trace: trace.setdefault(name, x))
        made.append({"q": q, "keys": keys, "values": values, "store": store.keys[1], **trace})
        assert store.keys[0].abs().max() == 0
    assert made[0].keys() == made[1].keys()
    for name, actual in made[0].items():
        torch.testing.assert_close(actual, made[1][name], rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_array_returned_by_an_observer_is_used_from_there_on():
    store = cache(torch.float32)
    place = store.place(torch.arange(100, 103).expand(2, 3), ctx=3)

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 7) if name == "k_rope" else x

    _, keys, _ = CpuRotate(COMPILED)(*heads(torch.float32), 0, place, store, keep)
    assert (keys == 7).all()


def test_a_slot_that_does_not_exist_is_refused_and_nothing_is_written():
    store = cache(torch.float32)
    place = store.place(torch.tensor([[100, 99], [100, 99]]), ctx=3)  # 99 is before the first position
    with refuses(IndexError, where="cache", expected=(0, 12), got="-1"):
        CpuRotate(COMPILED)(*heads(torch.float32, seq=2), 0, place, store, keep_nothing)
    assert store.keys[0].abs().max() == 0


@DTYPES
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("batch", "seq", "ctx"), [(1, 1, 1), (1, 1, 200), (2, 2, 37), (1, FEW, 16)])
def test_attention_of_a_few_tokens_equals_the_reference(batch, seq, ctx, masked, dtype):
    q = random_values(batch, seq, 6, 32, dtype=dtype)
    store = [random_values(batch, 3, ctx + 5, 32, dtype=dtype, seed=seed) for seed in (1, 2)]
    keys, values = (array[:, :, :ctx] for array in store)  # views of longer storage, as a cache gives them
    visible = torch.rand(batch, 1, seq, ctx, generator=torch.Generator().manual_seed(0)) < 0.5 if masked else None
    if visible is not None:
        visible[..., 0] = True
    expected = attention(q.double(), keys.double(), values.double(), visible, keep_nothing)
    assert_close(CpuAttention(COMPILED, None)(q, keys, values, visible, keep_nothing), expected, dtype)


def test_masked_keys_do_not_count_even_with_huge_values():
    q, keys, values = (random_values(1, n, s, 16, dtype=torch.float32) for n, s in ((1, 2), (2, 20), (2, 20)))
    run = partial(CpuAttention(COMPILED, None), visible=torch.arange(20).view(1, 1, 1, 20) < 10, keep=keep_nothing)
    before = run(q, keys, values)
    keys[:, :, 10:], values[:, :, 10:] = 1e4, -1e30
    assert torch.equal(run(q, keys, values), before)


def test_cpu_attention_of_many_tokens_uses_the_original_attention():
    q, keys = random_values(1, FEW + 1, 2, 32, dtype=torch.float32), random_values(1, 2, 9, 32, dtype=torch.float32)
    actual = CpuAttention(COMPILED, attention)(q, keys, keys, None, keep_nothing)
    assert torch.equal(actual, attention(q, keys, keys, None, keep_nothing))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 6), (3, 3, 40), (14, 2, 64), (34, 1, 512)])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_bits_of_a_token_do_not_depend_on_other_tokens(masked, heads, kv_heads, head_dim, dtype):
    ctx, seq = 150, 20
    q, store = (
        random_values(2, seq, heads, head_dim, dtype=dtype),
        random_values(2, 2, kv_heads, ctx + 5, head_dim, dtype=dtype),
    )
    keys, values = store[:, :, :, :ctx]
    seen = torch.ones(seq, ctx, dtype=torch.bool).tril(ctx - seq).expand(2, 1, seq, ctx)
    if masked:
        seen = seen & (torch.rand(2, 1, seq, ctx, generator=torch.Generator().manual_seed(0)) < 0.7)
    attend = CpuAttention(COMPILED, None)
    whole = attend(q, keys, values, seen if masked else None, keep_nothing)
    assert_close(whole, attention(q.double(), keys.double(), values.double(), seen, keep_nothing), dtype)
    for row, token in ((0, 0), (1, 7), (0, 13), (1, 19)):
        one, here = slice(row, row + 1), slice(token, token + 1)
        alone = attend(q[one, here], keys[one], values[one], seen[one, :, here], keep_nothing)
        assert torch.equal(alone[0, 0], whole[row, token])
        end = ctx - seq + token + 1  # no slot behind the token's own
        alone = attend(q[one, here], keys[one, :, :end], values[one, :, :end], seen[one, :, here, :end], keep_nothing)
        assert torch.equal(alone[0, 0], whole[row, token])


@DTYPES
def test_swiglu_bits_of_an_element_do_not_depend_on_its_position(dtype):
    gate, up = 5 * random_values(3, 37, dtype=dtype), random_values(3, 37, dtype=dtype, seed=1)
    act = CpuSwiglu(COMPILED)
    assert torch.equal(torch.cat([act(*one) for one in zip(gate.split(1), up.split(1), strict=True)]), act(gate, up))

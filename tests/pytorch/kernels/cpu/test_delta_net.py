"""The compiled kernels of a delta net and of experts, compared with the reference implementation."""

import ctypes
from typing import cast

import pytest
import torch
from helpers.refusals import refuses

from llorch.files.quant import GGMLType
from llorch.pytorch.kernels.cpu.delta_net import CpuDeltaRule, CpuGatedNorm, CpuL2Norm, CpuShortConv
from llorch.pytorch.kernels.cpu.experts import FEW, CpuExperts, CpuQuantisedExperts
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.kernels.packing import PACKERS
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv, l2_norm
from llorch.pytorch.models.delta_rule import delta_rule
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts
from llorch.pytorch.random_weights import random_fields

COMPILED = cast(ctypes.CDLL, library())
HALF = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-7), (torch.bfloat16, 3e-3)], ids=str)


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@HALF
@pytest.mark.parametrize("width", [64, 37, 1100])
def test_the_convolution_is_that_of_the_page(width, dtype, limit):
    torch.manual_seed(0)
    plain = ShortConv(width, 4)
    plain.weight = torch.nn.Parameter(torch.randn(width, 4, dtype=dtype), requires_grad=False)
    x, before = torch.randn(2, 9, width).to(dtype), torch.randn(2, 3, width).to(dtype)
    ours = CpuShortConv(plain.weight, COMPILED)
    for real in (None, torch.rand(2, 9) > 0.4):
        actual, last = ours(x, before, real)
        expected, want_last = plain.double()(x.double(), before.double(), real)
        at = slice(None) if real is None else real
        assert off(actual[at], expected[at]) < limit
        assert torch.equal(last.double(), want_last)


@pytest.mark.parametrize(("key", "value"), [(128, 128), (12, 20), (8, 70)])
def test_the_rule_is_that_of_the_page_and_passes_have_its_bits(key, value):
    torch.manual_seed(0)
    rows = torch.randn(2, 40, 2 * 2 * key + 6 * value)  # heads are parts of wider rows
    q, k, v = rows.split((2 * key, 2 * key, 6 * value), -1)
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, 2), (k, 2), (v, 6)))
    norm, rule = CpuL2Norm(COMPILED), CpuDeltaRule(COMPILED)
    assert off(norm(k), l2_norm(k.double())) < 3e-7
    q, k = norm(q), norm(k)
    beta, log_decay = (
        torch.rand(2, 40, 6),
        -torch.randn(2, 40, 6).exp() * torch.where(torch.rand(2, 40, 6) > 0.9, 300, 1),
    )
    state = torch.randn(2, 6, key, value)
    expected, end = delta_rule(*(x.double() for x in (q, k, v, beta, log_decay, state)))
    whole, last = rule(q, k, v, beta, log_decay, state.clone())
    assert off(whole, expected) < 3e-7
    assert off(last, end) < 3e-7
    parts = state[1:].clone()
    for at in (slice(0, 1), slice(1, 30), slice(30, 40)):
        part, parts = rule(q[1:, at], k[1:, at], v[1:, at], beta[1:, at], log_decay[1:, at], parts)
        assert torch.equal(part, whole[1:, at])
    assert torch.equal(parts, last[1:])


@HALF
def test_the_gated_norm_is_that_of_the_page(dtype, limit):
    torch.manual_seed(0)
    plain = GatedNorm(20, 1e-6)
    plain.weight = torch.nn.Parameter(torch.randn(20).to(dtype), requires_grad=False)
    x, z = torch.randn(2, 3, 6, 20), (4 * torch.randn(2, 3, 6, 20)).to(dtype)
    actual = CpuGatedNorm(plain.weight, 1e-6, COMPILED)(x, z)
    assert actual.dtype == dtype
    assert off(actual, plain.double()(x.double(), z.double())) < limit


@HALF
@pytest.mark.parametrize("seq", [1, 5, FEW])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_are_those_of_the_page(seq, shared, dtype, limit):
    torch.manual_seed(0)
    plain = ExpertLinear(7, 64, 40)
    plain.weight = torch.nn.Parameter(torch.randn(7, 40, 64).to(dtype), requires_grad=False)
    x, ids = torch.randn(1, seq, 1 if shared else 3, 64).to(dtype), torch.rand(1, seq, 7).argsort(-1)[..., :3]
    assert off(CpuExperts(plain.weight, COMPILED)(x, ids), plain.double()(x.double(), ids)) < limit


@pytest.mark.parametrize("kind", PACKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seq", [1, FEW])
def test_packed_experts_are_those_of_the_page(seq, kind):
    torch.manual_seed(0)
    fields = random_fields((5 * 24, 512), kind, torch.device("cpu"))
    x, ids = torch.randn(1, seq, 1, 512), torch.rand(1, seq, 5).argsort(-1)[..., :2]
    actual = CpuQuantisedExperts(fields, kind, 5, COMPILED)(x, ids)
    assert off(actual, QuantisedExperts(fields, kind, 5)(x, ids).double()) < 1e-6


def test_an_expert_that_does_not_exist_is_refused():
    fields = random_fields((5 * 24, 512), GGMLType.Q8_0, torch.device("cpu"))
    with refuses(IndexError, where="experts", expected=(0, 4), got="[[[5]]]"):
        CpuQuantisedExperts(fields, GGMLType.Q8_0, 5, COMPILED)(torch.randn(1, 1, 1, 512), torch.tensor([[[5]]]))

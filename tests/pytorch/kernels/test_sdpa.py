"""Attention by scaled_dot_product_attention against that of the page."""

from typing import Any

import pytest
import torch

from llorch.pytorch.causal_lm import CausalLM, attention, keep_nothing
from llorch.pytorch.kernels.sdpa import sdpa_attention, use_sdpa

MASKS = ["none", "padding"]
DTYPES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# the rounding of sums; in half precision, two roundings of a result of about 1: the probabilities' and its own


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seq", "ctx"), [(1, 9), (1, 1), (7, 7), (5, 9)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 20), (6, 2, 64), (7, 1, 8)], ids=str)
def test_it_is_the_attention_of_the_page(seq, ctx, heads, kv_heads, head_dim, mask, dtype, device):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seq, heads, head_dim, generator=generator).to(device, dtype)
    store = torch.randn(2, 2, kv_heads, ctx + 3, head_dim, generator=generator).to(device, dtype)
    keys, values = store[:, :, :, :ctx]  # views, as of a longer cache
    last = torch.arange(ctx - seq, ctx).expand(2, seq).clone()
    last[1] = (last[1] - 2).clamp(min=0)  # what padding sees
    visible = (torch.arange(ctx) <= last[:, None, :, None]).to(device) if mask == "padding" else None
    actual = sdpa_attention(q, keys, values, visible, keep_nothing)
    expected = attention(q.double(), keys.double(), values.double(), visible, keep_nothing)
    assert actual.dtype is dtype
    assert actual.device.type == device
    assert actual.flatten(-2).shape == (2, seq, heads * head_dim)
    assert ((actual.double() - expected).abs() <= DTYPES[dtype] * values.double().abs().max()).all()


def test_every_layer_of_a_model_uses_it(config):
    model = CausalLM(config)
    use_sdpa(model)
    layers: Any = model.model.layers
    assert all(layer.self_attn.attend is sdpa_attention for layer in layers)

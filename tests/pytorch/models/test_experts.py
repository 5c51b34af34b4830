"""The weighted sum over the experts of a token, in half precision."""

import pytest
import torch

from llorch.pytorch.models.experts import mixed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_experts_make_is_added_up_in_float32(dtype: torch.dtype):
    made, weights = torch.randn(1, 5, 8, 32).to(dtype), torch.rand(1, 5, 8).softmax(-1).to(dtype)
    expected = (weights.double()[..., None] * made.double()).sum(2)
    actual = mixed(made, weights)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)

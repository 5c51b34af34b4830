"""The product of an adapter in torch: scaling * B A x, through the narrow middle first, with a lean backward pass.

For the backward pass torch would keep the input once more, in float32. Here the input is kept as it came, which the
leaves of a layer share, and the mask of dropout as a byte per element.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from llorch.pytorch.reproducible_sums import in_tiles


def delta(
    x: Float[Tensor, "*rows in"],
    lora_A: Float[Tensor, "r in"],
    lora_B: Float[Tensor, "out r"],
    *,
    scaling: float,
    mask: Bool[Tensor, "*rows in"] | None = None,
    share: float = 0.0,
) -> Float[Tensor, "*rows out"]:
    """Compute scaling * (x A^T) B^T in the dtype of A; dropout leaves `mask` of `x` and drops a `share` of it."""
    if torch.is_grad_enabled():
        return Delta.apply(x, lora_A, lora_B, scaling, mask, share)  # type: ignore[return-value] (torch says Any)
    return linear(_narrow(x, lora_A, scaling, mask, share), lora_B)


def drop_mask(x: Float[Tensor, "*rows in"], share: float) -> Bool[Tensor, "*rows in"]:
    """Draw which elements dropout leaves, from the generator of torch that belongs to the device."""
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - share)


def fixed_product(x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "*rows out"]:
    """Compute x @ weight.T so that a row does not depend on its company; see `llorch.pytorch.reproducible_sums`."""
    return in_tiles(lambda tile: linear(tile, weight), x, (linear, *weight.shape))


class Delta(torch.autograd.Function):
    """See `delta`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, mask: Tensor | None, share: float
    ) -> Tensor:
        """Multiply; remembers the input as it came."""
        narrow = _narrow(x, lora_A, scaling, mask, share)
        ctx.save_for_backward(x, lora_A, lora_B, narrow, mask)
        ctx.scaling, ctx.share = scaling, share
        return linear(narrow, lora_B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, A and B; those that nobody wants are not made."""
        x, lora_A, lora_B, narrow, mask = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        d_narrow = (rows @ lora_B) * ctx.scaling
        d_x = d_A = d_B = None
        if ctx.needs_input_grad[2]:
            d_B = rows.mT @ narrow.reshape(len(rows), -1)
        if ctx.needs_input_grad[1]:
            d_A = d_narrow.mT @ _wide(x, mask, ctx.share, lora_A.dtype).reshape(len(rows), -1)
        if ctx.needs_input_grad[0]:
            d_x = (d_narrow @ lora_A).view(x.shape)
            d_x = (d_x if mask is None else d_x * mask / (1 - ctx.share)).to(x.dtype)
        return d_x, d_A, d_B, None, None, None


def _narrow(x: Tensor, lora_A: Tensor, scaling: float, mask: Tensor | None, share: float) -> Float[Tensor, "*rows r"]:
    """What goes into B: where scaling is cheapest."""
    return linear(_wide(x, mask, share, lora_A.dtype), lora_A) * scaling


def _wide(x: Tensor, mask: Tensor | None, share: float, dtype: torch.dtype) -> Tensor:
    """The input in the dtype of the computation, less what is dropped."""
    return x.to(dtype) if mask is None else x.to(dtype) * mask / (1 - share)

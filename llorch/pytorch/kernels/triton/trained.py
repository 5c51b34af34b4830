"""The operations of `fused` for training: forward as in `fused`, and backward in one launch each.

    norm        n = x / sqrt(mean(x^2) + eps),  s = grad * gain:   d_x = (s - n * mean(s * n)) / sqrt(mean(x^2) + eps)
    swiglu      p = 1 / (1 + exp(-gate)):   d_gate = grad * up * p * (1 + gate * (1 - p)),  d_up = grad * gate * p
    rotation    d_x is the gradient, rotated by the negative angle

Like the functions of `llorch.pytorch.causal_lm`, a backward pass computes in float32 and rounds a gradient once. It
recomputes intermediate results of the forward pass, so only inputs are saved, in their own dtype.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Context, Heads, Keep, rms_norm
from llorch.pytorch.causal_lm import rotate_and_cache as plain_rotate_and_cache
from llorch.pytorch.kernels.triton import fused
from llorch.pytorch.kernels.triton.fused import ACT_TILE, FusedRMSNorm, first_halves, norm_tile, rotate_pairs

Angles = Float[Tensor, "batch seq half"]


class TrainedRMSNorm(FusedRMSNorm):
    """RMSNorm with a gradient of its input; a norm with a trainable gain uses the reference function."""

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        if self.weight.requires_grad:
            return rms_norm(x, self.weight, eps=self.eps)
        return NormFunction.apply(x, self.weight, self.eps)


class NormFunction(torch.autograd.Function):
    """Autograd function of `TrainedRMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise; save the input."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return fused.normalised(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Compute the gradient of the input."""
        (x, weight), grad = ctx.saved_tensors, grads[0].contiguous()
        x = x.contiguous()
        d_x, width = torch.empty_like(x), x.shape[-1]
        n_rows = x.numel() // width
        tile = norm_tile(width)
        launch: Any = _norm_back[(triton.cdiv(n_rows, tile["ROWS"]),)]
        launch(grad, x, weight, d_x, n_rows, width, ctx.eps, **tile)
        return d_x, None, None


@triton.jit
@no_type_check
def _norm_back(grad, x, weight, d_x, n_rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offsets = row[:, None] * width + column[None, :]
    mask = (row < n_rows)[:, None] & (column < width)[None, :]
    x_float32 = tl.load(x + offsets, mask=mask, other=0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    scaled = tl.load(grad + offsets, mask=mask, other=0).to(tl.float32) * gain[None, :]
    inverse = (1 / tl.sqrt_rn(tl.sum(x_float32 * x_float32, 1) / width + eps))[:, None]
    normal = x_float32 * inverse
    radial = (tl.sum(scaled * normal, 1) / width)[:, None]  # removed: scaling a row does not change its norm's output
    tl.store(d_x + offsets, ((scaled - normal * radial) * inverse).to(d_x.dtype.element_ty), mask=mask)


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute silu(gate) * up with gradients of both."""
    return SwigluFunction.apply(gate, up)  # type: ignore[return-value] (torch says Any)


class SwigluFunction(torch.autograd.Function):
    """Autograd function of `swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Activate; save the inputs."""
        ctx.save_for_backward(gate, up)
        return fused.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Compute the gradients of both inputs in one pass."""
        gate, up, grad = (x.contiguous() for x in (*ctx.saved_tensors, grads[0]))
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _swiglu_back[(triton.cdiv(gate.numel(), ACT_TILE),)](grad, gate, up, d_gate, d_up, gate.numel(), TILE=ACT_TILE)
        return d_gate, d_up


@triton.jit
@no_type_check
def _swiglu_back(grad, gate, up, d_gate, d_up, n, TILE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    d = tl.load(grad + offsets, mask=mask, other=0).to(tl.float32)
    g = tl.load(gate + offsets, mask=mask, other=0).to(tl.float32)
    u = tl.load(up + offsets, mask=mask, other=0).to(tl.float32)
    power = tl.exp(-tl.abs(g))  # never overflows
    sigmoid = tl.where(g < 0, power, 1.0) / (1 + power)  # of the gate
    complement = tl.where(g < 0, 1.0, power) / (1 + power)  # 1 - sigmoid, without cancellation
    tl.store(d_up + offsets, (d * g * sigmoid).to(d_up.dtype.element_ty), mask=mask)
    tl.store(d_gate + offsets, (d * u * sigmoid * (1 + g * complement)).to(d_gate.dtype.element_ty), mask=mask)


def rotate_and_cache(
    q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
) -> tuple[Heads, Context, Context]:
    """Compute `rotate_and_cache` of `causal_lm` with gradients of queries and keys."""
    if 2 * place.cos.shape[-1] != q.shape[-1]:  # only a part of each head is rotated
        return plain_rotate_and_cache(q, k, v, layer, place, cache, keep)
    q_rope, k_rope = RotationFunction.apply(q, k, place.cos, place.sin)  # type: ignore[misc] (torch says Any)
    q_rope, k_rope = keep("q_rope", q_rope), keep("k_rope", k_rope)
    keys, values = cache.append(layer, k_rope, v, place)
    return q_rope, keep("k_cache", keys), keep("v_cache", values)


class RotationFunction(torch.autograd.Function):
    """Autograd function that rotates queries and keys by the angles of their tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate; save the angles."""
        ctx.save_for_backward(cos, sin)
        return _rotate_heads(q, k, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        """Rotate the gradients back."""
        d_q, d_k = grads
        return *_rotate_heads(d_q, d_k, *ctx.saved_tensors, back=True), None, None


def _rotate_heads(q: Heads, k: Heads, cos: Angles, sin: Angles, *, back: bool) -> tuple[Heads, Heads]:
    """Rotate in one launch; inputs may have any strides, as gradients do; outputs are contiguous."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    (batch, seq, n_heads, head_dim), kv_heads = q.shape, k.shape[2]
    rotated = q.new_empty(q.shape), k.new_empty(k.shape)
    _rotate_tokens[(batch * seq, 2)](
        q, k, cos, sin, *rotated, seq, n_heads, kv_heads, *q.stride()[:3], *k.stride()[:3],
        BACK=back, HALF=head_dim // 2, COLUMNS=triton.next_power_of_2(head_dim // 2),
        HEADS=triton.next_power_of_2(n_heads), KV_HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip
    return rotated


@triton.jit
@no_type_check
def _rotate_tokens(
    q, k, cos, sin, q_rope, k_rope, seq, n_heads, kv_heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    BACK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0)[None, :]
    if BACK:
        s = -s
    row, slot = token // seq, token % seq
    if tl.program_id(1) == 0:  # a name has one shape in all branches
        head = tl.arange(0, HEADS)
        q_target, q_mask = first_halves(token * n_heads + head, head < n_heads, column, HALF)
        q_source = row * q_batch + slot * q_token + head[:, None] * q_head + column[None, :]
        rotate_pairs(q + q_source, q_rope + q_target, q_mask, c, s, HALF)
    else:
        kv_head = tl.arange(0, KV_HEADS)
        k_target, k_mask = first_halves(token * kv_heads + kv_head, kv_head < kv_heads, column, HALF)
        k_source = row * k_batch + slot * k_token + kv_head[:, None] * k_head + column[None, :]
        rotate_pairs(k + k_source, k_rope + k_target, k_mask, c, s, HALF)

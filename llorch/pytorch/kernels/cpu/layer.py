"""Operations of a layer, except products with weights, on the CPU: each is one pass over its input in `layer.c`.

A decode step has some 25 small torch operations per layer, whose calls cost more than their work. The reference
functions are in `llorch.pytorch.causal_lm`; sums, rotations and exponentials are float32, rounded once.
"""

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.cache import Cache, PassPlacement, Visible
from llorch.pytorch.causal_lm import Context, Heads, Keep

HALF = {torch.float32: 0, torch.bfloat16: 1}  # `half` in the C files: the dtype of inputs and outputs
FEW = 4  # up to this many tokens, attention runs here; more use the fallback


class CpuNorm(nn.Module):
    """Base of kernels of norms with a gain."""

    def __init__(self, weight: Tensor, eps: float, library: ctypes.CDLL) -> None:
        """Take over the gain, in the dtype of the run."""
        super().__init__()
        self.weight, self.eps, self.library = weight, eps, library


class CpuRMSNorm(CpuNorm):
    """Kernel of `llorch.pytorch.causal_lm.rms_norm`."""

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        x, weight = x.contiguous(), self.weight
        y, width = torch.empty_like(x), len(weight)
        sizes = x.numel() // width, width
        self.library.llorch_rms_norm(HALF[x.dtype], x.data_ptr(), weight.data_ptr(), self.eps, y.data_ptr(), *sizes)
        return y


class Compiled:
    """Base of operations in compiled functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Store the compiled library."""
        self.library = library


class CpuRotate(Compiled):
    """Kernel of `llorch.pytorch.causal_lm.rotate_and_cache`."""

    def __call__(
        self, q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
    ) -> tuple[Heads, Context, Context]:
        """Rotate queries and keys, write keys and values to the cache, return queries and the whole context."""
        q, k = keep("q_rope", self.rotate(q, place)), keep("k_rope", self.rotate(k, place))
        self.append(cache.keys[layer], k, place)
        self.append(cache.values[layer], v, place)
        keys, values = cache.context(layer, place)
        return q, keep("k_cache", keys), keep("v_cache", values)

    def rotate(self, x: Heads, place: PassPlacement) -> Heads:
        """Rotate every head by the angle of its token's position."""
        x, cos, sin = x.contiguous(), place.cos.contiguous(), place.sin.contiguous()
        batch, seq, heads, head_dim = x.shape
        y = torch.empty_like(x)
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
        self.library.llorch_rope(HALF[x.dtype], *pointers, batch * seq, heads, cos.shape[-1], head_dim)
        return y

    def append(self, storage: Tensor, heads: Heads, place: PassPlacement) -> None:
        """Write keys or values of new tokens into their slots; a paged cache has one row for all sequences."""
        heads, slots = heads.to(storage.dtype).contiguous(), place.slots.contiguous()
        batch, seq, kv_heads, head_dim = heads.shape
        rows = len(storage)
        sizes = rows, batch * seq // rows, kv_heads, storage.stride(1) // head_dim, head_dim * heads.element_size()
        if self.library.llorch_append(heads.data_ptr(), storage.data_ptr(), slots.data_ptr(), *sizes):
            raise IndexError(f"cache: expected slots from 0 to {storage.shape[2] - 1}, got {slots.tolist()}")


class CpuAttention:
    """Attention in `attention.c`; many tokens use a fallback, such as torch's fused attention."""

    def __init__(self, library: ctypes.CDLL, fallback: Any | None) -> None:
        """Store the library and the fallback; without a fallback, no token depends on other rows."""
        self.library, self.fallback = library, fallback

    def __call__(self, q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
        """Compute softmax(q k^T / sqrt(head_dim)) v without storing scores or probabilities for an observer."""
        batch, seq, heads, head_dim = q.shape
        if self.fallback is not None and batch * seq > FEW:
            return self.fallback(q, keys, values, visible, keep)
        kv_heads, ctx = keys.shape[1:3]
        q, mask = q.contiguous(), None if visible is None else visible.contiguous()
        y = torch.empty_like(q)
        pointers = q.data_ptr(), keys.data_ptr(), values.data_ptr(), None, None if mask is None else mask.data_ptr()
        sizes = batch, seq, heads, kv_heads, ctx, head_dim, *keys.stride()[:2]
        if self.library.llorch_attend(HALF[q.dtype], *pointers, y.data_ptr(), *sizes):
            raise MemoryError(f"attention: cannot allocate memory for the scores of {ctx} tokens")
        return y


class CpuSwiglu(Compiled):
    """Kernel of `llorch.pytorch.causal_lm.swiglu`."""

    def __call__(
        self, gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]
    ) -> Float[Tensor, "*rows inter"]:
        """Compute gate / (1 + exp(-gate)) * up, rounded once."""
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        self.library.llorch_swiglu(HALF[gate.dtype], gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel())
        return y


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's elements; None gives a null pointer."""
    return None if tensor is None else tensor.data_ptr()

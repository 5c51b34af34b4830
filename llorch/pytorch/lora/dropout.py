"""Dropout of adapter inputs by counter-based random numbers, computed where they are needed.

    key of a token      mix(mix(mix(mix(seed) ^ step) ^ sample) ^ slot)     64 bits
    key in a module     mix(key ^ salt)                                     two halves a, b; the salt is of the matrix
    bits of feature j   h = a + j * 0x9E3779B9;  h = (h ^ h >> 16) * 0x85EBCA6B ^ b;  h = (h ^ h >> 13) * 0xC2B2AE35

A feature stays if its bits, as a signed number, reach the threshold of the dropout rate. A mask does not depend on the
other rows of a batch, on padding, on the number of processes or on the device. A recomputed block has the same mask,
and there is no generator state to save. Shifts are logical, products wrap around.

Source: mix is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); the bits are
those of murmur3's finalizer (Appleby 2011), b in its middle, without its last shift, which only changes the lower half.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor, nn

from llorch.runtime.errors import UserError

MASKS = "splitmix64, murmur3"  # recorded in snapshots; a resumed run must have the same
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_STEP32, _FIRST32, _SECOND32 = 0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_TILE, _TILE_CPU = 1 << 24, 1 << 17  # elements whose bits exist at a time; on the CPU they fit the cache


def token_keys(
    samples: Int64[np.ndarray, " batch"], n_slots: int, *, seed: int, step: int
) -> Int64[Tensor, "batch seq"]:
    """Return the keys of a batch's tokens; `samples`: row numbers in the data; `step`: number of the optimizer step."""
    key = _mix(_mix(torch.tensor(seed)) ^ step)
    rows = _mix(key ^ torch.from_numpy(samples))  # (batch,)
    return _mix(rows[:, None] ^ torch.arange(n_slots))


def salt_of(name: str) -> int:
    """Hash the name of a matrix, `layers.0.q_proj`; modules with parts of one matrix drop the same inputs."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def drop_mask(
    keys: Int64[Tensor, "*rows"], share: float, *, salt: int, width: int, first: int = 0
) -> Bool[Tensor, "*rows width"]:
    """Mark the features that dropout leaves of each token at the dropout rate `share`.

    `width` features from index `first`: a tensor-parallel rank has some features of the input.
    """
    module_keys = _mix(keys.flatten() ^ salt)
    a, b = module_keys.to(torch.int32)[:, None], (module_keys >> 32).to(torch.int32)[:, None]  # (rows, 1)
    steps = torch.arange(first, first + width, dtype=torch.int32, device=keys.device) * _STEP32
    threshold = min(round(share * 2**32), 2**32 - 1) - 2**31
    mask = torch.empty(len(a), width, dtype=torch.bool, device=keys.device)
    tile_rows = max(1, (_TILE_CPU if keys.device.type == "cpu" else _TILE) // width)
    for start in range(0, len(a), tile_rows):
        tile = slice(start, start + tile_rows)
        torch.ge(_bits(a[tile] + steps, b[tile]), threshold, out=mask[tile])
    return mask.view(*keys.shape, width)


class DropoutModule(nn.Module):
    """Module that drops some of its inputs in training mode."""

    token_keys: Int64[Tensor, "*rows"] | None = None  # keys of the next input's tokens, see `keyed`
    part = 0  # index of its part, if ranks split the features equally

    def mask_of(self, x: Float[Tensor, "*rows width"], share: float, *, salt: int) -> Bool[Tensor, "*rows width"]:
        """Compute `drop_mask` for an input; refuse to run if the tokens of `x` are unknown."""
        keys = self.token_keys
        if keys is None or keys.shape != x.shape[:-1]:
            current = "none" if keys is None else f"those of {tuple(keys.shape)}"
            raise UserError(
                f"dropout: expected the keys of {tuple(x.shape[:-1])} tokens, got {current}; train inside "
                "llorch.pytorch.lora.dropout.keyed(...), or call eval()"
            )
        width = x.shape[-1]
        return drop_mask(keys, share, salt=salt, width=width, first=self.part * width)


@contextmanager
def keyed(module: nn.Module, keys: Int64[Tensor, "batch seq"]) -> Iterator[None]:
    """Give the dropout keys of a batch's tokens to all forward passes in the block, including recomputation."""
    dropout_modules = [submodule for submodule in module.modules() if isinstance(submodule, DropoutModule)]
    keys = keys.to(next(module.parameters()).device)
    for dropout_module in dropout_modules:
        dropout_module.token_keys = keys
    try:
        yield
    finally:
        for dropout_module in dropout_modules:
            dropout_module.token_keys = None


@contextmanager
def only(module: nn.Module, tokens: Int64[Tensor, " rows"]) -> Iterator[None]:
    """Restrict a module's dropout keys, in this block, to some tokens by their flat index: the loss omits others."""
    if not isinstance(module, DropoutModule) or module.token_keys is None:
        yield
        return
    all_keys = module.token_keys
    module.token_keys = all_keys.flatten()[tokens]
    try:
        yield
    finally:
        module.token_keys = all_keys


def _mix(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Compute splitmix64 of one state."""
    x = x + _STEP
    x = (x ^ _right(x, 30)) * _FIRST
    x = (x ^ _right(x, 27)) * _SECOND
    return x ^ _right(x, 31)


def _bits(h: Int32[Tensor, "rows width"], b: Int32[Tensor, "rows 1"]) -> Int32[Tensor, "rows width"]:
    """Complete the bits of features, by the formula above, in the memory of `h`."""
    h ^= _right(h, 16)
    h *= _FIRST32
    h ^= b
    h ^= _right(h, 13)
    h *= _SECOND32
    return h


def _right(x: Int[Tensor, "*shape"], by: int) -> Int[Tensor, "*shape"]:
    """Shift right logically, with zeros coming in."""
    return (x >> by).bitwise_and_((1 << (torch.iinfo(x.dtype).bits - by)) - 1)

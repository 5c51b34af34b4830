"""The inputs of an adapter that dropout drops: computed where they are needed, from numbers that name them.

    key of a token      mix(mix(mix(mix(seed) ^ step) ^ sample) ^ slot)     64 bits
    key in a module     mix(key ^ salt)                                     two halves a, b; the salt names the matrix
    bits of feature j   h = a + j * 0x9E3779B9;  h = (h ^ h >> 16) * 0x85EBCA6B ^ b;  h = (h ^ h >> 13) * 0xC2B2AE35

and a feature is kept where its bits, as a signed number, reach the threshold of the share. A mask does not depend on
the other rows of a batch, on padding, on the number of processes or on the device; a block that is run again sees the
same one, and no generator has a state that would have to be saved. Shifts are logical, products wrap around.

Source: mix is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); the bits are
those of murmur3's finalizer (Appleby 2011), b in its middle, less its last shift, which changes the lower half only.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor, nn

from llorch.runtime.errors import UserError

MASKS = "splitmix64, murmur3"  # what a run says of them that must have the same ones when it goes on
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_STEP32, _FIRST32, _SECOND32 = 0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_TILE, _TILE_CPU = 1 << 24, 1 << 17  # elements whose bits exist at the same time; on the CPU what a cache holds


def token_keys(
    samples: Int64[np.ndarray, " batch"], n_slots: int, *, seed: int, step: int
) -> Int64[Tensor, "batch seq"]:
    """Name the tokens of a batch: `samples` are the numbers of its rows in the data, `step` that of the optimizer."""
    key = _mix(_mix(torch.tensor(seed)) ^ step)
    rows = _mix(key ^ torch.from_numpy(samples))  # (batch,)
    return _mix(rows[:, None] ^ torch.arange(n_slots))


def salt_of(name: str) -> int:
    """Hash the name of a matrix, `layers.0.q_proj`: modules with parts of it drop the same features of their input."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def drop_mask(
    keys: Int64[Tensor, "*rows"], share: float, *, salt: int, width: int, first: int = 0
) -> Bool[Tensor, "*rows width"]:
    """Say which of `width` features, from the `first` on, dropout leaves of each token."""
    mixed = _mix(keys.flatten() ^ salt)
    a, b = mixed.to(torch.int32)[:, None], (mixed >> 32).to(torch.int32)[:, None]  # (rows, 1)
    steps = torch.arange(first, first + width, dtype=torch.int32, device=keys.device) * _STEP32
    threshold = min(round(share * 2**32), 2**32 - 1) - 2**31
    kept = torch.empty(len(a), width, dtype=torch.bool, device=keys.device)
    at_once = max(1, (_TILE_CPU if keys.device.type == "cpu" else _TILE) // width)
    for start in range(0, len(a), at_once):
        part = slice(start, start + at_once)
        torch.ge(_bits(a[part] + steps, b[part]), threshold, out=kept[part])
    return kept.view(*keys.shape, width)


class Dropping(nn.Module):
    """A module that drops some of its input while it is trained."""

    token_keys: Int64[Tensor, "*rows"] | None = None  # of the tokens that come next, see `keyed`
    part = 0  # which of equal parts of all features it is given

    def mask_of(self, x: Float[Tensor, "*rows width"], share: float, *, salt: int) -> Bool[Tensor, "*rows width"]:
        """See `drop_mask`; refuses to run where it is not known which tokens `x` holds."""
        keys = self.token_keys
        if keys is None or keys.shape != x.shape[:-1]:
            known = "none" if keys is None else f"those of {tuple(keys.shape)}"
            raise UserError(
                f"dropout: expected the keys of {tuple(x.shape[:-1])} tokens, got {known}; train inside "
                "llorch.pytorch.lora.dropout.keyed(...), or call eval()"
            )
        width = x.shape[-1]
        return drop_mask(keys, share, salt=salt, width=width, first=self.part * width)


@contextmanager
def keyed(module: nn.Module, keys: Int64[Tensor, "batch seq"]) -> Iterator[None]:
    """Give the dropout keys of a batch's tokens to the forward passes in the block and to their recomputation."""
    modules = [lora_module for lora_module in module.modules() if isinstance(lora_module, Dropping)]
    keys = keys.to(next(module.parameters()).device)
    for lora_module in modules:
        lora_module.token_keys = keys
    try:
        yield
    finally:
        for lora_module in modules:
            lora_module.token_keys = None


@contextmanager
def only(lora_module: nn.Module, tokens: Int64[Tensor, " rows"]) -> Iterator[None]:
    """Give a module, within this block, some tokens of its batch, by their numbers in all of it."""
    if not isinstance(lora_module, Dropping) or lora_module.token_keys is None:
        yield
        return
    every = lora_module.token_keys
    lora_module.token_keys = every.flatten()[tokens]
    try:
        yield
    finally:
        lora_module.token_keys = every


def _mix(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Compute Splitmix64 from one state."""
    x = x + _STEP
    x = (x ^ _right(x, 30)) * _FIRST
    x = (x ^ _right(x, 27)) * _SECOND
    return x ^ _right(x, 31)


def _bits(h: Int32[Tensor, "rows width"], b: Int32[Tensor, "rows 1"]) -> Int32[Tensor, "rows width"]:
    """Compute the second half of the bits of features, by this module's formula, in the memory of the first half."""
    h ^= _right(h, 16)
    h *= _FIRST32
    h ^= b
    h ^= _right(h, 13)
    h *= _SECOND32
    return h


def _right(x: Int[Tensor, "*shape"], by: int) -> Int[Tensor, "*shape"]:
    """Shift to the right, zeros coming in."""
    return (x >> by).bitwise_and_((1 << (torch.iinfo(x.dtype).bits - by)) - 1)

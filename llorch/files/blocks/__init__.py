"""Decoders of ggml's block types: bytes to float32, with the bits that ggml's C gives.

In comes a `Chunk`, some blocks of one type as a file packs them, one to a row; out goes one float32 for every element,
written into an array of the caller, a block to a row. Nothing is checked here: sizes were when the file was opened,
scales that are not finite give numbers that are not finite, and whoever decodes looks for those.

A type has a function named after it on the page of its kind; the head of the page is its layout, byte by byte. Read
`chunk` first (how bytes and bits of many blocks are moved at once), then `uniform`, floats and the plain types (code
times scale), `super_blocks`, the K types (scales of scales), and `tables` (codes look up a number, or up to eight).

The gguf package decodes the same types to the same bits, and needs 2 to 12 times as long (benchmarks/by_hand.md).
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType

import numpy as np

from llorch.files.blocks import super_blocks, tables, uniform
from llorch.files.blocks.chunk import SCRATCH_BYTES, Chunk

__all__ = ["DECODERS", "SCRATCH_BYTES", "Chunk", "Decoder"]

Decoder = Callable[[Chunk, np.ndarray], None]

_TYPES = {
    uniform: "F32 F16 BF16 F64 Q1_0 Q2_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1 Q8_K TQ2_0",
    super_blocks: "Q2_K Q3_K Q4_K Q5_K Q6_K",
    tables: "IQ4_NL IQ4_XS MXFP4 NVFP4 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S",
}


def _decode(page: ModuleType, name: str, chunk: Chunk, out: np.ndarray) -> None:
    """Decode blocks by the function that has this name in a module now; lesson 13 puts other functions there."""
    getattr(page, f"decode_{name.lower()}")(chunk, out)


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {name: partial(_decode, page, name) for page, names in _TYPES.items() for name in names.split()}
)

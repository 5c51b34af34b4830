"""Decoders of ggml's block types: bytes to float32, bit-identical to ggml's C code.

Input: a `Chunk`, stored blocks of one type, one per row. Output: one float32 per element, written into an array of the
caller, one block per row. Decoders check nothing: sizes were checked at opening. Non-finite scales give non-finite
numbers, which the caller must check.

Each type has a function of its name; the docstring of its module is the byte layout. Read `chunk` first (moves bytes
and bits of many blocks at once), then `uniform` (floats, code times scale), `super_blocks` (K types, scales of scales)
and `tables` (codes look up one number, or up to eight).

The gguf package decodes the same types to the same bits, 2 to 12 times slower (benchmarks/by_hand.md).
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


def _decode(module: ModuleType, name: str, chunk: Chunk, out: np.ndarray) -> None:
    """Decode by the module's current function of this name: `llorch learn` replaces functions in lesson 13."""
    getattr(module, f"decode_{name.lower()}")(chunk, out)


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {name: partial(_decode, module, name) for module, names in _TYPES.items() for name in names.split()}
)

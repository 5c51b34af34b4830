"""Decoders of ggml's block types: bytes to float32, with the bits that ggml's C gives.

Each takes a chunk of blocks and writes into `out` (contiguous float32, one block to a row).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from llorch.files.blocks import floats, grids, super_blocks, tabled, uniform
from llorch.files.blocks.chunk import SCRATCH_BYTES, Chunk

__all__ = ["DECODERS", "SCRATCH_BYTES", "Chunk", "Decoder"]

Decoder = Callable[[Chunk, np.ndarray], None]

DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "F32": floats.decode_f32,
        "F16": floats.decode_f16,
        "BF16": floats.decode_bf16,
        "F64": floats.decode_f64,
        "Q1_0": uniform.decode_q1_0,
        "Q2_0": uniform.decode_q2_0,
        "Q4_0": uniform.decode_q4_0,
        "Q4_1": uniform.decode_q4_1,
        "Q5_0": uniform.decode_q5_0,
        "Q5_1": uniform.decode_q5_1,
        "Q8_0": uniform.decode_q8_0,
        "Q8_1": uniform.decode_q8_1,
        "Q8_K": uniform.decode_q8_k,
        "TQ2_0": uniform.decode_tq2_0,
        "Q2_K": super_blocks.decode_q2_k,
        "Q3_K": super_blocks.decode_q3_k,
        "Q4_K": super_blocks.decode_q4_k,
        "Q5_K": super_blocks.decode_q5_k,
        "Q6_K": super_blocks.decode_q6_k,
        "IQ4_NL": tabled.decode_iq4_nl,
        "IQ4_XS": tabled.decode_iq4_xs,
        "MXFP4": tabled.decode_mxfp4,
        "IQ1_S": grids.decode_iq1_s,
        "IQ1_M": grids.decode_iq1_m,
        "IQ2_XXS": grids.decode_iq2_xxs,
        "IQ2_XS": grids.decode_iq2_xs,
        "IQ2_S": grids.decode_iq2_s,
        "IQ3_XXS": grids.decode_iq3_xxs,
        "IQ3_S": grids.decode_iq3_s,
        "NVFP4": tabled.decode_nvfp4,
    }
)

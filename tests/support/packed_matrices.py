"""Random packed matrices for the tests of what multiplies with them."""

import numpy as np
import torch

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.pytorch.packing import pack
from llorch.verify.suites.quantised_models import random_blocks


def raw_matrix(ggml_type: GGMLType, n_out: int, n_in: int) -> np.ndarray:
    """Blocks of random codes with scales of a usual size, one row per row."""
    blocks = random_blocks(ggml_type, n_out * n_in // BLOCK_SIZES[ggml_type][0], key=f"{ggml_type.name} {n_out}")
    return blocks.reshape(n_out, -1)


def packed_matrix(ggml_type: GGMLType, n_out: int, n_in: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return pack(torch.from_numpy(raw_matrix(ggml_type, n_out, n_in)).to(device), ggml_type)


def activations(rows: int, n_in: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, n_in))).to(device, dtype)

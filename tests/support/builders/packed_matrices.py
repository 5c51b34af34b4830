"""Random packed matrices for the tests of what multiplies with them."""

import numpy as np
import torch

from builders.table_matrices import TABLES, table_matrix
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.fields import Table
from llorch.judging.expectations.quantised_models import random_blocks
from llorch.pytorch.kernels.packing import pack
from llorch.pytorch.stored_kinds import pack_stored


def raw_matrix(ggml_type: GGMLType, n_out: int, n_in: int) -> np.ndarray:
    """Blocks of random codes with scales of a usual size, one row per row."""
    blocks = random_blocks(ggml_type, n_out * n_in // BLOCK_SIZES[ggml_type][0], key=f"{ggml_type.name} {n_out}")
    return blocks.reshape(n_out, -1)


def packed_matrix(ggml_type: GGMLType, n_out: int, n_in: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return pack(torch.from_numpy(raw_matrix(ggml_type, n_out, n_in)).to(device), ggml_type)


def packed_table(name: str, n_out: int, n_in: int, device: str = "cpu") -> tuple[dict[str, torch.Tensor], Table]:
    """Fields of `table_matrix`."""
    table = TABLES[name][0]
    fields = pack_stored(table_matrix(name, n_out, n_in), table)
    return {field: tensor.to(device) for field, tensor in fields.items()}, table


def activations(rows: int, n_in: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, n_in))).to(device, dtype)

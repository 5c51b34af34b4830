"""Random packed matrices for the tests of what multiplies with them."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.codes import E2M1, E4M3, INT8, integers
from llorch.judging.expectations.quantised_models import random_blocks
from llorch.pytorch.kernels.packing import Table, join_four_bits, pack


def raw_matrix(ggml_type: GGMLType, n_out: int, n_in: int) -> np.ndarray:
    """Blocks of random codes with scales of a usual size, one row per row."""
    blocks = random_blocks(ggml_type, n_out * n_in // BLOCK_SIZES[ggml_type][0], key=f"{ggml_type.name} {n_out}")
    return blocks.reshape(n_out, -1)


def packed_matrix(ggml_type: GGMLType, n_out: int, n_in: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return pack(torch.from_numpy(raw_matrix(ggml_type, n_out, n_in)).to(device), ggml_type)


TABLES: Mapping[str, tuple[Table, int, str]] = MappingProxyType(
    {
        "AWQ": (Table("TABLE_4", integers(4).tobytes(), has_zeros=True), 128, "zero"),
        "W4 asym": (Table("TABLE_4", integers(4, offset=8).tobytes(), has_zeros=True), 96, "zero"),
        "W4 asym, 16": (Table("TABLE_4", integers(4).tobytes(), has_zeros=True), 16, "zero"),
        "MLX 4, 16": (Table("TABLE_4", integers(4).tobytes()), 16, "minimum"),
        "MLX 4": (Table("TABLE_4", integers(4).tobytes()), 32, "minimum"),
        "NF4": (Table("TABLE_4", np.linspace(-1, 1.1, 16, dtype=np.float32).tobytes()), 64, ""),
        "NVFP4": (Table("TABLE_4", E2M1.tobytes(), divisor=0.3), 16, ""),
        "GPTQ 8": (Table("TABLE_8", integers(8, offset=128).tobytes()), 96, ""),
        "MLX 8": (Table("TABLE_8", integers(8).tobytes()), 64, "minimum"),
        "MX 8": (Table("TABLE_8", E4M3.tobytes()), 16, ""),
        "FP8": (Table("TABLE_8", E4M3.tobytes(), factor=3.0), 0, ""),
        "INT8": (Table("TABLE_8", INT8.tobytes(), factor=0.1), 0, ""),
        "E2M1": (Table("TABLE_4", E2M1.tobytes(), has_zeros=True), 32, "zero"),
        "AWQ 8": (Table("TABLE_8", integers(8).tobytes(), has_zeros=True), 64, "zero"),
        "W8 asym": (Table("TABLE_8", INT8.tobytes(), has_zeros=True), 0, "zero"),
        "any 8": (Table("TABLE_8", np.geomspace(1e-3, 9, 256, dtype=np.float32).tobytes(), has_zeros=True), 32, "zero"),
    }
)  # by the format that has such a matrix; columns of a scale, 0: all; the field of offsets


def packed_table(name: str, n_out: int, n_in: int, device: str = "cpu") -> tuple[dict[str, torch.Tensor], Table]:
    """Random codes; scales and offsets are random float32 numbers, which no step multiplies exactly.

    Zero points of integers of four bits are integers, as in every format.
    """
    (table, group, offset), rng = TABLES[name], np.random.default_rng(n_out * n_in)
    codes = torch.from_numpy(rng.integers(0, 16 if table.name == "TABLE_4" else 256, (n_out, n_in), dtype=np.uint8))
    if table.values == E4M3.tobytes():
        codes[codes % 128 == 127] = 0  # no numbers
    scales = (n_out, n_in // (group or n_in))
    fields = {"codes": join_four_bits(codes) if table.name == "TABLE_4" else codes}
    fields["d"] = torch.from_numpy(rng.uniform(-0.02, 0.02, scales).astype(np.float32))
    if offset:
        fields[offset] = torch.from_numpy(rng.uniform(0, 16 if offset == "zero" else 0.3, scales).astype(np.float32))
    if name in ("AWQ", "W4 asym", "W4 asym, 16"):
        first = np.frombuffer(table.values, np.float32)[0]
        fields["zero"] = torch.from_numpy(rng.integers(0, 17, scales).astype(np.float32) + first)
    return {field: tensor.to(device) for field, tensor in fields.items()}, table


def activations(rows: int, n_in: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, n_in))).to(device, dtype)

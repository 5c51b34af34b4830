"""Random matrices of quantised folders, one for each kind of table that kernels multiply."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llorch.files.packed import Scheme
from llorch.files.quantised.codes import E2M1, E4M3, INT8, integers
from llorch.files.quantised.fields import Table
from llorch.files.quantised.matrix import QuantisedMatrix, Reader, Recipe, StoredPart, Unpacker

TABLES: Mapping[str, tuple[Table, int, str]] = MappingProxyType(
    {
        "AWQ": (Table("TABLE_4", integers(4).tobytes(), has_zeros=True), 128, "zero"),
        "W4 asym": (Table("TABLE_4", integers(4, offset=8).tobytes(), has_zeros=True), 96, "zero"),
        "W4 asym, 16": (Table("TABLE_4", integers(4).tobytes(), has_zeros=True), 16, "zero"),
        "MLX 4, 16": (Table("TABLE_4", integers(4).tobytes()), 16, "minimum"),
        "MLX 4": (Table("TABLE_4", integers(4).tobytes()), 32, "minimum"),
        "NF4": (Table("TABLE_4", np.linspace(-1, 1.1, 16, dtype=np.float32).tobytes()), 64, ""),
        "NVFP4": (Table("TABLE_4", E2M1.tobytes(), divisor=float(np.float32(0.3))), 16, ""),
        "GPTQ 8": (Table("TABLE_8", integers(8, offset=128).tobytes()), 96, ""),
        "MLX 8": (Table("TABLE_8", integers(8).tobytes()), 64, "minimum"),
        "MX 8": (Table("TABLE_8", E4M3.tobytes()), 16, ""),
        "FP8": (Table("TABLE_8", E4M3.tobytes(), factor=3.0), 0, ""),
        "INT8": (Table("TABLE_8", INT8.tobytes(), factor=float(np.float32(0.1))), 0, ""),
        "E2M1": (Table("TABLE_4", E2M1.tobytes(), has_zeros=True), 32, "zero"),
        "AWQ 8": (Table("TABLE_8", integers(8).tobytes(), has_zeros=True), 64, "zero"),
        "W8 asym": (Table("TABLE_8", INT8.tobytes(), has_zeros=True), 0, "zero"),
        "any 8": (Table("TABLE_8", np.geomspace(1e-3, 9, 256, dtype=np.float32).tobytes(), has_zeros=True), 32, "zero"),
    }
)  # by the format that has such a matrix; columns of a scale, 0: all; the field of offsets


def table_matrix(name: str, n_out: int, n_in: int) -> QuantisedMatrix:
    """Random codes; scales and offsets are random float32 numbers, which no step multiplies exactly.

    Zero points of integers of four bits are integers, as in every format.
    """
    (table, group, offset), rng = TABLES[name], np.random.default_rng(n_out * n_in)
    bits = 4 if table.name == "TABLE_4" else 8
    codes = rng.integers(0, 1 << bits, (n_out, n_in), dtype=np.uint8)
    if table.values == E4M3.tobytes():
        codes[codes % 128 == 127] = 0  # no numbers
    raw = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    scales = (n_out, n_in // (group or n_in))
    d = rng.uniform(-0.02, 0.02, scales).astype(np.float32)
    offsets = rng.uniform(0, 16 if offset == "zero" else 0.3, scales).astype(np.float32)
    if name in ("AWQ", "W4 asym", "W4 asym, 16"):
        offsets = rng.integers(0, 17, scales).astype(np.float32) + table.numbers[0]
    recipe = Recipe(
        codes=Unpacker("codes", bits, (n_out, n_in)),
        values=table.numbers,
        scale=reader(d),
        zero=reader(offsets) if offset == "zero" else None,
        minimum=reader(offsets) if offset == "minimum" else None,
        factor=None if table.factor is None else np.float32(table.factor),
        divisor=None if table.divisor is None else lambda parts, rows: np.full((1, 1), table.divisor, np.float32),
        group=group or n_in,
    )
    part = StoredPart("w.codes", "U8", raw.shape, raw.reshape(-1))
    return QuantisedMatrix("w", Path("model.safetensors"), part.raw, Scheme(name), codes.shape, {"codes": part}, recipe)


def reader(numbers: np.ndarray) -> Reader:
    return lambda parts, rows: numbers[rows]

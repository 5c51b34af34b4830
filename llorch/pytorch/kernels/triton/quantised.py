"""Products with packed matrices on CUDA: selection of a kernel by the number of rows, and kernels that decode tiles.

    rows      method                                       limited by
    1         directly from the blocks, no tensor cores    packed bytes; see `quantised_matvec`
    2 .. 64   tiles decoded for the tensor cores           decoding
    more      decoded once into scratch, then the library  the matrix product

Two rows times a `Table`, or in float32, are computed directly from the blocks. A `Table` whose numbers are looked up or
divided does not use tiles: for 16 rows times 14336 x 4096 of NF4 on an H100 tiles take 370 us, and the library 110 us.
Float32, which tensor cores do not support, uses the library from 33 rows on, because tiles would be decoded twice.
Float64 uses the reference.

Tiles read only packed bytes from memory; sums are float32, and float32 inputs are multiplied without TF32. For many
rows, a matrix is decoded once into scratch memory and multiplied by the library. Decoding has a fixed time per weight,
which many rows make small. Tiles would be decoded again for every tile of rows, which takes two to four times as long
as the library at 512 rows, measured on an H100.

Training has many rows, and its gradients use the same method in reverse.

Decoded numbers have the bits of the reference, `kernels.packing.decode`: products and differences are not fused.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from llorch.files.quantised.fields import Table
from llorch.pytorch.kernels.packing import Fields, Kind, width
from llorch.pytorch.kernels.quantised_linear import (
    Multiply,
    Tiles,
    multiply_by_tiles,
    multiply_tiles,
    multiply_tiles_back,
    tiles,
)
from llorch.pytorch.kernels.triton.quantised_matvec import (
    RUN,
    arguments,
    is_slow_to_decode,
    load_eight_bits,
    load_half,
    load_numbers,
    load_twelve_bits,
    multiply_few_rows,
    rules,
)

_TILE = (64, 4)  # rows of the matrix, runs of each row
_TILE_FLOAT32 = (32, 1)  # no tensor cores: sums and tile of a thread must fit its registers
_TILE_WRITTEN = (16, 8)  # of `decode_to`


def multiply_by_decoded_tiles(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, rounded once, for contiguous `x` of any dtype but float64."""
    n_rows, n_out = len(x), len(fields["codes"])
    y = x.new_empty(n_rows, n_out)
    n_tile, runs = _TILE_FLOAT32 if x.dtype is torch.float32 else _TILE
    rows = 16 if n_rows <= 16 else 32 if n_rows <= 32 or x.dtype is torch.float32 else 64
    launch: Any = _multiply[(triton.cdiv(n_out, n_tile), triton.cdiv(n_rows, rows))]
    launch(
        x, y, y if bias is None else bias, *arguments(fields, ggml_type), n_rows, n_out, x.shape[1] // RUN,
        KIND=ggml_type.name, **rules(fields, ggml_type), BIAS=bias is not None, M=rows, ROWS=n_tile, RUNS=runs,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def decode_to(fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Decode a matrix, or some rows, to new memory: the numbers of `kernels.packing.decode`, rounded to `dtype`."""
    n_out, n_in = len(fields["codes"]), width(fields, ggml_type)
    out = torch.empty(n_out, n_in, dtype=dtype, device=fields["codes"].device)
    n_tile, runs = _TILE_WRITTEN
    launch: Any = _write[(triton.cdiv(n_out, n_tile), triton.cdiv(n_in, runs * RUN))]
    launch(
        out, *arguments(fields, ggml_type), n_out, n_in // RUN,
        KIND=ggml_type.name, **rules(fields, ggml_type), ROWS=n_tile, RUNS=runs, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _multiply(
    x, y, bias, codes, upper, scales, d, dmin, n_rows, n_out, n_runs,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Multiply `M` rows of x by a tile of `ROWS` rows of a packed matrix, decoded `RUNS` runs at a time."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((M, ROWS), tl.float32)
    for first in range(0, n_runs, RUNS):
        column = first * 32 + tl.arange(0, RUNS * 32)
        mask = (m < n_rows)[:, None] & (column < n_runs * 32)[None, :]
        inputs = tl.load(x + m[:, None] * (n_runs * 32) + column[None, :], mask=mask, other=0)
        run = first + tl.arange(0, RUNS)
        tile = _decode_tile(
            codes, upper, scales, d, dmin, row, run, n_out, n_runs,
            KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR, ROWS, RUNS,
        )  # fmt: skip
        sums = tl.dot(inputs, tile.to(inputs.dtype).T, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + row, mask=row < n_out, other=0).to(tl.float32)[None, :]
    mask = (m < n_rows)[:, None] & (row < n_out)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * n_out + row[None, :], sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _write(
    out, codes, upper, scales, d, dmin, n_out, n_runs,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a packed matrix to `out`."""
    row, run = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    tile = _decode_tile(
        codes, upper, scales, d, dmin, row, run, n_out, n_runs, KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR, ROWS, RUNS
    )
    column = tl.program_id(1) * RUNS * 32 + tl.arange(0, RUNS * 32)
    mask = (row < n_out)[:, None] & (column < n_runs * 32)[None, :]
    offsets = row[:, None].to(tl.int64) * (n_runs * 32) + column[None, :]
    tl.store(out + offsets, tile.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _decode_tile(
    codes, upper, scales, d, dmin, row, run, n_out, n_runs,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Decode some runs of some rows to float32, (ROWS, RUNS * 32)."""
    row, run = row[:, None], run[None, :]
    mask = (row < n_out) & (run < n_runs)
    if KIND == "TABLE_4" or KIND == "TABLE_8":
        tile = _decode_table(codes, scales, d, dmin, row, run, n_runs, mask, KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR)
        return tl.reshape(tile, (ROWS, RUNS * 32))
    if KIND == "Q8_0":
        index = (row.to(tl.int64) * (n_runs * 32) + run * 32)[:, :, None] + tl.arange(0, 32)[None, None, :]
        code = tl.load(codes + index, mask=mask[:, :, None], other=0)
        return tl.reshape(code.to(tl.float32) * load_half(d, row, run, n_runs, mask)[:, :, None], (ROWS, RUNS * 32))
    code = _load_parts(codes, row, run, n_runs, mask, 4)  # (ROWS, RUNS, 8, 4)
    if KIND == "Q4_0":
        tile = (code - 8).to(tl.float32) * load_half(d, row, run, n_runs, mask)[:, :, None, None]
    elif KIND == "Q4_K":
        scale, minimum = load_twelve_bits(scales, d, dmin, row, run, n_runs, mask)
        tile = code.to(tl.float32) * scale[:, :, None, None] - minimum[:, :, None, None]
    else:
        code = (code | _load_parts(upper, row, run, n_runs, mask, 2) << 4) - 32
        scale = _load_part_scales(scales, d, row, run, n_runs, mask)
        tile = code.to(tl.float32) * scale[:, :, :, None]
    return tl.reshape(tile, (ROWS, RUNS * 32))


@triton.jit
@no_type_check
def _decode_table(
    codes, table, d, offsets, row, run, n_runs, mask,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr,
):  # fmt: skip
    """Decode some runs of a table, (rows, runs, PARTS, elements); the steps are those of `kernels.packing.decode`."""
    SIZE: tl.constexpr = 16 if KIND == "TABLE_4" else 256
    PARTS: tl.constexpr = 8 if KIND == "TABLE_4" else 1 if GROUP % 32 == 0 else 2
    SCALES: tl.constexpr = 1 if GROUP % 32 == 0 else PARTS  # per run
    first = run[:, :, None] * 32 + 32 // SCALES * tl.arange(0, SCALES)[None, None, :]
    index = row.to(tl.int64)[:, :, None] * (n_runs * 32 // GROUP) + first // GROUP
    scale = tl.load(d + index, mask=mask[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    if KIND == "TABLE_4":
        code = _load_parts(codes, row, run, n_runs, mask, 4)
    else:
        code = _load_byte_parts(codes, row, run, n_runs, mask, PARTS)
    numbers = load_numbers(code, table, WAY)
    if WAY == "EVEN":
        numbers += tl.load(table)
    if OFFSET == "zero":
        numbers -= tl.load(offsets + index, mask=mask[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    numbers *= scale
    if OFFSET == "minimum":
        numbers += tl.load(offsets + index, mask=mask[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    if FACTOR:
        numbers *= tl.load(table + SIZE)
    if DIVISOR:
        numbers = tl.div_rn(numbers, tl.load(table + SIZE + 1))
    return numbers


@triton.jit
@no_type_check
def _load_byte_parts(codes, row, run, n_runs, mask, PARTS: tl.constexpr):
    """Load the bytes of each run in equal parts, (rows, runs, PARTS, 32 / PARTS)."""
    SIZE: tl.constexpr = 32 // PARTS
    index = (row.to(tl.int64) * (n_runs * 32) + run * 32)[:, :, None] + SIZE * tl.arange(0, PARTS)[None, None, :]
    index = index[:, :, :, None] + tl.arange(0, SIZE)[None, None, None, :]
    return tl.load(codes + index, mask=mask[:, :, None, None], other=0).to(tl.int32)


@triton.jit
@no_type_check
def _load_parts(words, row, run, n_runs, mask, BITS: tl.constexpr):
    """Unpack the eight parts of each run's four words: (rows, runs, part, word), the order of the elements."""
    index = (row * (n_runs * 4) + run * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    word = tl.load(words + index, mask=mask[:, :, None], other=0).to(tl.int32)
    shift = BITS * tl.arange(0, 8)[None, None, :, None]
    return word[:, :, None, :] >> shift & (1 << BITS) - 1


@triton.jit
@no_type_check
def _load_part_scales(scales, d, row, run, n_runs, mask):
    """Load the Q6_K scale of each of the eight parts of each run: (rows, runs, part)."""
    first = load_eight_bits(scales, d, row, run, n_runs, mask, 0)[:, :, None]
    second = load_eight_bits(scales, d, row, run, n_runs, mask, 1)[:, :, None]
    return tl.where(tl.arange(0, 8)[None, None, :] < 4, first, second)


FEW = 2  # maximum rows of `multiply_few_rows`, for tables and float32
MAX_TILE_ROWS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
SCRATCH = 1 << 26  # elements: 128 MiB in half precision, more than a matrix inside a layer of an 8B model


def multiply(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias in the dtype of `x`, by the method for this number of rows."""
    return fastest_way(len(x), x.dtype, ggml_type)(x.contiguous(), fields, ggml_type, bias)


def fastest_way(n_rows: int, dtype: torch.dtype, ggml_type: Kind) -> Multiply:
    """Select the function that multiplies a number of rows; see the table in the module docstring."""
    is_table = isinstance(ggml_type, Table)
    if dtype is torch.float64:
        return multiply_by_tiles
    if n_rows <= (FEW if is_table or dtype is torch.float32 else 1):
        return multiply_few_rows
    if n_rows <= MAX_TILE_ROWS[dtype] and not (is_table and is_slow_to_decode(ggml_type)):
        return multiply_by_decoded_tiles
    return multiply_by_library


def multiply_by_library(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias from matrices in scratch memory, for any number of rows."""
    return multiply_tiles(x, _scratch_tiles(fields, ggml_type, x.dtype), len(fields["codes"]), bias)


def back_by_library(grad: Float[Tensor, "rows out"], fields: Fields, ggml_type: Kind) -> Float[Tensor, "rows in"]:
    """Compute grad @ decode(fields), the gradient of the input."""
    return multiply_tiles_back(grad, _scratch_tiles(fields, ggml_type, grad.dtype))


def _scratch_tiles(fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> Tiles:
    """Decode a matrix in parts that fit the scratch memory."""
    return tiles(fields, ggml_type, dtype, size=SCRATCH, decode_to=decode_to)

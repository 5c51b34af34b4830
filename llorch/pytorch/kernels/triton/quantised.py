"""Products with packed matrices on CUDA: which kernel makes them, by the number of rows, and those that decode tiles.

    rows      way                                          what bounds it
    1         straight from the blocks, no tensor cores    packed bytes; see `quantised_matvec`
    2 .. 64   tiles decoded where tensor cores read them   decoding
    more      decoded once into scratch, then the library  the matrix product

Two rows times a `Table`, or in float32, go straight from the blocks. A `Table` whose numbers are looked up or divided
has no tiles: for 16 rows times 14336 x 4096 of NF4 on an H100 they take 370 us, and the library 110. Float32, which
tensor cores do not take, goes to the library from 33 rows on, where tiles would be decoded twice. Float64 has the plain
way.

Tiles: only packed bytes come from memory; sums are float32, and float32 inputs are multiplied without TF32. Many rows:
a matrix is decoded once into scratch memory and multiplied by the library. The time of that is a fixed one for each
weight, which many rows make small; a kernel that decodes would do it again for every tile of rows, and takes two to
four times as long as the library at 512 rows, as measured on an H100.

Training has many rows, and its gradients go the way of many rows in reverse.

Decoded numbers have the bits of the reference, `kernels.packing.decode`: products and differences are not fused.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from llorch.pytorch.kernels.packing import Fields, Kind, Table, width
from llorch.pytorch.kernels.quantised_linear import Multiply, multiply_by_tiles
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

_TILE = (64, 4)  # rows of the matrix and runs of each
_TILE_FLOAT32 = (32, 1)  # no tensor cores: the sums of a thread and its part of the tile have to fit its registers
_TILE_WRITTEN = (16, 8)


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
    """Decode a matrix, or some rows, into new memory: the numbers of `kernels.packing.decode`, rounded to `dtype`."""
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
    m = tl.program_id(1) * M + tl.arange(0, M)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((M, ROWS), tl.float32)
    for first in range(0, n_runs, RUNS):
        column = first * 32 + tl.arange(0, RUNS * 32)
        there = (m < n_rows)[:, None] & (column < n_runs * 32)[None, :]
        inputs = tl.load(x + m[:, None] * (n_runs * 32) + column[None, :], mask=there, other=0)
        run = first + tl.arange(0, RUNS)
        tile = _decoded(
            codes, upper, scales, d, dmin, row, run, n_out, n_runs,
            KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR, ROWS, RUNS,
        )  # fmt: skip
        sums = tl.dot(inputs, tile.to(inputs.dtype).T, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + row, mask=row < n_out, other=0).to(tl.float32)[None, :]
    there = (m < n_rows)[:, None] & (row < n_out)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * n_out + row[None, :], sums.to(y.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _write(
    out, codes, upper, scales, d, dmin, n_out, n_runs,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a packed matrix to `out`."""
    row, run = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    tile = _decoded(
        codes, upper, scales, d, dmin, row, run, n_out, n_runs, KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR, ROWS, RUNS
    )
    column = tl.program_id(1) * RUNS * 32 + tl.arange(0, RUNS * 32)
    there = (row < n_out)[:, None] & (column < n_runs * 32)[None, :]
    at = row[:, None].to(tl.int64) * (n_runs * 32) + column[None, :]
    tl.store(out + at, tile.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _decoded(
    codes, upper, scales, d, dmin, row, run, n_out, n_runs,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Decode some runs of some rows to float32, (ROWS, RUNS * 32)."""
    row, run = row[:, None], run[None, :]
    there = (row < n_out) & (run < n_runs)
    if KIND == "TABLE_4" or KIND == "TABLE_8":
        values = _decode_table(
            codes, scales, d, dmin, row, run, n_runs, there, KIND, WAY, GROUP, OFFSET, FACTOR, DIVISOR
        )
        return tl.reshape(values, (ROWS, RUNS * 32))
    if KIND == "Q8_0":
        at = (row.to(tl.int64) * (n_runs * 32) + run * 32)[:, :, None] + tl.arange(0, 32)[None, None, :]
        code = tl.load(codes + at, mask=there[:, :, None], other=0)
        return tl.reshape(code.to(tl.float32) * load_half(d, row, run, n_runs, there)[:, :, None], (ROWS, RUNS * 32))
    code = _parts(codes, row, run, n_runs, there, 4)  # (ROWS, RUNS, 8, 4)
    if KIND == "Q4_0":
        values = (code - 8).to(tl.float32) * load_half(d, row, run, n_runs, there)[:, :, None, None]
    elif KIND == "Q4_K":
        scale, minimum = load_twelve_bits(scales, d, dmin, row, run, n_runs, there)
        values = code.to(tl.float32) * scale[:, :, None, None] - minimum[:, :, None, None]
    else:
        code = (code | _parts(upper, row, run, n_runs, there, 2) << 4) - 32
        scale = _scales_of_parts(scales, d, row, run, n_runs, there)
        values = code.to(tl.float32) * scale[:, :, :, None]
    return tl.reshape(values, (ROWS, RUNS * 32))


@triton.jit
@no_type_check
def _decode_table(
    codes, table, d, offsets, row, run, n_runs, there,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr,
):  # fmt: skip
    """Decode some runs of a table, (rows, runs, PARTS, elements); the steps are those of `kernels.packing.decode`."""
    SIZE: tl.constexpr = 16 if KIND == "TABLE_4" else 256
    PARTS: tl.constexpr = 8 if KIND == "TABLE_4" else 1 if GROUP % 32 == 0 else 2
    SCALES: tl.constexpr = 1 if GROUP % 32 == 0 else PARTS  # of a run
    first = run[:, :, None] * 32 + 32 // SCALES * tl.arange(0, SCALES)[None, None, :]
    at = row.to(tl.int64)[:, :, None] * (n_runs * 32 // GROUP) + first // GROUP
    scale = tl.load(d + at, mask=there[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    if KIND == "TABLE_4":
        code = _parts(codes, row, run, n_runs, there, 4)
    else:
        code = _bytes(codes, row, run, n_runs, there, PARTS)
    numbers = load_numbers(code, table, WAY)
    if WAY == "EVEN":
        numbers += tl.load(table)
    if OFFSET == "zero":
        numbers -= tl.load(offsets + at, mask=there[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    numbers *= scale
    if OFFSET == "minimum":
        numbers += tl.load(offsets + at, mask=there[:, :, None], other=0).to(tl.float32)[:, :, :, None]
    if FACTOR:
        numbers *= tl.load(table + SIZE)
    if DIVISOR:
        numbers = tl.div_rn(numbers, tl.load(table + SIZE + 1))
    return numbers


@triton.jit
@no_type_check
def _bytes(codes, row, run, n_runs, there, PARTS: tl.constexpr):
    """Load the bytes of each run in equal parts, (rows, runs, PARTS, 32 / PARTS)."""
    SIZE: tl.constexpr = 32 // PARTS
    at = (row.to(tl.int64) * (n_runs * 32) + run * 32)[:, :, None] + SIZE * tl.arange(0, PARTS)[None, None, :]
    at = at[:, :, :, None] + tl.arange(0, SIZE)[None, None, None, :]
    return tl.load(codes + at, mask=there[:, :, None, None], other=0).to(tl.int32)


@triton.jit
@no_type_check
def _parts(words, row, run, n_runs, there, BITS: tl.constexpr):
    """Unpack the eight parts of each run's four words: (rows, runs, part, word), the order of the elements."""
    at = (row * (n_runs * 4) + run * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    word = tl.load(words + at, mask=there[:, :, None], other=0).to(tl.int32)
    shift = BITS * tl.arange(0, 8)[None, None, :, None]
    return word[:, :, None, :] >> shift & (1 << BITS) - 1


@triton.jit
@no_type_check
def _scales_of_parts(scales, d, row, run, n_runs, there):
    """Scale of Q6_K for each of the eight parts of each run: (rows, runs, part)."""
    first = load_eight_bits(scales, d, row, run, n_runs, there, 0)[:, :, None]
    second = load_eight_bits(scales, d, row, run, n_runs, there, 1)[:, :, None]
    return tl.where(tl.arange(0, 8)[None, None, :] < 4, first, second)


FEW = 2  # rows
SOME = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
SCRATCH = 1 << 26  # elements: 128 MiB in half precision, more than a matrix inside a layer of an 8B model


def multiply(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, in the dtype of `x`."""
    return fastest_way(len(x), x.dtype, ggml_type)(x.contiguous(), fields, ggml_type, bias)


def fastest_way(n_rows: int, dtype: torch.dtype, ggml_type: Kind) -> Multiply:
    """Choose the function that multiplies a number of rows; see the table above."""
    is_table = isinstance(ggml_type, Table)
    if dtype is torch.float64:
        return multiply_by_tiles
    if n_rows <= (FEW if is_table or dtype is torch.float32 else 1):
        return multiply_few_rows
    if n_rows <= SOME[dtype] and not (is_table and is_slow_to_decode(ggml_type)):
        return multiply_by_decoded_tiles
    return multiply_by_library


def multiply_by_library(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias from matrices in scratch memory, whatever the number of rows."""
    if _fits(fields, ggml_type):
        return linear(x, decode_to(fields, ggml_type, x.dtype), bias)
    y = x.new_empty(len(x), len(fields["codes"]))
    for part, some in _row_parts(fields, ggml_type):
        y[:, part] = linear(x, decode_to(some, ggml_type, x.dtype), None if bias is None else bias[part])
    return y


def back_by_library(grad: Float[Tensor, "rows out"], fields: Fields, ggml_type: Kind) -> Float[Tensor, "rows in"]:
    """Compute grad @ decode(fields), the gradient of a product's input; parts are summed in float32."""
    if _fits(fields, ggml_type):
        return grad @ decode_to(fields, ggml_type, grad.dtype)
    total = grad.new_zeros(len(grad), width(fields, ggml_type), dtype=torch.float32)
    for part, some in _row_parts(fields, ggml_type):
        total += grad[:, part] @ decode_to(some, ggml_type, grad.dtype)
    return total.to(grad.dtype)


def _fits(fields: Fields, ggml_type: Kind) -> bool:
    """Tell if the decoded matrix fits the scratch memory."""
    return len(fields["codes"]) * width(fields, ggml_type) <= SCRATCH


def _row_parts(fields: Fields, ggml_type: Kind) -> Iterator[tuple[slice, Fields]]:
    """Cut a matrix into parts that fit into scratch memory: which rows, and their fields."""
    step = max(1, SCRATCH // width(fields, ggml_type))
    for start in range(0, len(fields["codes"]), step):
        part = slice(start, start + step)
        yield part, {name: field[part] for name, field in fields.items()}

"""A few rows of activations times a packed matrix, straight from its blocks: what decoding a token consists of.

A program takes some rows of the matrix and all of their columns. So no sum is split between programs, which would need
a second kernel to add up; its order depends on the shapes alone. A thread loads 16 bytes of codes of each of its rows
and uses the same inputs for all. With w = scale * (code - offset) - minimum for a run of elements,

    sum(w * x) = scale * (sum(code * x) - offset * sum(x)) - minimum * sum(x)

so that a weight of four bits costs a mask, a conversion and a multiply-add. The mask leaves code j of a word in place,
16^j times too large: the inputs are divided by that, which is exact. All sums are float32.

The twin is `llorch.pytorch.quantised_linear.multiply_by_tiles`. What fields hold is told in `llorch.pytorch.packing`;
in what reads them, `row` and `run` (32 elements of a row) are tensors that broadcast to the result, which `there`
masks.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from llorch.files.quant import GGMLType
from llorch.pytorch.packing import Fields

RUN = 32


def pointers(fields: Fields) -> list[Tensor]:
    """What every kernel is given, in this order: codes, upper, scales, d, dmin.

    Codes of four bits are handed over as 32-bit words and their upper bits as 16-bit ones; a field that the type lacks
    is any other one, and is never read.
    """
    codes = fields["codes"]
    words = codes.view(torch.int32) if codes.dtype is torch.uint8 else codes
    upper = fields["upper"].view(torch.int16) if "upper" in fields else words
    d = fields["d"]
    return [words, upper, fields.get("scales", words), d, fields.get("dmin", d)]


@triton.jit
@no_type_check
def load_half(d, row, block, n_blocks, there):
    """A float16 of each block, as float32."""
    return tl.load(d + row * n_blocks + block, mask=there, other=0).to(tl.float32)


@triton.jit
@no_type_check
def load_twelve_bits(scales, d, dmin, row, run, n_runs, there):
    """Scale and minimum of each run of Q4_K, as float32: two neighbouring bytes hold the twelve bits."""
    at = scales + row * (n_runs // 2 * 3) + run // 2 * 3 + run % 2
    low = tl.load(at, mask=there, other=0).to(tl.int32)
    high = tl.load(at + 1, mask=there, other=0).to(tl.int32)
    both = (low | high << 8) >> run % 2 * 4
    scale = (both & 63).to(tl.float32) * load_half(d, row, run // 8, n_runs // 8, there)
    minimum = (both >> 6 & 63).to(tl.float32) * load_half(dmin, row, run // 8, n_runs // 8, there)
    return scale, minimum


@triton.jit
@no_type_check
def load_eight_bits(scales, d, row, run, n_runs, there, HALF: tl.constexpr):
    """Scale of the first or second half of each run of Q6_K, as float32."""
    scale = tl.load(scales + row * (n_runs * 2) + run * 2 + HALF, mask=there, other=0).to(tl.float32)
    return scale * load_half(d, row, run // 8, n_runs // 8, there)


_REGISTERS = 128  # of a thread: four programs of 128 threads share a core, so that 4096 rows run at once on 132 cores


def multiply_few_rows(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: GGMLType, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, rounded once, for 1 to 8 contiguous rows of any dtype but float64."""
    n_rows, n_out = len(x), len(fields["codes"])
    run, per_thread = (RUN // 4, 2) if ggml_type is GGMLType.Q8_0 else (RUN, 1)
    n_runs = x.shape[1] // run
    threads, per_program = _threads(n_runs // per_thread), _rows_per_program(n_rows, n_out, ggml_type)
    y = x.new_empty(n_rows, n_out)
    launch: Any = _multiply[(triton.cdiv(n_out, per_program),)]
    launch(
        x, y, y if bias is None else bias, *pointers(fields), n_rows, n_out, n_runs,
        KIND=ggml_type.name, BIAS=bias is not None,
        M=_power_of_two(n_rows), ROWS=per_program, RUNS=threads * per_thread,
        num_warps=threads // 32, maxnreg=_REGISTERS,
    )  # fmt: skip
    return y


def _rows_per_program(n_rows: int, n_out: int, ggml_type: GGMLType) -> int:
    """As many as registers hold, for they share the inputs; fewer where there would be no program for some cores."""
    held = 8 // _power_of_two(n_rows) // (2 if ggml_type is GGMLType.Q6_K else 1)
    return max(1, min(held, _power_of_two(n_out // 512)))


def _power_of_two(n: int) -> int:
    """The first one from n on."""
    return 1 << max(0, n - 1).bit_length()


def _threads(n_runs: int) -> int:
    """The size of a program that leaves the fewest threads idle at the end of a row."""
    return min((128, 64, 32), key=lambda threads: -n_runs % threads)


@triton.jit
@no_type_check
def _multiply(
    x, y, bias, codes, upper, scales, d, dmin, n_rows, n_out, n_runs,
    KIND: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    m, row = tl.arange(0, M), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((M, ROWS, RUNS), tl.float32)
    for first in range(0, n_runs, RUNS):
        run = first + tl.arange(0, RUNS)
        if KIND == "Q8_0":
            total += _eight_bits(x, codes, d, m, row, run, n_rows, n_out, n_runs)
        elif KIND == "Q6_K":
            total += _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_out, n_runs)
        else:
            total += _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_out, n_runs, KIND)
    sums = tl.sum(total, 2)  # (M, ROWS)
    if BIAS:
        sums += tl.load(bias + row, mask=row < n_out, other=0).to(tl.float32)[None, :]
    there = (m < n_rows)[:, None] & (row < n_out)[None, :]
    tl.store(y + m[:, None] * n_out + row[None, :], sums.to(y.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_out, n_runs, KIND: tl.constexpr):
    row, run_of_row = row[:, None], run[None, :]  # (ROWS, 1), (1, RUNS)
    there = (row < n_out) & (run_of_row < n_runs)
    words = _load_words(codes, row, run_of_row, n_runs, there)  # (ROWS, RUNS, 4)
    dots, sums = _dots(x, words, words, m, run, n_rows, n_runs, 0, 8, False)
    if KIND == "Q4_0":
        return (dots - 8 * sums) * load_half(d, row, run_of_row, n_runs, there)[None]
    scale, minimum = load_twelve_bits(scales, d, dmin, row, run_of_row, n_runs, there)
    return dots * scale[None] - sums * minimum[None]


@triton.jit
@no_type_check
def _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_out, n_runs):
    row, run_of_row = row[:, None], run[None, :]
    there = (row < n_out) & (run_of_row < n_runs)
    words = _load_words(codes, row, run_of_row, n_runs, there)
    uppers = _load_words(upper, row, run_of_row, n_runs, there).to(tl.int32)
    dots, sums = _dots(x, words, uppers, m, run, n_rows, n_runs, 0, 4, True)
    first = (dots - 32 * sums) * load_eight_bits(scales, d, row, run_of_row, n_runs, there, 0)[None]
    dots, sums = _dots(x, words, uppers, m, run, n_rows, n_runs, 4, 8, True)
    return first + (dots - 32 * sums) * load_eight_bits(scales, d, row, run_of_row, n_runs, there, 1)[None]


@triton.jit
@no_type_check
def _eight_bits(x, codes, d, m, row, run, n_rows, n_out, n_runs):
    """Here a run is 8 elements, a quarter of a block."""
    row, run_of_row = row[:, None], run[None, :]
    there = (row < n_out) & (run_of_row < n_runs)
    at = (row.to(tl.int64) * (n_runs * 8) + run_of_row * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    code = tl.load(codes + at, mask=there[:, :, None], other=0).to(tl.float32)  # (ROWS, RUNS, 8)
    at = (m[:, None] * (n_runs * 8) + run[None, :] * 8)[:, None, :, None] + tl.arange(0, 8)[None, None, None, :]
    inputs_there = ((m < n_rows)[:, None] & (run < n_runs)[None, :])[:, None, :, None]
    inputs = tl.load(x + at, mask=inputs_there, other=0).to(tl.float32)  # (M, 1, RUNS, 8)
    return tl.sum(code[None] * inputs, 3) * load_half(d, row, run_of_row // 4, n_runs // 4, there)[None]


@triton.jit
@no_type_check
def _load_words(words, row, run, n_runs, there):
    """Four words of each run, (ROWS, RUNS, 4)."""
    at = (row * (n_runs * 4) + run * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    return tl.load(words + at, mask=there[:, :, None], other=0)


@triton.jit
@no_type_check
def _dots(
    x, words, upper, m, run, n_rows, n_runs, START: tl.constexpr, STOP: tl.constexpr, SIX: tl.constexpr
):  # fmt: skip
    """Sums of codes times inputs and of inputs, over some parts of the words of each run."""
    at = (m[:, None] * (n_runs * 32) + run[None, :] * 32)[:, None, :, None] + tl.arange(0, 4)[None, None, None, :]
    there = ((m < n_rows)[:, None] & (run < n_runs)[None, :])[:, None, :, None]
    dots = tl.zeros((m.shape[0], words.shape[0], words.shape[1], 4), tl.float32)
    sums = tl.zeros((m.shape[0], 1, words.shape[1], 4), tl.float32)
    for j in tl.static_range(START, STOP):
        inputs = tl.load(x + at + 4 * j, mask=there, other=0).to(tl.float32)
        sums += inputs
        if SIX:
            code = words >> 4 * j & 15 | (upper >> 2 * j & 3) << 4
            dots += code.to(tl.float32)[None] * inputs
        else:
            in_place = words.to(tl.uint32, bitcast=True) & (15 << 4 * j)
            dots += in_place.to(tl.float32)[None] * (inputs * (1 / 16**j))
    return tl.sum(dots, 3), tl.sum(sums, 3)

"""A few rows of activations times a packed matrix, straight from its blocks: what decoding a token consists of.

A program takes a row of the matrix and all of its columns. So no sum is split between programs, which would need a
second kernel to add up; its order depends on the shapes alone. A thread loads 16 bytes of codes at a time, and inputs
in the same way. With w = scale * (code - offset) - minimum for a run of elements,

    sum(w * x) = scale * (sum(code * x) - offset * sum(x)) - minimum * sum(x)

so that a weight of four bits costs a mask, a conversion and a multiply-add. The mask leaves code j of a word in place,
16^j times too large: the inputs are divided by that, which is exact. All sums are float32.

The matrices of experts lie one below the other; which a row of activations is multiplied by is read on the device.

The reference is `kernels.quantised_linear.multiply_by_tiles`. `kernels.packing` describes the contents of fields; in
functions that read them, `row` and `run` (32 elements of a row) are tensors that broadcast to the result, which `there`
masks.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from llorch.files.quant import GGMLType
from llorch.pytorch.kernels.packing import Fields, Kind

RUN = 32


def pointers(fields: Fields) -> list[Tensor]:
    """Return the tensors that every kernel is given, in this order: codes, upper, scales, d, dmin.

    Codes of four bits are handed over as 32-bit words and their upper bits as 16-bit words. Any other field stands for
    a field that the type lacks, and is never read.
    """
    codes = fields["codes"]
    words = codes.view(torch.int32) if codes.dtype is torch.uint8 else codes
    upper = fields["upper"].view(torch.int16) if "upper" in fields else words
    d = fields["d"]
    return [words, upper, fields.get("scales", words), d, fields.get("dmin", d)]


@triton.jit
@no_type_check
def load_half(d, row, block, n_blocks, there):
    """Load a float16 of each block as float32."""
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


# The best of 54 ways on an H100 at the shapes of an 8B model; more rows of the matrix per program wait longer for them.
_WARPS = {GGMLType.Q8_0: 4, GGMLType.Q4_0: 2, GGMLType.Q4_K: 2, GGMLType.Q6_K: 2}
_REGISTERS = {GGMLType.Q8_0: 128, GGMLType.Q4_0: 64, GGMLType.Q4_K: 64, GGMLType.Q6_K: 64}  # of a thread


def multiply_few_rows(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: GGMLType, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, rounded once, for 1 to 8 contiguous rows of any dtype but float64."""
    y = x.new_empty(len(x), len(fields["codes"]))
    _launch((y.shape[1], 1), x, y, bias, None, fields, ggml_type, n_rows=len(x), share=1)
    return y


def multiply_chosen(
    x: Float[Tensor, "inputs in"], ids: Int[Tensor, " choices"], fields: Fields, ggml_type: Kind, n_experts: int
) -> Float[Tensor, "choices out"]:
    """Multiply each row, which is that of some choices in succession, by the matrix of the expert chosen."""
    assert isinstance(ggml_type, GGMLType)
    y = x.new_empty(len(ids), len(fields["codes"]) // n_experts)
    _launch((y.shape[1], len(ids)), x, y, None, ids, fields, ggml_type, n_rows=1, share=len(ids) // len(x))
    return y


def _launch(
    grid: tuple[int, int], x: Tensor, y: Tensor, bias: Tensor | None, ids: Tensor | None, fields: Fields,
    ggml_type: GGMLType, *, n_rows: int, share: int,
) -> None:  # fmt: skip
    run, per_thread = (RUN // 4, 2) if ggml_type is GGMLType.Q8_0 else (RUN, 1)
    warps = _WARPS[ggml_type]
    launch: Any = _multiply[grid]
    launch(
        x, y, y if bias is None else bias, y if ids is None else ids, *pointers(fields), n_rows, x.shape[1] // run,
        share, KIND=ggml_type.name, BIAS=bias is not None, CHOSEN=ids is not None, M=triton.next_power_of_2(n_rows),
        RUNS=warps * 32 * per_thread, num_warps=warps, maxnreg=_REGISTERS[ggml_type],
    )  # fmt: skip


@triton.jit(do_not_specialize=["share"])
@no_type_check
def _multiply(
    x, y, bias, ids, codes, upper, scales, d, dmin, n_rows, n_runs, share,
    KIND: tl.constexpr, BIAS: tl.constexpr, CHOSEN: tl.constexpr, M: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    n_out = tl.num_programs(0)
    m, out, choice = tl.arange(0, M), tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = out.to(tl.int64)
    if CHOSEN:
        row += tl.load(ids + choice) * n_out
        x += choice // share * (n_runs * (8 if KIND == "Q8_0" else 32))
        y += choice * n_out
    total = tl.zeros((M, RUNS), tl.float32)
    for first in range(0, n_runs, RUNS):
        run = first + tl.arange(0, RUNS)
        if KIND == "Q8_0":
            total += _eight_bits(x, codes, d, m, row, run, n_rows, n_runs)
        elif KIND == "Q6_K":
            total += _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_runs)
        else:
            total += _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, KIND)
    sums = tl.sum(total, 1)  # (M,)
    if BIAS:
        sums += tl.load(bias + out).to(tl.float32)
    tl.store(y + m * n_out + out, sums.to(y.dtype.element_ty), mask=m < n_rows)


@triton.jit
@no_type_check
def _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, KIND: tl.constexpr):
    there = run < n_runs
    words = _load_words(codes, row, run, n_runs, there)  # (RUNS, 4)
    dots, sums = _dots(x, words, words, m, run, n_rows, n_runs, 0, 8, False)
    if KIND == "Q4_0":
        return (dots - 8 * sums) * load_half(d, row, run, n_runs, there)[None]
    scale, minimum = load_twelve_bits(scales, d, dmin, row, run, n_runs, there)
    return dots * scale[None] - sums * minimum[None]


@triton.jit
@no_type_check
def _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_runs):
    there = run < n_runs
    words = _load_words(codes, row, run, n_runs, there)
    uppers = _load_words(upper, row, run, n_runs, there).to(tl.int32)
    dots, sums = _dots(x, words, uppers, m, run, n_rows, n_runs, 0, 4, True)
    first = (dots - 32 * sums) * load_eight_bits(scales, d, row, run, n_runs, there, 0)[None]
    dots, sums = _dots(x, words, uppers, m, run, n_rows, n_runs, 4, 8, True)
    return first + (dots - 32 * sums) * load_eight_bits(scales, d, row, run, n_runs, there, 1)[None]


@triton.jit
@no_type_check
def _eight_bits(x, codes, d, m, row, run, n_rows, n_runs):
    """Compute products of 8-bit codes, (M, RUNS); a run is 8 elements here, a quarter of a block."""
    there, eight = run < n_runs, tl.arange(0, 8)
    at = codes + row * (n_runs * 8) + (run * 8)[:, None] + eight[None, :]
    code = tl.load(at, mask=there[:, None], other=0).to(tl.float32)  # (RUNS, 8)
    at = (m[:, None] * (n_runs * 8) + run[None, :] * 8)[:, :, None] + eight[None, None, :]
    inputs_there = ((m < n_rows)[:, None] & there[None, :])[:, :, None]
    inputs = tl.load(x + at, mask=inputs_there, other=0).to(tl.float32)  # (M, RUNS, 8)
    return tl.sum(code[None] * inputs, 2) * load_half(d, row, run // 4, n_runs // 4, there)[None]


@triton.jit
@no_type_check
def _load_words(words, row, run, n_runs, there):
    """Four words of each run, (RUNS, 4)."""
    at = words + row * (n_runs * 4) + (run * 4)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(at, mask=there[:, None], other=0)


@triton.jit
@no_type_check
def _dots(
    x, words, upper, m, run, n_rows, n_runs, START: tl.constexpr, STOP: tl.constexpr, SIX: tl.constexpr
):  # fmt: skip
    """Sum codes times inputs, and inputs, (M, RUNS) each, over some parts of the words of each run."""
    M: tl.constexpr = m.shape[0]
    RUNS: tl.constexpr = run.shape[0]
    at = (m[:, None] * (n_runs * 32) + run[None, :] * 32)[:, :, None] + tl.arange(0, 8)[None, None, :]
    there = ((m < n_rows)[:, None] & (run < n_runs)[None, :])[:, :, None]
    dots, sums = tl.zeros((M, RUNS, 4), tl.float32), tl.zeros((M, RUNS, 4), tl.float32)
    for j in tl.static_range(START, STOP, 2):  # the inputs of two parts are 16 bytes, or 32
        inputs = tl.load(x + at + 4 * j, mask=there, other=0).to(tl.float32)
        first, second = tl.split(tl.permute(tl.reshape(inputs, (M, RUNS, 2, 4)), (0, 1, 3, 2)))
        sums = sums + first + second
        dots += _products(words, upper, first, j, SIX)
        dots += _products(words, upper, second, j + 1, SIX)
    return tl.sum(dots, 2), tl.sum(sums, 2)


@triton.jit
@no_type_check
def _products(words, upper, inputs, J: tl.constexpr, SIX: tl.constexpr):
    """Part J of each word times its input."""
    if SIX:
        code = words >> 4 * J & 15 | (upper >> 2 * J & 3) << 4
        return code.to(tl.float32)[None] * inputs
    in_place = words.to(tl.uint32, bitcast=True) & (15 << 4 * J)
    return in_place.to(tl.float32)[None] * (inputs * (1 / 16**J))

"""Products of a few rows of activations and a packed matrix, directly from its blocks: the main work of a decode step.

A program computes one row of the matrix with all of its columns. So no sum is split between programs, which would need
a second kernel; the order of a sum depends on the shapes only. A thread loads 16 bytes of codes at a time, and inputs
in the same way. With w = scale * (code - offset) - minimum for a run (32 elements),

    sum(w * x) = scale * (sum(code * x) - offset * sum(x)) - minimum * sum(x)

so that a weight of four bits costs a mask, a conversion and a multiply-add. The mask leaves code j of a word in place,
16^j times too large: the inputs are divided by this power, which is exact. All sums are float32.

Numbers of a `Table` have their offset subtracted before the sum. A large sum of codes minus an equally large sum of
offsets would leave a small difference with the errors of both. For the same reason, integers with a minimum per group
are summed as differences from their middle. Numbers other than integers, E4M3 and E2M1 are looked up.

The matrices of experts are stacked; the expert of a row of activations is read on the device.

The reference is `kernels.quantised_linear.multiply_by_tiles`. `kernels.packing` describes the contents of fields; in
functions that read them, `row` and `run` (32 elements of a row) are tensors that broadcast to the result, and `mask`
marks its valid elements.
"""

from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor

from llorch.files.quantised.codes import E2M1, E4M3, INT8
from llorch.files.quantised.fields import Table
from llorch.pytorch.kernels.packing import Fields, Kind, values_of, width

RUN = 32


def arguments(fields: Fields, kind: Kind) -> list[Tensor]:
    """Return the field arguments of a kernel, in this order: codes, upper, scales, d, dmin.

    Codes of four bits are passed as 32-bit words and their upper bits as 16-bit words. The scales of a `Table` are
    its numbers, factor and divisor; its dmin are its offsets. If the kind lacks a field, another field is passed in
    its place and never read.
    """
    codes, d = fields["codes"], fields["d"]
    words = codes.view(torch.int32) if codes.dtype is torch.uint8 and kind.name != "TABLE_8" else codes
    if isinstance(kind, Table):
        return [words, words, _table_numbers(kind, d.device), d, fields.get("zero", fields.get("minimum", d))]
    upper = fields["upper"].view(torch.int16) if "upper" in fields else words
    return [words, upper, fields.get("scales", words), d, fields.get("dmin", d)]


def rules(fields: Fields, kind: Kind) -> dict[str, Any]:
    """Return a kernel's constants for a table: decoding (`WAY`), columns per scale, kind of offset, factor and divisor.

    A kernel takes them for any kind, and ignores them if it is no `Table`.
    """
    if not isinstance(kind, Table):
        return {"WAY": "", "GROUP": 1, "OFFSET": "", "FACTOR": False, "DIVISOR": False}
    offset = next((name for name in ("zero", "minimum") if name in fields), "")
    group = width(fields, kind) // fields["d"].shape[-1]
    has_factors = {"FACTOR": kind.factor is not None, "DIVISOR": kind.divisor is not None}
    return {"WAY": _way(kind), "GROUP": group, "OFFSET": offset, **has_factors}


def is_slow_to_decode(table: Table) -> bool:
    """Tell if the numbers of a table are looked up or divided, which makes tiles slower than the library."""
    return _way(table) == "LOOK_UP" or table.divisor is not None


@cache  # cached, because a CUDA graph cannot copy from the host
def _table_numbers(table: Table, device: torch.device) -> Float32[Tensor, " numbers"]:
    """Copy the numbers of a table to a device, followed by its factor and its divisor."""
    return torch.cat((values_of(table, device), torch.from_numpy(table.factors).to(device)))


_COMPUTED = {INT8.tobytes(): "SIGNED", E4M3.tobytes(): "E4M3", E2M1.tobytes(): "E2M1"}


@cache
def _way(kind: Table) -> str:
    """Return the method that turns a code into its number: "EVEN" for integers in sequence; see `load_numbers`."""
    if kind.values in _COMPUTED:
        return _COMPUTED[kind.values]
    table_values = values_of(kind, torch.device("cpu"))
    return "EVEN" if torch.equal(table_values, table_values[0].round() + torch.arange(len(table_values))) else "LOOK_UP"


@triton.jit
@no_type_check
def load_half(d, row, block, n_blocks, mask):
    """Load a float16 of each block as float32."""
    return tl.load(d + row * n_blocks + block, mask=mask, other=0).to(tl.float32)


@triton.jit
@no_type_check
def load_twelve_bits(scales, d, dmin, row, run, n_runs, mask):
    """Load scale and minimum of each run of Q4_K as float32: two adjacent bytes contain the twelve bits."""
    pointers = scales + row * (n_runs // 2 * 3) + run // 2 * 3 + run % 2
    low = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    high = tl.load(pointers + 1, mask=mask, other=0).to(tl.int32)
    bits = (low | high << 8) >> run % 2 * 4
    scale = (bits & 63).to(tl.float32) * load_half(d, row, run // 8, n_runs // 8, mask)
    minimum = (bits >> 6 & 63).to(tl.float32) * load_half(dmin, row, run // 8, n_runs // 8, mask)
    return scale, minimum


@triton.jit
@no_type_check
def load_eight_bits(scales, d, row, run, n_runs, mask, HALF: tl.constexpr):
    """Load the scale of the first or second half of each run of Q6_K as float32."""
    scale = tl.load(scales + row * (n_runs * 2) + run * 2 + HALF, mask=mask, other=0).to(tl.float32)
    return scale * load_half(d, row, run // 8, n_runs // 8, mask)


# The fastest on an H100 at the shapes of an 8B model; more rows of the matrix per program wait longer for memory.
_WARPS = {"Q8_0": 4, "Q4_0": 2, "Q4_K": 2, "Q6_K": 2, "TABLE_4": 1, "TABLE_8": 2}
_REGISTERS = {"Q8_0": 128, "Q4_0": 64, "Q4_K": 64, "Q6_K": 64, "TABLE_4": 64, "TABLE_8": 128}  # per thread
_LONG = 8192  # columns; longer rows of a table use twice as many warps
_BYTES = ("Q8_0", "TABLE_8")  # codes of one byte: 16 bytes of a thread are two runs, which have 8 elements here


def multiply_few_rows(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, rounded once, for 1 to 8 contiguous rows of any dtype but float64."""
    y = x.new_empty(len(x), len(fields["codes"]))
    _launch((y.shape[1], 1), x, y, bias, None, fields, ggml_type, n_rows=len(x), share=1)
    return y


def multiply_chosen(
    x: Float[Tensor, "inputs in"], ids: Int[Tensor, " choices"], fields: Fields, ggml_type: Kind, n_experts: int
) -> Float[Tensor, "choices out"]:
    """Multiply rows by matrices of selected experts; each row serves `len(ids) // len(x)` successive selections."""
    y = x.new_empty(len(ids), len(fields["codes"]) // n_experts)
    _launch((y.shape[1], len(ids)), x, y, None, ids, fields, ggml_type, n_rows=1, share=len(ids) // len(x))
    return y


def _launch(
    grid: tuple[int, int], x: Tensor, y: Tensor, bias: Tensor | None, ids: Tensor | None, fields: Fields,
    kind: Kind, *, n_rows: int, share: int,
) -> None:  # fmt: skip
    """Launch `_multiply`; every row of `x` serves `share` selections, `n_rows` is the number of rows per program."""
    run, per_thread = (RUN // 4, 2) if kind.name in _BYTES else (RUN, 1)
    warps = _WARPS[kind.name] * (2 if isinstance(kind, Table) and x.shape[1] > _LONG else 1)
    launch: Any = _multiply[grid]
    launch(
        # `y` in place of a missing tensor is never read
        x, y, y if bias is None else bias, y if ids is None else ids, *arguments(fields, kind), n_rows,
        x.shape[1] // run, share, KIND=kind.name, **rules(fields, kind), BIAS=bias is not None,
        CHOSEN=ids is not None, M=triton.next_power_of_2(n_rows), RUNS=warps * 32 * per_thread, num_warps=warps,
        maxnreg=_REGISTERS[kind.name],
    )  # fmt: skip


@triton.jit(do_not_specialize=["share"])
@no_type_check
def _multiply(
    x, y, bias, ids, codes, upper, scales, d, dmin, n_rows, n_runs, share,
    KIND: tl.constexpr, WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr,
    DIVISOR: tl.constexpr, BIAS: tl.constexpr, CHOSEN: tl.constexpr, M: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Multiply up to `M` rows by one row of a packed matrix, of a selected expert if `CHOSEN`."""
    n_out = tl.num_programs(0)
    m, out, choice = tl.arange(0, M), tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = out.to(tl.int64)
    if CHOSEN:
        row += tl.load(ids + choice) * n_out
        x += choice // share * (n_runs * (8 if KIND == "Q8_0" or KIND == "TABLE_8" else 32))
        y += choice * n_out
    total = tl.zeros((M, RUNS), tl.float32)
    for first in range(0, n_runs, RUNS):
        run = first + tl.arange(0, RUNS)
        if KIND == "Q8_0":
            total += _eight_bits(x, codes, d, m, row, run, n_rows, n_runs)
        elif KIND == "Q6_K":
            total += _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_runs)
        elif KIND == "TABLE_8":
            total += _eight_bits_of_a_table(x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, WAY, GROUP, OFFSET)
        elif KIND == "TABLE_4":
            if GROUP == 16:
                total += _four_bits_of_a_table(
                    x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, WAY, GROUP, OFFSET, 0, 4
                )
                total += _four_bits_of_a_table(
                    x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, WAY, GROUP, OFFSET, 4, 8
                )
            else:
                total += _four_bits_of_a_table(
                    x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, WAY, GROUP, OFFSET, 0, 8
                )
        else:
            total += _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, KIND)
    sums = tl.sum(total, 1)  # (M,)
    if FACTOR:
        sums *= tl.load(scales + (16 if KIND == "TABLE_4" else 256))
    if DIVISOR:
        sums /= tl.load(scales + (17 if KIND == "TABLE_4" else 257))
    if BIAS:
        sums += tl.load(bias + out).to(tl.float32)
    tl.store(y + m * n_out + out, sums.to(y.dtype.element_ty), mask=m < n_rows)


@triton.jit
@no_type_check
def _four_bits(x, codes, scales, d, dmin, m, row, run, n_rows, n_runs, KIND: tl.constexpr):
    """Compute the products of some runs of a row of Q4_0 or Q4_K, (M, RUNS)."""
    mask = run < n_runs
    words = _load_words(codes, row, run, n_runs, mask)  # (RUNS, 4)
    dots, sums = _dots(x, words, words, words, m, run, n_rows, n_runs, 0, 8, "IN_PLACE")
    if KIND == "Q4_0":
        return (dots - 8 * sums) * load_half(d, row, run, n_runs, mask)[None]
    scale, minimum = load_twelve_bits(scales, d, dmin, row, run, n_runs, mask)
    return dots * scale[None] - sums * minimum[None]


@triton.jit
@no_type_check
def _four_bits_of_a_table(
    x, codes, table, d, offsets, m, row, run, n_rows, n_runs,
    WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, START: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """Compute products of parts START to STOP of each run, which share a scale, (M, RUNS)."""
    mask = run < n_runs
    words = _load_words(codes, row, run, n_runs, mask)
    scale, zero, minimum = _scale_and_offset(table, d, offsets, row, run * 32 + 4 * START, n_runs * 32, mask, WAY,
                                             GROUP, OFFSET, 7.5)  # fmt: skip
    dots, sums = _dots(x, words, table, zero, m, run, n_rows, n_runs, START, STOP, WAY)
    if OFFSET == "minimum":
        return dots * scale[None] + sums * minimum[None]
    return dots * scale[None]


@triton.jit
@no_type_check
def _scale_and_offset(
    table, d, offsets, row, column, n_in, mask,
    WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """Load the scale of some columns, the zero point that is subtracted from their codes, and their minimum."""
    index = row * (n_in // GROUP) + column // GROUP
    scale = tl.load(d + index, mask=mask, other=0).to(tl.float32)
    zero, minimum = tl.zeros_like(scale), tl.zeros_like(scale)
    if OFFSET == "zero":
        zero += tl.load(offsets + index, mask=mask, other=0).to(tl.float32)
    if OFFSET == "minimum":
        minimum += tl.load(offsets + index, mask=mask, other=0).to(tl.float32)
    if WAY == "EVEN":
        first = tl.load(table)
        if OFFSET == "minimum":
            return scale, zero + MIDDLE, minimum + (first + MIDDLE) * scale
        zero -= first
    return scale, zero, minimum


@triton.jit
@no_type_check
def _six_bits(x, codes, upper, scales, d, m, row, run, n_rows, n_runs):
    """Compute the products of some runs of a row of Q6_K, (M, RUNS)."""
    mask = run < n_runs
    words = _load_words(codes, row, run, n_runs, mask)
    uppers = _load_words(upper, row, run, n_runs, mask).to(tl.int32)
    dots, sums = _dots(x, words, uppers, words, m, run, n_rows, n_runs, 0, 4, "SIX")
    first = (dots - 32 * sums) * load_eight_bits(scales, d, row, run, n_runs, mask, 0)[None]
    dots, sums = _dots(x, words, uppers, words, m, run, n_rows, n_runs, 4, 8, "SIX")
    return first + (dots - 32 * sums) * load_eight_bits(scales, d, row, run, n_runs, mask, 1)[None]


@triton.jit
@no_type_check
def _eight_bits(x, codes, d, m, row, run, n_rows, n_runs):
    """Compute products of 8-bit codes, (M, RUNS); a run is 8 elements here, a quarter of a block."""
    mask = run < n_runs
    code = _load_bytes(codes, row, run, n_runs, mask).to(tl.float32)  # (RUNS, 8)
    inputs = _load_inputs(x, m, run, n_rows, n_runs)  # (M, RUNS, 8)
    return tl.sum(code[None] * inputs, 2) * load_half(d, row, run // 4, n_runs // 4, mask)[None]


@triton.jit
@no_type_check
def _eight_bits_of_a_table(
    x, codes, table, d, offsets, m, row, run, n_rows, n_runs,
    WAY: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Compute products of 8-bit codes, (M, RUNS); a run is 8 elements here, which share a scale."""
    mask = run < n_runs
    scale, zero, minimum = _scale_and_offset(
        table, d, offsets, row, run * 8, n_runs * 8, mask, WAY, GROUP, OFFSET, 127.5
    )
    if WAY == "E4M3" and OFFSET == "":
        return _dots_of_e4m3(x, codes, m, row, run, n_rows, n_runs) * (scale * 256)[None]
    code = _load_bytes(codes, row, run, n_runs, mask).to(tl.int32)
    numbers = load_numbers(code, table, WAY) - zero[:, None]
    inputs = _load_inputs(x, m, run, n_rows, n_runs)
    dots = tl.sum(numbers[None] * inputs, 2) * scale[None]
    if OFFSET == "minimum":
        return dots + tl.sum(inputs, 2) * minimum[None]
    return dots


@triton.jit
@no_type_check
def _dots_of_e4m3(x, codes, m, row, run, n_rows, n_runs):
    """Sum inputs times numbers / 256 of each run of 8, (M, RUNS).

    A word has four codes. The codes in its even bytes, or in its odd bytes, are moved to the bits of two float16. The
    exponent bias of float16 is 8 more, so each result is the number / 256.
    """
    M: tl.constexpr = m.shape[0]
    RUNS: tl.constexpr = run.shape[0]
    pointers = codes.to(tl.pointer_type(tl.uint32)) + row * (n_runs * 2) + (run * 2)[:, None] + tl.arange(0, 2)[None, :]
    words = tl.load(pointers, mask=(run < n_runs)[:, None], other=0)  # (RUNS, 2)
    even = words << 8 & 0x80008000 | words << 7 & 0x3F803F80
    odd = words & 0x80008000 | words >> 1 & 0x3F803F80
    inputs = tl.reshape(_load_inputs(x, m, run, n_rows, n_runs), (M, RUNS, 2, 2, 2))
    even_inputs, odd_inputs = tl.split(inputs)
    return tl.sum(_dots_of_halves(even, even_inputs) + _dots_of_halves(odd, odd_inputs), 2)


@triton.jit
@no_type_check
def _dots_of_halves(words, inputs):
    """Multiply the two float16 of each word, (RUNS, 2), by the last axis of the inputs, and add the products."""
    first, second = tl.split(inputs)
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low[None] * first + high[None] * second


@triton.jit
@no_type_check
def load_numbers(code, table, WAY: tl.constexpr):
    """Convert codes to float32 numbers; "EVEN" omits the first number of the table."""
    if WAY == "EVEN":
        return code.to(tl.float32)
    if WAY == "SIGNED":
        return ((code ^ 128) - 128).to(tl.float32)
    if WAY == "E4M3":  # 4 exponent and 3 mantissa bits, moved to their place in float32, whose bias is 120 more
        return ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True) * 2.0**120
    if WAY == "E2M1":  # 2 exponent bits and 1 mantissa bit; the bias is 126 more
        return ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 2.0**126
    return tl.load(table + code)


@triton.jit
@no_type_check
def _load_bytes(codes, row, run, n_runs, mask):
    """Load eight codes of each run, (RUNS, 8)."""
    pointers = codes + row * (n_runs * 8) + (run * 8)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(pointers, mask=mask[:, None], other=0)


@triton.jit
@no_type_check
def _load_inputs(x, m, run, n_rows, n_runs):
    """Load the inputs of each run of 8 elements, (M, RUNS, 8)."""
    index = (m[:, None] * (n_runs * 8) + run[None, :] * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    mask = ((m < n_rows)[:, None] & (run < n_runs)[None, :])[:, :, None]
    return tl.load(x + index, mask=mask, other=0).to(tl.float32)


@triton.jit
@no_type_check
def _load_words(words, row, run, n_runs, mask):
    """Load four words of each run, (RUNS, 4)."""
    pointers = words + row * (n_runs * 4) + (run * 4)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(pointers, mask=mask[:, None], other=0)


@triton.jit
@no_type_check
def _dots(
    x, words, extra, zero, m, run, n_rows, n_runs, START: tl.constexpr, STOP: tl.constexpr, WAY: tl.constexpr
):  # fmt: skip
    """Sum numbers times inputs, and inputs, (M, RUNS) each, over some parts of the words of each run."""
    M: tl.constexpr = m.shape[0]
    RUNS: tl.constexpr = run.shape[0]
    index = (m[:, None] * (n_runs * 32) + run[None, :] * 32)[:, :, None] + tl.arange(0, 8)[None, None, :]
    mask = ((m < n_rows)[:, None] & (run < n_runs)[None, :])[:, :, None]
    dots, sums = tl.zeros((M, RUNS, 4), tl.float32), tl.zeros((M, RUNS, 4), tl.float32)
    for j in tl.static_range(START, STOP, 2):  # the inputs of two parts are 16 bytes, or 32
        inputs = tl.load(x + index + 4 * j, mask=mask, other=0).to(tl.float32)
        first, second = tl.split(tl.permute(tl.reshape(inputs, (M, RUNS, 2, 4)), (0, 1, 3, 2)))
        sums = sums + first + second
        dots += _products(words, extra, zero, first, j, WAY)
        dots += _products(words, extra, zero, second, j + 1, WAY)
    return tl.sum(dots, 2), tl.sum(sums, 2)


@triton.jit
@no_type_check
def _products(words, extra, zero, inputs, J: tl.constexpr, WAY: tl.constexpr):
    """Multiply part J of each word by its input; `extra` has the upper bits of six-bit codes, or a table."""
    if WAY == "SIX":
        code = words >> 4 * J & 15 | (extra >> 2 * J & 3) << 4
        return code.to(tl.float32)[None] * inputs
    if WAY == "LOOK_UP" or WAY == "E2M1":
        return (load_numbers(words >> 4 * J & 15, extra, WAY) - zero[:, None])[None] * inputs
    in_place = (words.to(tl.uint32, bitcast=True) & (15 << 4 * J)).to(tl.float32)
    if WAY == "EVEN":
        in_place -= zero[:, None] * 16**J
    return in_place[None] * (inputs * (1 / 16**J))

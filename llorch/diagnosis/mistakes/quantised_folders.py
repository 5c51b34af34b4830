"""Known mistakes in reading the matrices of quantised Hugging Face folders.

Each mistake changes one field of a matrix's recipe (how to decode it), or the bytes of its parts (stored tensors). The
decoder of `llorch.files.quantised.matrix` then returns the wrong numbers: (value[code] - zero) * scale + minimum.
`Mistake.cases` are prefixes of scheme names: `GPTQ 4-bit` is a prefix of `GPTQ 4-bit, groups of 128`. A change that
does not apply to a matrix returns it unchanged. A step that the mistake omits must not be computed and reversed: the
numbers must be bit-exact, because SHA-256 digests of an engine's matrices are compared with them.

`requantised` makes the wrong matrix of another mistake: the engine quantised a matrix that the folder stores as floats.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.files.packed import Packed, Rows
from llorch.files.quantised.bitsandbytes import BlockScales
from llorch.files.quantised.codes import AWQ_ORDER, E2M1, E8M0, codes_across, integers, stream
from llorch.files.quantised.gptq import zero_points
from llorch.files.quantised.matrix import Parts, QuantisedMatrix, Reader, floats_of
from llorch.ops.rounding import round_activations

Change = Callable[[QuantisedMatrix], QuantisedMatrix]  # the right matrix to the one with a wrong recipe or wrong bytes
_ONE_PER_CODE = 0x11111111  # a word with 1 in each 4-bit code
# Tables of 16 values, which bitsandbytes files also contain. Source: bitsandbytes `functional.py`.
NF4 = np.array(
    [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1], np.float32,
)  # fmt: skip
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4 = np.concatenate([FP4, -FP4])


def _with_recipe(matrix: QuantisedMatrix, **fields: Any) -> QuantisedMatrix:
    """Return a copy of the matrix with changed fields in its recipe."""
    return replace(matrix, recipe=replace(matrix.recipe, **fields))


def _compose(reader: Reader, change: Callable[[np.ndarray], np.ndarray]) -> Reader:
    """Make a reader that applies `change` to the output of another reader."""
    return lambda parts, rows: change(reader(parts, rows))


def _n_code_bits(matrix: QuantisedMatrix) -> int:
    return int(matrix.values.size - 1).bit_length()


def _stored_zeros(matrix: QuantisedMatrix) -> Reader:
    """Make the reader of GPTQ's zero points as stored."""
    return zero_points(_n_code_bits(matrix), matrix.shape[0], less_one=False)


def _is_first_version(matrix: QuantisedMatrix) -> bool:
    """Tell if the right reader adds 1 to the stored zero points, as for GPTQ version 1."""
    assert matrix.recipe.zero is not None
    row = slice(0, 1)
    return not np.array_equal(matrix.recipe.zero(matrix.parts, row), _stored_zeros(matrix)(matrix.parts, row))


def first_version_as_second(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use the stored zero points without adding 1."""
    return _with_recipe(matrix, zero=_stored_zeros(matrix))


def second_version_as_first(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Add 1 to the stored zero points."""
    if _is_first_version(matrix):
        return matrix
    return _with_recipe(matrix, zero=zero_points(_n_code_bits(matrix), matrix.shape[0], less_one=True))


def zero_not_wrapped(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Add 1 to the stored zero points without wrapping, so that 0 is read as 2^bits."""
    if not _is_first_version(matrix):
        return matrix
    return _with_recipe(matrix, zero=_compose(_stored_zeros(matrix), lambda zero: zero + 1))


def zero_carried(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Add 1 in packed words, so that it carries into the next code."""
    if _n_code_bits(matrix) != 4 or not _is_first_version(matrix):
        return matrix
    part = matrix.parts["qzeros"]
    words = part.array.view(np.uint32) + np.uint32(_ONE_PER_CODE)
    parts = {**matrix.parts, "qzeros": replace(part, raw=np.ascontiguousarray(words).view(np.uint8).reshape(-1))}
    return replace(_with_recipe(matrix, zero=_stored_zeros(matrix)), parts=parts)


def awq_in_plain_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read the codes of a word in plain order."""
    n_out = matrix.shape[0]
    return _with_recipe(
        matrix,
        codes=lambda parts, rows: codes_across(parts["qweight"].array, 4, rows, n_out),
        zero=lambda parts, rows: codes_across(parts["qzeros"].array, 4, rows, n_out).astype(np.float32),
    )


def zero_plus_one(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Add 1 to the zero points, like a kernel for GPTQ version 1."""
    zero = matrix.recipe.zero
    return matrix if zero is None else _with_recipe(matrix, zero=_compose(zero, lambda zeros: zeros + 1))


def gptq_in_awq_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read the codes of a word in the order of AWQ."""
    if _n_code_bits(matrix) != 4:
        return matrix
    places = np.arange(matrix.shape[1])
    places = places // 8 * 8 + np.array(AWQ_ORDER)[places % 8]
    return _with_recipe(matrix, codes=_compose(matrix.recipe.codes, lambda codes: codes[:, places]))


def halves_swapped(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read the other half of each byte first."""
    if matrix.values.size != 16 or matrix.shape[1] % 2:
        return matrix
    swapped = np.arange(matrix.shape[1]) ^ 1
    return _with_recipe(matrix, codes=_compose(matrix.recipe.codes, lambda codes: codes[:, swapped]))


def three_bits_without_gaps(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read 3-bit codes without gaps although two bits of each word are empty; unchanged if the file has no gaps."""
    n_in = matrix.shape[1]
    if matrix.parts["codes"].shape[1] == -(-n_in * 3 // 32):
        return matrix
    return _with_recipe(matrix, codes=lambda parts, rows: stream(parts["codes"].array[rows], 3, n_in))


def codes_signed(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read codes as two's complement."""
    codes = integers(_n_code_bits(matrix))
    return _with_recipe(matrix, values=np.where(codes >= codes.size // 2, codes - codes.size, codes))


def zero_point_forgotten(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Multiply the unsigned codes (0, 1, 2, ...) without subtracting a stored or fixed zero point."""
    return _with_recipe(matrix, zero=None, values=integers(_n_code_bits(matrix)))


def symmetric(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use the middle of the code range instead of stored zero points."""
    if matrix.recipe.zero is None:
        return matrix
    return _with_recipe(matrix, zero=None, values=integers(_n_code_bits(matrix), offset=matrix.values.size // 2))


def zero_point_not_scaled(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Subtract the zero point after the product with the scale, so that it is not scaled."""
    if matrix.recipe.zero is None:
        return matrix
    return _with_recipe(matrix, zero=None, minimum=_compose(matrix.recipe.zero, lambda zero: -zero))


def zero_product_float16(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Round the product of zero point and scale to float16, and add it to the product of code and scale."""
    zero, scale = matrix.recipe.zero, matrix.recipe.scale
    if zero is None:
        return matrix

    def minimum(parts: Parts, rows: Rows) -> np.ndarray:
        return -(zero(parts, rows) * scale(parts, rows)).astype(np.float16).astype(np.float32)

    return _with_recipe(matrix, zero=None, minimum=minimum)


def columns_in_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Group columns in storage order, without the stored group of each column (g_idx)."""
    if not callable(matrix.recipe.group):
        return matrix
    groups = int(matrix.recipe.group(matrix.parts).max()) + 1
    order = np.arange(matrix.shape[1]) // -(-matrix.shape[1] // groups)
    return _with_recipe(matrix, group=lambda parts: order)


def groups_one_on(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use for each group of columns the next group's scale and zero point, except for the last group."""
    group, n_in = matrix.recipe.group, matrix.shape[1]
    numbers = group(matrix.parts) if callable(group) else np.arange(n_in) // group
    next_numbers = np.minimum(numbers + 1, numbers.max())
    return _with_recipe(matrix, group=lambda parts: next_numbers) if next_numbers.any() else matrix


def scale_changed(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Make a `Change` that applies a function to every scale."""
    return lambda matrix: _with_recipe(matrix, scale=_compose(matrix.recipe.scale, change))


def scale_divided(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Divide by the scales instead of multiplying."""
    scale = matrix.recipe.scale
    return _with_recipe(matrix, scale=_ones, divisor=lambda parts, rows: matrix.spread(scale(parts, rows)))


def _ones(parts: Parts, rows: Rows) -> np.ndarray:
    return np.ones((1, 1), np.float32)


def _matrix_scale(matrix: QuantisedMatrix) -> np.float32 | None:
    """Return the matrix scale of NVFP4; None if the matrix has none."""
    part = matrix.parts.get("global")
    return None if part is None else part.floats().reshape(-1)[0]


def global_scale_turned(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Multiply by the matrix scale (NVFP4) instead of dividing, or vice versa."""
    matrix_scale = _matrix_scale(matrix)
    if matrix_scale is None:
        return matrix
    if matrix.recipe.divisor is not None:  # compressed-tensors; ModelOpt multiplies the matrix scale into `scale`
        return _with_recipe(matrix, divisor=None, factor=matrix_scale)
    return _with_recipe(matrix, scale=_compose(floats_of("scale"), lambda scale: scale / matrix_scale))


def global_scale_dropped(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use the groups' scales without the matrix scale."""
    return matrix if _matrix_scale(matrix) is None else _with_recipe(matrix, scale=floats_of("scale"), divisor=None)


def scale_turned(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Multiply by the stored scale of the matrix (BitNet) instead of dividing, or vice versa."""
    number = matrix.parts["scale"].floats().reshape(1, 1)
    is_factor = np.array_equal(matrix.recipe.scale(matrix.parts, slice(0, 1)), number)
    return _with_recipe(matrix, scale=lambda parts, rows: np.float32(1) / number if is_factor else number)


def _by_block(matrix: QuantisedMatrix, block_of: Callable[[int, int], np.ndarray]) -> QuantisedMatrix:
    """Use other blocks' scales; `block_of` maps the length and number of blocks of an axis to block indices."""
    part = matrix.parts["scale"]
    row_of, column_of = (block_of(length, n) for length, n in zip(matrix.shape, part.shape, strict=True))
    scales = E8M0[part.array] if part.dtype == "U8" else part.floats()

    def scale(parts: Parts, rows: Rows) -> np.ndarray:
        return scales[row_of[rows]]

    return _with_recipe(matrix, scale=scale, group=lambda parts: column_of)


def blocks_of_equal_size(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Derive the block size from the number of scales, as if no block were partial."""
    return _by_block(matrix, lambda length, n: np.arange(length) // -(-length // n))


def scales_tiled(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Tile the matrix of scales instead of repeating each scale."""
    return _by_block(matrix, lambda length, n: np.arange(length) % n)


def partial_blocks_as_the_last_whole(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use for a partial block the scale of the complete block before it."""
    size = matrix.recipe.group
    assert isinstance(size, int)
    return _by_block(matrix, lambda length, n: np.minimum(np.arange(length) // size, max(length // size - 1, 0)))


def exponents_as_integers(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Use the byte of an exponent as the scale."""
    return _with_recipe(matrix, scale=lambda parts, rows: parts["scale"].array[rows].astype(np.float32))


def four_bit_table(table: np.ndarray) -> Change:
    """Make a `Change` that uses another table of 16 values."""
    return lambda matrix: _with_recipe(matrix, values=table)


def nested_offset_dropped(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Omit the mean of the scales of double quantisation."""
    scale = matrix.recipe.scale
    return _with_recipe(matrix, scale=replace(scale, offset=None)) if isinstance(scale, BlockScales) else matrix


def rows_of_a_byte_in_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Read the four codes of a byte as four adjacent rows."""

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return parts["codes"].array[ids // 4] >> (ids % 4 * 2).astype(np.uint8)[:, None] & 3

    return _with_recipe(matrix, codes=codes)


def scale_bfloat16(scale: np.ndarray) -> np.ndarray:
    """Round scales to bfloat16."""
    return round_activations(np.ascontiguousarray(scale, np.float32), "BF16")


def centred(matrix: QuantisedMatrix) -> np.ndarray:
    """Return the finite values of the codes, centred as symmetric quantisers use them."""
    values = matrix.values[np.isfinite(matrix.values)]
    return values - values.size // 2 if values.min() == 0 and values.max() == values.size - 1 else values


def scale_denominators(matrix: QuantisedMatrix) -> list[float]:
    """List the numbers that quantisers divide a group's largest weight by: largest codes of both signs, their mean."""
    values = centred(matrix)
    largest, smallest = float(values.max()), float(-values.min())
    return list(dict.fromkeys([largest, smallest, (largest + smallest) / 2]))


def requantised(array: np.ndarray, like: QuantisedMatrix, scale_denominator: float) -> np.ndarray:
    """Quantise and decode a matrix with the scheme of `like`: one scale for each group, and the nearest code.

    The last group of columns may be smaller. bitsandbytes forms groups over the flattened matrix. If `like` lists the
    group of each column, a row has one scale.
    """
    group, reader = like.recipe.group, like.recipe.scale
    is_flattened = isinstance(reader, BlockScales)
    in_groups = isinstance(group, int) and group < like.shape[1]
    size = reader.size if is_flattened else min(group, array.shape[1]) if in_groups else array.shape[1]
    rows = array.reshape(1, -1) if is_flattened else array
    quantised, values = np.empty_like(rows), np.sort(centred(like)).astype(array.dtype)
    for start in range(0, rows.shape[1], size):
        part = rows[:, start : start + size]
        scale = _round_scales(np.abs(part).max(axis=1, keepdims=True) / scale_denominator, like)
        quantised[:, start : start + size] = _nearest(values, part / np.where(scale > 0, scale, 1)) * scale
    return quantised.reshape(array.shape)


def _nearest(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Round to the nearest of `values`; round ties between integers to even, as libraries do."""
    if np.array_equal(values, np.arange(values[0], values[0] + values.size)):
        return np.clip(np.rint(x), values[0], values[-1])
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, x)]


def _round_scales(scale: np.ndarray, like: QuantisedMatrix) -> np.ndarray:
    """Round scales to the dtype of the matrix's stored scales, if that is bfloat16 or float16."""
    stored_dtypes = {part.dtype for key, part in like.parts.items() if key in ("scale", "scales")}
    if stored_dtypes == {"BF16"}:
        return scale_bfloat16(scale).astype(scale.dtype)
    return scale.astype(np.float16).astype(scale.dtype) if stored_dtypes == {"F16"} else scale


def _row(name: str, cases: tuple[str, ...], change: Change, diagnosis: str) -> Mistake[QuantisedMatrix]:
    """Make a mistake of reading; its wrong array is the decoded matrix."""
    return Mistake(
        name=name, stages=("decode",), cases=cases, diagnosis=diagnosis, wrong=lambda m, step: change(m).decode()
    )


_CT_INTEGERS = tuple(f"compressed-tensors {bits}-bit" for bits in range(2, 9))
_INTEGERS = ("GPTQ", "AWQ", *_CT_INTEGERS, "MLX 2-bit", "MLX 3-bit", "MLX 4-bit", "MLX 5-bit", "MLX 6-bit", "MLX 8-bit")
_HALVES = ("GPTQ 4-bit", "AWQ 4-bit (gemv)", "compressed-tensors 4-bit", "NVFP4", "MXFP4", "MLX 4-bit", "MLX NVFP4",
           "MLX MXFP4")  # fmt: skip
_GROUPED = (*_INTEGERS, "NVFP4", "MXFP4", "MXFP8", "MLX NVFP4", "MLX MXFP4", "MLX MXFP8")
_BNB_FOUR = ("NF4", "FP4")
_BYTES = ("FP8", "compressed-tensors int8", "bitsandbytes int8", "torchao", "MXFP8", "MLX MXFP8")
_FLOAT32_SCALES = (*_BNB_FOUR, "FP8", "NVFP4", "GPTQ", "AWQ", "bitsandbytes int8", "torchao")
_EXPONENTS = ("MXFP4", "MXFP8", "MLX MXFP4", "MLX MXFP8")

QUANTISED_FOLDERS: tuple[Mistake[QuantisedMatrix], ...] = (
    _row("gptq-first-version-as-second", ("GPTQ",), first_version_as_second,
         "Zero points of GPTQ version 1 were used as stored; version 1 stores them less one, so add 1."),
    _row("gptq-second-version-as-first", ("GPTQ",), second_version_as_first,
         "Zero points of gptq_v2 were increased by 1; only version 1 stores them less one."),
    _row("gptq-zero-point-not-wrapped", ("GPTQ",), zero_not_wrapped,
         "A stored zero point of 2^bits - 1 became 2^bits; add 1 modulo 2^bits, so that it is 0."),
    _row("gptq-zero-point-carried", ("GPTQ 4-bit",), zero_carried,
         "The 1 was added to packed words and carried into the next zero point; unpack the zero points first."),
    _row("awq-plain-order", ("AWQ 4-bit, ",), awq_in_plain_order,  # with the comma: gemm, not `AWQ 4-bit (gemv)`
         "The eight codes of a word were used in plain order; AWQ gemm stores columns 0 2 4 6 1 3 5 7."),
    _row("awq-zero-point-plus-one", ("AWQ",), zero_plus_one,
         "Zero points were increased by 1; AWQ stores them as they are, only version 1 of GPTQ stores them less one."),
    _row("gptq-awq-order", ("GPTQ 4-bit",), gptq_in_awq_order,
         "The eight codes of a word were used in the order of AWQ; GPTQ stores them one after another."),
    _row("folder-upper-half-first", _HALVES, halves_swapped,
         "The upper half of a byte was used as the earlier code; in this format the lower half is first."),
    _row("bitsandbytes-lower-half-first", _BNB_FOUR, halves_swapped,
         "The lower half of a byte was used as the earlier code; bitsandbytes stores the upper half first."),
    _row("three-bits-without-gaps", ("compressed-tensors 3-bit",), three_bits_without_gaps,
         "Codes of 3 bits were read without gaps; this file has ten in a word, and two empty bits."),
    _row("folder-codes-signed", _INTEGERS, codes_signed,
         "Codes were read as two's complement; they are unsigned, and the zero point is subtracted."),
    _row("folder-zero-point-forgotten", ("GPTQ", "AWQ", *_CT_INTEGERS), zero_point_forgotten,
         "Codes were multiplied without their zero point; subtract the zero point of the group, or half of the range."),
    _row("folder-read-as-symmetric", ("GPTQ", "AWQ", *_CT_INTEGERS), symmetric,
         "The middle of the range was used as every zero point; this file stores one for each group."),
    _row("folder-zero-point-not-scaled", ("GPTQ", "AWQ", *_CT_INTEGERS), zero_point_not_scaled,
         "The zero point was subtracted after the product with the scale; subtract it from the code first."),
    _row("zero-point-product-float16", ("AWQ",), zero_product_float16,
         "The product of zero point and scale was rounded to float16; subtract the zero point from the code first."),
    _row("mlx-bias-dropped", ("MLX",), lambda matrix: _with_recipe(matrix, minimum=None),
         "The biases of the groups were left out; MLX adds one to each product of code and scale."),
    _row("mlx-bias-subtracted", ("MLX",),
         lambda m: m if m.recipe.minimum is None else _with_recipe(m, minimum=_compose(m.recipe.minimum, np.negative)),
         "The biases of the groups were subtracted; MLX adds them."),
    _row("folder-group-one-on", _GROUPED, groups_one_on,
         "Each group of columns had the scale of the next group, and its zero point; use those with its own number."),
    _row("group-index-ignored", ("GPTQ", "compressed-tensors"), columns_in_order,
         "Columns were grouped in the order in which they lie; g_idx names the group of each column."),
    _row("global-scale-turned", ("NVFP4",), global_scale_turned,
         "The scale of the matrix was used upside down; compressed-tensors divides by weight_global_scale, ModelOpt "
         "multiplies with weight_scale_2."),
    _row("global-scale-dropped", ("NVFP4",), global_scale_dropped,
         "The scale of the matrix was left out; NVFP4 needs it beside the scales of the groups."),
    _row("fp8-scale-divided", ("FP8",), scale_divided,
         "Codes were divided by their scale; weight_scale_inv and weight_scale are factors."),
    _row("fp8-blocks-of-equal-size", ("FP8, blocks",), blocks_of_equal_size,
         "The size of a block was computed from the number of scales; the settings name it, and the last block of a "
         "row or column may be smaller."),
    _row("fp8-partial-block-with-scale-before", ("FP8, blocks",), partial_blocks_as_the_last_whole,
         "A partial last block got the scale of the block before it; it has one of its own."),
    _row("fp8-scales-tiled", ("FP8, blocks",), scales_tiled,
         "The scales of the blocks were repeated as a whole; repeat each for all rows and columns of its block."),
    _row("folder-scale-dropped", _BYTES, lambda matrix: _with_recipe(matrix, scale=_ones, factor=None),
         "Codes were used as weights without their scale; the module is quantised, so multiply them."),
    _row("folder-scale-float16", _FLOAT32_SCALES, scale_changed(lambda s: s.astype(np.float16).astype(np.float32)),
         "Scales were rounded to float16 before the product; use them as the file stores them."),
    _row("folder-scale-bfloat16", _FLOAT32_SCALES, scale_changed(scale_bfloat16),
         "Scales were rounded to bfloat16 before the product; use them as the file stores them."),
    _row("int8-row-maximum-over-127-5", ("bitsandbytes int8",), lambda m: _with_recipe(m, factor=np.float32(1 / 127.5)),
         "The maximum of a row was divided by 127.5; bitsandbytes divides it by 127."),
    _row("int8-row-maximum-over-128", ("bitsandbytes int8",), lambda m: _with_recipe(m, factor=np.float32(1 / 128)),
         "The maximum of a row was divided by 128; bitsandbytes divides it by 127."),
    _row("exponent-bias-128", _EXPONENTS, scale_changed(lambda scale: scale / 2),
         "Exponents were read with a bias of 128, so all is half as large; the bias of E8M0 is 127."),
    _row("exponent-as-integer", _EXPONENTS, exponents_as_integers,
         "The bytes of the scales were used as integers; they are exponents, 2^(byte - 127)."),
    _row("nf4-as-fp4", ("NF4",), four_bit_table(FP4),
         "Codes were looked up in the table of FP4; the folder is NF4 and holds its own table."),
    _row("fp4-as-nf4", ("FP4",), four_bit_table(NF4),
         "Codes were looked up in the table of NF4; the folder is FP4 and holds its own table."),
    _row("fp4-as-e2m1", ("FP4",), four_bit_table(E2M1 / np.float32(6)),
         "Codes were read as E2M1; FP4 of bitsandbytes has its values in another order."),
    _row("nested-offset-dropped", ("NF4", "FP4"), nested_offset_dropped,
         "Scales of double quantisation were used without nested_offset; add it to each."),
    _row("bitnet-scale-turned", ("BitNet",), scale_turned,
         "The scale was used upside down; bitlinear divides by weight_scale, autobitlinear multiplies with it."),
    _row("bitnet-rows-in-order", ("BitNet",), rows_of_a_byte_in_order,
         "The four codes of a byte were used as four rows in a row; they lie a quarter of the rows apart."),
)  # fmt: skip


def wrong_reading(mistake: Mistake[QuantisedMatrix], packed: Packed) -> np.ndarray | None:
    """Decode a matrix as the mistake reads it; None if the mistake does not apply to its scheme."""
    if not isinstance(packed, QuantisedMatrix) or not packed.ggml_type.name.startswith(mistake.cases):
        return None
    with np.errstate(all="ignore"):
        return mistake.result(packed, "decode")

"""Known mistakes in decoding GGUF blocks: order of codes, scales, minima, separately stored bits.

Most mistakes change the bytes of the blocks and then use the right decoder, where this gives the wrong decoder's
output. For example, the codes are reordered, or each scale is replaced by the neighbour's. Names of fields follow
`llorch.files.blocks`. `cases` are matrix types; `mistake` explains all fields.
"""

from dataclasses import replace

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.quantised import QuantisedInputs, in_blocks, in_matrix
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.judging.expectations.quantised_models import SCALES

# Bytes of a block's codes (with upper bits in Q5_0, Q3_K and Q6_K), for types with a mistake in the codes.
CODES = {
    "Q4_0": slice(2, 18), "Q4_1": slice(4, 20), "IQ4_NL": slice(2, 18), "MXFP4": slice(1, 17), "Q5_0": slice(2, 22),
    "Q4_K": slice(16, 144), "Q5_K": slice(48, 176), "Q3_K": slice(0, 96), "Q6_K": slice(0, 192), "TQ2_0": slice(0, 64),
    "Q2_0": slice(2, 18), "Q8_0": slice(2, 34),
}  # fmt: skip
UPPER_BITS = {  # bytes of the codes' upper bits
    "Q5_0": slice(2, 6), "Q5_1": slice(4, 8), "Q5_K": slice(16, 48), "Q6_K": slice(128, 192), "Q3_K": slice(0, 32)
}  # fmt: skip
ZERO_POINT = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32, "TQ2_0": 1, "Q2_0": 1}
MINIMA = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 82, "Q4_K": 2, "Q5_K": 2}  # first byte of the minimum


def _replace(s: QuantisedInputs, part: slice, new_bytes: np.ndarray | np.uint8) -> QuantisedInputs:
    """Return a copy of the inputs with some bytes of every block replaced."""
    blocks = s.blocks.reshape(-1, BLOCK_SIZES[s.kind][1]).copy()
    blocks[:, part] = new_bytes
    return replace(s, blocks=blocks)


def _block_part(s: QuantisedInputs, part: slice) -> np.ndarray:
    return s.blocks.reshape(-1, BLOCK_SIZES[s.kind][1])[:, part]


def _nibbles(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return codes & 0x0F, codes >> 4


def nibbles_alternate(s: QuantisedInputs) -> QuantisedInputs:
    """Read the two codes of a byte as neighbours."""
    codes = _block_part(s, CODES[s.kind.name])
    in_order = np.stack(_nibbles(codes), axis=-1).reshape(len(codes), 2, -1)
    return _replace(s, CODES[s.kind.name], in_order[:, 0] | in_order[:, 1] << 4)


def nibbles_swapped(s: QuantisedInputs) -> QuantisedInputs:
    """Read the upper half of each byte first."""
    low, high = _nibbles(_block_part(s, CODES[s.kind.name]))
    return _replace(s, CODES[s.kind.name], low << 4 | high)


def sub_blocks_of_16_bytes(s: QuantisedInputs) -> QuantisedInputs:
    """Read every 16 bytes as a sub-block of 32 codes, as in Q4_0."""
    codes = _block_part(s, CODES[s.kind.name])
    halves = np.stack(_nibbles(codes.reshape(-1, 4, 2, 16)), axis=3)  # (blocks, pairs, sub-block, half, 16)
    in_order = halves.reshape(len(codes), 4, 2, 32)
    return _replace(s, CODES[s.kind.name], (in_order[:, :, 0] | in_order[:, :, 1] << 4).reshape(codes.shape))


def scale_of_neighbour(s: QuantisedInputs) -> QuantisedInputs:
    """Use the scale of the previous block."""
    for scale in SCALES[s.kind]:
        part = slice(scale.offset, scale.offset + 2)
        s = _replace(s, part, np.roll(_block_part(s, part), 1, axis=0))
    return s


def blocks_twice_as_long(s: QuantisedInputs) -> QuantisedInputs:
    """Use the scale of the first of two blocks for both."""
    for scale in SCALES[s.kind]:
        part = slice(scale.offset, scale.offset + 2)
        scales = _block_part(s, part)
        s = _replace(s, part, scales[np.arange(len(scales)) // 2 * 2])
    return s


def codes_over_scale(s: QuantisedInputs) -> QuantisedInputs:
    """Read the codes from the beginning of the block."""
    part = CODES[s.kind.name]
    return _replace(s, part, _block_part(s, slice(0, part.stop - part.start)))


def stride_padded(s: QuantisedInputs) -> QuantisedInputs:
    """Read blocks as two bytes longer, as if they had a float32 scale or the sum of Q8_1."""
    size = BLOCK_SIZES[s.kind][1]
    flat = s.blocks.reshape(-1)
    starts = np.arange(flat.size // size) * (size + 2)
    return replace(s, blocks=flat[(starts[:, None] + np.arange(size)) % flat.size])


def fifth_bits_of_first_half(s: QuantisedInputs) -> QuantisedInputs:
    """Use the fifth bits of the block's first half for the second half too."""
    part = UPPER_BITS[s.kind.name]
    bits = _block_part(s, part)
    return _replace(s, part, np.concatenate([bits[:, :2], bits[:, :2]], axis=1))


def upper_bits_inverted(s: QuantisedInputs) -> QuantisedInputs:
    """Invert the upper bits, as if a set bit subtracted."""
    part = UPPER_BITS[s.kind.name]
    return _replace(s, part, ~_block_part(s, part))


def minimum_dropped(s: QuantisedInputs) -> QuantisedInputs:
    """Set the minimum to 0."""
    first = MINIMA[s.kind.name]
    return _replace(s, slice(first, first + 2), np.uint8(0))


def minimum_of_other_sign(s: QuantisedInputs) -> QuantisedInputs:
    """Use the minimum with the other sign: flip the sign bit of a float16."""
    last = slice(MINIMA[s.kind.name] + 1, MINIMA[s.kind.name] + 2)
    return _replace(s, last, _block_part(s, last) ^ 0x80)


def scale_and_minimum_swapped(s: QuantisedInputs) -> QuantisedInputs:
    """Exchange the two float16 numbers, scale and minimum."""
    first = MINIMA[s.kind.name] - 2
    scale_and_minimum = _block_part(s, slice(first, first + 4))
    return _replace(s, slice(first, first + 4), np.roll(scale_and_minimum, 2, axis=1))


def sub_scales_in_a_row(s: QuantisedInputs) -> QuantisedInputs:
    """Read the 12 bytes of scales and minima as 16 consecutive numbers of six bits."""
    bits = np.unpackbits(_block_part(s, slice(4, 16)), axis=1, bitorder="little").reshape(-1, 16, 6)
    numbers = np.packbits(np.pad(bits, ((0, 0), (0, 0), (0, 2))), axis=2, bitorder="little")[..., 0]
    scales, minima = numbers[:, :8], numbers[:, 8:]
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return _replace(s, slice(4, 16), np.hstack([*first, scales[:, 4:] & 0x0F | (minima[:, 4:] & 0x0F) << 4]))


def sub_scales_and_minima_swapped(s: QuantisedInputs) -> QuantisedInputs:
    """Exchange the 6-bit scales and minima."""
    first, second, last = (_block_part(s, slice(start, start + 4)) for start in (4, 8, 12))
    return _replace(s, slice(4, 16), np.hstack([second, first, last >> 4 | last << 4]))


def sub_scales_unsigned(s: QuantisedInputs) -> np.ndarray:
    """Read the scales of Q6_K, bytes 192 to 207, as unsigned bytes, so that -1 becomes 255."""
    offsets = np.where(_block_part(s, slice(192, 208)).reshape(-1, 1) > 127, np.float32(256), np.float32(0))
    with_scales_of_1 = _replace(s, slice(192, 208), np.uint8(1)).decoded()
    return s.decoded() + (offsets * with_scales_of_1.reshape(-1, 16)).reshape(s.shape)


def codes_wrapped(s: QuantisedInputs) -> np.ndarray:
    """Raise codes below the zero point by 256, as unsigned bytes wrap."""
    values, lowest = s.decoded(), _replace(s, CODES[s.kind.name], np.uint8(0)).decoded()
    # Code 0 decodes to -zero_point * scale, which gives the sign and the size of the scale.
    return values + np.where(values * lowest > 0, lowest * np.float32(-256 / ZERO_POINT[s.kind.name]), 0)


def codes_unsigned(s: QuantisedInputs) -> np.ndarray:
    """Read negative int8 codes as 128 to 255."""
    offsets = np.where(_block_part(s, CODES[s.kind.name]) > 127, np.float32(256), np.float32(0))
    return s.decoded() + (
        offsets * _replace(s, CODES[s.kind.name], np.uint8(1)).decoded().reshape(offsets.shape)
    ).reshape(s.shape)


def sub_scales_not_centred(s: QuantisedInputs) -> np.ndarray:
    """Use the scales without subtracting 32; scale bytes of 0 decode to -32 times the code."""
    part = {"Q3_K": slice(96, 108), "IQ4_XS": slice(2, 8)}[s.kind.name]
    return s.decoded() - _replace(s, part, np.uint8(0)).decoded()


DECODED = ("decode", "product")
FLOAT16_SCALED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
WITH_MINIMA = tuple(MINIMA)

BLOCKS: tuple[Mistake[QuantisedInputs], ...] = (
    Mistake(
        name="block-nibbles-alternate", stages=DECODED, cases=("Q4_0", "Q4_1", "IQ4_NL", "MXFP4"),
        wrong=in_blocks(nibbles_alternate),
        diagnosis="The two codes of a byte were used as neighbours; the low halves of all bytes are the first half "
        "of the block, the high halves the second.",
    ),
    Mistake(
        name="block-nibbles-swapped", stages=DECODED, cases=("Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "Q4_K"),
        wrong=in_blocks(nibbles_swapped),
        diagnosis="The high half of a byte was taken for the earlier element; the low half comes first.",
    ),
    Mistake(
        name="k-nibbles-as-in-q4-0", stages=DECODED, cases=("Q4_K", "Q5_K"), wrong=in_blocks(sub_blocks_of_16_bytes),
        diagnosis="16 bytes were taken for a sub-block of 32, as in Q4_0; in Q4_K and Q5_K 32 bytes hold one sub-block "
        "in their low halves and the next in their high halves.",
    ),
    Mistake(
        name="block-scale-of-neighbour", stages=DECODED, cases=FLOAT16_SCALED, wrong=in_blocks(scale_of_neighbour),
        diagnosis="Every block got the scale of the block before it; the index of scales is one off.",
    ),
    Mistake(
        name="block-twice-as-long", stages=DECODED, cases=FLOAT16_SCALED, wrong=in_blocks(blocks_twice_as_long),
        diagnosis="Two blocks shared the first one's scale; the block size is half of what was assumed.",
    ),
    Mistake(
        name="block-codes-over-scale", stages=DECODED, cases=("Q4_0", "Q8_0", "IQ4_NL", "Q5_0"),
        wrong=in_blocks(codes_over_scale),
        diagnosis="Codes were read from the beginning of the block; the scale lies there, in two bytes.",
    ),
    Mistake(
        name="block-stride-padded", stages=DECODED, cases=("Q4_0", "Q8_0", "IQ4_NL"), wrong=in_blocks(stride_padded),
        diagnosis="Blocks were taken to be two bytes longer than they are (36 for the 34 of Q8_0, 20 for the 18 of "
        "Q4_0); a scale takes two bytes and nothing is padded.",
    ),
    Mistake(
        name="block-zero-point-forgotten", stages=DECODED,
        wrong=in_matrix(lambda s: s.decoded() - _replace(s, CODES[s.kind.name], np.uint8(0)).decoded()),
        cases=tuple(ZERO_POINT),
        diagnosis="Codes were multiplied as they are; subtract the zero point first: 8 in Q4_0, 16 in Q5_0, 4 in Q3_K, "
        "32 in Q6_K, 1 in TQ2_0 and Q2_0.",
    ),
    Mistake(
        name="block-codes-wrap", stages=DECODED, wrong=in_matrix(codes_wrapped), cases=tuple(ZERO_POINT),
        diagnosis="The zero point was subtracted from unsigned bytes, where 3 - 8 is 251; make the codes int8 or "
        "float32 first.",
    ),
    Mistake(
        name="block-codes-unsigned", stages=DECODED, wrong=in_matrix(codes_unsigned), cases=("Q8_0",),
        diagnosis="Codes were read as unsigned bytes, 0 to 255; those of Q8_0 are int8, -128 to 127.",
    ),
    Mistake(
        name="block-nibbles-signed", stages=DECODED, cases=("Q4_0",),
        wrong=in_blocks(lambda s: _replace(s, CODES[s.kind.name], _block_part(s, CODES[s.kind.name]) ^ np.uint8(0x88))),
        diagnosis="Codes were taken for signed numbers of four bits; those of Q4_0 are 0 to 15; subtract 8.",
    ),
    Mistake(
        name="block-upper-bits-ignored", stages=DECODED, cases=tuple(UPPER_BITS),
        wrong=in_blocks(lambda s: _replace(s, UPPER_BITS[s.kind.name], np.uint8(0))),
        diagnosis="The upper bits of the codes, which are stored separately, were left out.",
    ),
    Mistake(
        name="q5-fifth-bits-of-first-half", stages=DECODED, cases=("Q5_0", "Q5_1"),
        wrong=in_blocks(fifth_bits_of_first_half),
        diagnosis="The second half of the block got the fifth bits of the first; element i has bit i of 32.",
    ),
    Mistake(
        name="q3-k-upper-bits-inverted", stages=DECODED, cases=("Q3_K",), wrong=in_blocks(upper_bits_inverted),
        diagnosis="4 was subtracted where the bit of hmask is set; it is subtracted where the bit is clear.",
    ),
    Mistake(
        name="block-minimum-dropped", stages=DECODED, cases=WITH_MINIMA, wrong=in_blocks(minimum_dropped),
        diagnosis="The minimum of the block was left out; these types store code * scale and a minimum.",
    ),
    Mistake(
        name="block-minimum-of-other-sign", stages=DECODED, cases=WITH_MINIMA, wrong=in_blocks(minimum_of_other_sign),
        diagnosis="The minimum has the wrong sign; Q4_1 and Q5_1 add it, Q2_K, Q4_K and Q5_K subtract it.",
    ),
    Mistake(
        name="block-scale-and-minimum-swapped", stages=DECODED, cases=WITH_MINIMA,
        wrong=in_blocks(scale_and_minimum_swapped),
        diagnosis="Scale and minimum were exchanged; the scale comes first.",
    ),
    Mistake(
        name="k-scales-without-upper-bits", stages=DECODED, cases=("Q4_K", "Q5_K"),
        wrong=in_blocks(lambda s: _replace(s, slice(4, 12), _block_part(s, slice(4, 12)) & 0x3F)),
        diagnosis="The last four scales and minima had four bits; their upper two lie above the first four's.",
    ),
    Mistake(
        name="k-scales-in-a-row", stages=DECODED, cases=("Q4_K", "Q5_K"), wrong=in_blocks(sub_scales_in_a_row),
        diagnosis="The 12 bytes of scales were read as 16 numbers of six bits in a row; four scales, four minima, then "
        "the low halves of the others, whose upper bits lie above the first eight.",
    ),
    Mistake(
        name="k-scales-and-minima-swapped", stages=DECODED, cases=("Q4_K", "Q5_K"),
        wrong=in_blocks(sub_scales_and_minima_swapped),
        diagnosis="The 6-bit scales and minima were exchanged; scales come first, and in the low halves.",
    ),
    Mistake(
        name="q6-k-scales-unsigned", stages=DECODED, cases=("Q6_K",), wrong=in_matrix(sub_scales_unsigned),
        diagnosis="The 8-bit scales were read without sign; they go from -128 to 127.",
    ),
    Mistake(
        name="sub-scales-not-centred", stages=DECODED, cases=("Q3_K", "IQ4_XS"),
        wrong=in_matrix(sub_scales_not_centred),
        diagnosis="The 6-bit scales were used as they are; subtract 32 first.",
    ),
    Mistake(
        name="fp4-scale-not-halved", stages=DECODED, cases=("MXFP4", "NVFP4"),
        wrong=in_matrix(lambda s: 2 * s.decoded()),
        diagnosis="Everything is twice too large: the table of codes holds doubled numbers (12 for 6), so the scale "
        "has to be halved, or the exponent's bias is one off.",
    ),
    Mistake(
        name="iq4-nl-as-q4-0", stages=DECODED, cases=("IQ4_NL",),
        wrong=in_matrix(lambda s: decode(s.blocks, GGMLType.Q4_0, s.shape)),
        diagnosis="Codes were taken for equally spaced numbers, as in Q4_0; they are places in a table.",
    ),
)  # fmt: skip

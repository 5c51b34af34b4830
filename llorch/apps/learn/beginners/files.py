"""Mistakes of beginners with files and tokens: lessons 00w, 00 and 13."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from llorch.apps.learn.exercise import Call

Array = np.ndarray


def bits_shifted_by(bits: Array, *, n_bits: int) -> Array:
    """Shift the bits of a bfloat16 number by another number of places."""
    return (bits.astype(np.uint32) << n_bits).view(np.float32)


def bits_shifted_out(bits: Array) -> Array:
    """The bits were shifted while they had 16 bits, so that all fell out; widen them to uint32 first."""
    return np.zeros(bits.shape, np.float32)


def bits_not_shifted(bits: Array) -> Array:
    """The bits were not shifted: bfloat16 is the upper half of a float32, so shift by 16."""
    return bits_shifted_by(bits, n_bits=0)


def bits_shifted_by_8(bits: Array) -> Array:
    """The bits were shifted by 8; bfloat16 is the upper half of a float32, so shift by 16."""
    return bits_shifted_by(bits, n_bits=8)


def bits_shifted_by_15(bits: Array) -> Array:
    """The bits were shifted by 15; bfloat16 is the upper half of a float32, so shift by 16."""
    return bits_shifted_by(bits, n_bits=15)


def bits_shifted_by_17(bits: Array) -> Array:
    """The bits were shifted by 17; bfloat16 is the upper half of a float32, so shift by 16."""
    return bits_shifted_by(bits, n_bits=17)


def bits_read_as_float16(bits: Array) -> Array:
    """The bits were read as float16; bfloat16 has other fields: it is the upper half of a float32."""
    return bits.view(np.float16).astype(np.float32)


def bits_as_numbers(bits: Array) -> Array:
    """The bits were converted as whole numbers; shift them, and reinterpret with .view(np.float32)."""
    return bits.astype(np.float32)


def shifted_bits_as_numbers(bits: Array) -> Array:
    """The shifted bits were converted as whole numbers; reinterpret them with .view(np.float32)."""
    return (bits.astype(np.uint32) << 16).astype(np.float32)


def _merge(
    ids: Array, merges: Array, ranks: Array, *, choose: Callable[[list[tuple[int, int]]], tuple[int, int]],
    at_most: int | None = None,
) -> Array:  # fmt: skip
    """Merge the pairs that `choose` selects from (rank, index)."""
    rules = {(left, right): (rank, joined) for (left, right, joined), rank in zip(merges.tolist(), ranks, strict=True)}
    pieces, n_merged = ids.tolist(), 0
    while candidates := [(int(rules[pair][0]), i) for i, pair in enumerate(pairwise(pieces)) if pair in rules]:
        if n_merged == at_most:
            break
        _, i = choose(candidates)
        pieces[i : i + 2] = [rules[pieces[i], pieces[i + 1]][1]]
        n_merged += 1
    return np.asarray(pieces, np.int64)


def merge_rightmost_first(ids: Array, merges: Array, ranks: Array) -> Array:
    """The rightmost of the pairs with equal ranks was merged first; the leftmost goes first."""
    return _merge(ids, merges, ranks, choose=lambda found: min(found, key=lambda pair: (pair[0], -pair[1])))


def merge_highest_rank_first(ids: Array, merges: Array, ranks: Array) -> Array:
    """The pair of the highest rank was merged first; the lowest rank goes first."""
    return _merge(ids, merges, ranks, choose=lambda found: max(found, key=lambda pair: (pair[0], -pair[1])))


def merge_leftmost_first(ids: Array, merges: Array, ranks: Array) -> Array:
    """The leftmost pair was merged, whatever its rank; the lowest rank goes first."""
    return _merge(ids, merges, ranks, choose=lambda found: min(found, key=lambda pair: pair[1]))


def merge_once(ids: Array, merges: Array, ranks: Array) -> Array:
    """Only one pair was merged; go on until no pair is in the list."""
    return _merge(ids, merges, ranks, choose=min, at_most=1)


def merge_nothing(ids: Array, merges: Array, ranks: Array) -> Array:
    """Nothing was merged."""
    return ids.copy()


def _scales(blocks: Array, dtype: str = "<f2", start: int = 0) -> Array:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(dtype).astype(np.float32)


def _codes_8(blocks: Array) -> Array:
    return blocks[:, 2:].view(np.int8).astype(np.float32)


def _codes_4(blocks: Array, zero: float = 8.0) -> Array:
    packed = blocks[:, 2:]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) - np.float32(zero)


SCALES: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (  # name, sentence, scales of all blocks
    ("scale_big_endian", "The two bytes of the scale were read in the wrong order; it is little-endian float16.",
     lambda blocks: _scales(blocks, ">f2")),
    ("scale_as_bfloat16", "The scale was read as bfloat16; it is float16.",
     lambda blocks: (_scales(blocks, "<u2").astype(np.uint32) << 16).view(np.float32)),
    ("scale_as_integer", "The scale was read as a whole number; its two bytes are a float16.",
     lambda blocks: _scales(blocks, "<u2")),
    ("scale_of_first_block", "Every block was multiplied by the scale of the first one; each has its own.",
     lambda blocks: np.broadcast_to(_scales(blocks)[:1], (len(blocks), 1))),
    ("scale_squared", "The codes were multiplied by the scale twice.", lambda blocks: np.square(_scales(blocks))),
    ("scale_missing", "The codes were not multiplied by the scale.", lambda blocks: np.ones((len(blocks), 1), "f4")),
    ("scale_at_the_end", "The scale was read from the last two bytes; it stands first.",
     lambda blocks: _scales(blocks, start=blocks.shape[1] - 2)),
)  # fmt: skip
ZEROS = ((7.0, "7"), (7.5, "7.5"), (0.0, "0"), (9.0, "9"), (16.0, "16"), (4.0, "4"))


def _with_scales(codes: Call, scales: Call, blocks: Array) -> Array:
    with np.errstate(all="ignore"):
        return (codes(blocks) * scales(blocks)).astype(np.float32)


def _with_zero(blocks: Array, *, zero: float) -> Array:
    return _codes_4(blocks, zero) * _scales(blocks)


def _named(function: Callable[..., Array], name: str, sentence: str) -> Call:
    """Give a function a name and a docstring."""

    def wrong(blocks: Array) -> Array:
        return function(blocks)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


def _decoders(codes: Call) -> tuple[Call, ...]:
    return tuple(_named(partial(_with_scales, codes, scales), name, sentence) for name, sentence, scales in SCALES)


def codes_minus_128(blocks: Array) -> Array:
    """128 was subtracted from unsigned codes; they are signed: .view(np.int8)."""
    return (blocks[:, 2:].astype(np.float32) - 128) * _scales(blocks)


def product_in_float16(blocks: Array) -> Array:
    """The product was computed in float16, which rounds it and overflows; compute in float32."""
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2")
    return (blocks[:, 2:].view(np.int8).astype(np.float16) * scales).astype(np.float32)


def product_of_4_bits_in_float16(blocks: Array) -> Array:
    """The product was computed in float16, which rounds it and overflows; compute in float32."""
    return (_codes_4(blocks).astype(np.float16) * np.ascontiguousarray(blocks[:, :2]).view("<f2")).astype(np.float32)


def zero_point_wraps_around(blocks: Array) -> Array:
    """8 was subtracted from unsigned bytes, so codes below 8 became 248 and more; convert to a signed type first."""
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1) - np.uint8(8)
    return codes.astype(np.float32) * _scales(blocks)


def halves_joined_along_blocks(blocks: Array) -> Array:
    """The halves were joined along axis 0, which mixes blocks; join the halves of each block: axis=1."""
    packed = blocks[:, 2:]
    codes = np.concatenate([packed & 15, packed >> 4]).reshape(-1, 32).astype(np.float32) - 8
    return codes * _scales(blocks)


def codes_of_low_halves(blocks: Array) -> Array:
    """The low halves of the bytes were used twice; numbers 16 to 31 are in the high halves."""
    low = (blocks[:, 2:] & 15).astype(np.float32) - 8
    return np.concatenate([low, low], axis=1) * _scales(blocks)


def codes_of_high_halves(blocks: Array) -> Array:
    """The high halves were not shifted down by 4 bits."""
    packed = blocks[:, 2:]
    codes = np.concatenate([packed & 15, packed & 240], axis=1).astype(np.float32)
    return (codes - 8) * _scales(blocks)


def zero_point_of_low_halves(blocks: Array) -> Array:
    """8 was subtracted from the low halves only; subtract it from all 32 codes."""
    codes = _codes_4(blocks, 0.0)
    codes[:, :16] -= 8
    return codes * _scales(blocks)


def zero_point_of_high_halves(blocks: Array) -> Array:
    """8 was subtracted from the high halves only; subtract it from all 32 codes."""
    codes = _codes_4(blocks, 0.0)
    codes[:, 16:] -= 8
    return codes * _scales(blocks)


def zero_point_after_scale(blocks: Array) -> Array:
    """8 was subtracted after the product; subtract it from the codes: (code - 8) * scale."""
    return _codes_4(blocks, 0.0) * _scales(blocks) - 8


WRONG: Mapping[str, Sequence[Call]] = {
    "bfloat16_to_float32": (
        bits_shifted_by_8, bits_shifted_out, bits_not_shifted, bits_shifted_by_15, bits_shifted_by_17,
        bits_read_as_float16,
        bits_as_numbers, shifted_bits_as_numbers,
    ),
    "merge": (
        merge_rightmost_first, merge_highest_rank_first, merge_leftmost_first, merge_once, merge_nothing,
    ),
    "q8_0": (*_decoders(_codes_8), codes_minus_128, product_in_float16),
    "q4_0": (
        *_decoders(_codes_4), product_of_4_bits_in_float16, zero_point_wraps_around, halves_joined_along_blocks,
        codes_of_low_halves,
        codes_of_high_halves, zero_point_of_low_halves,
        zero_point_of_high_halves, zero_point_after_scale,
        *(
            _named(partial(_with_zero, zero=zero), f"{words}_for_8", f"{words} was subtracted from the codes; it is 8.")
            for zero, words in ZEROS
        ),
    ),
}  # fmt: skip

"""Wrong decoders, by the name of the known mistake. Each must fail under its name."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes import QUANTISED_FOLDERS

Codes = Callable[[np.ndarray], np.ndarray]


def scales(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, :2].copy().view("<f2").astype(np.float32)


def signed(packed: np.ndarray) -> np.ndarray:
    return packed.copy().view(np.int8).astype(np.float32)


def unsigned(packed: np.ndarray) -> np.ndarray:
    return packed.astype(np.float32)


def wrapped(packed: np.ndarray) -> np.ndarray:
    return (np.hstack([packed & 15, packed >> 4]) - np.uint8(8)).astype(np.float32)


def four_bits_signed(packed: np.ndarray) -> np.ndarray:
    codes = np.hstack([packed & 15, packed >> 4]).astype(np.float32)
    return np.where(codes < 8, codes, codes - 16)


def halves(packed: np.ndarray) -> np.ndarray:
    return np.hstack([packed % 16, packed // 16]).astype(np.float32) - 8


def of_previous(codes: Codes) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(blocks: np.ndarray) -> np.ndarray:
        d = scales(blocks)
        return codes(blocks[:, 2:]) * np.array([d[i - 1] for i in range(len(d))])

    return wrong


def of_pairs(codes: Codes) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(blocks: np.ndarray) -> np.ndarray:
        d = scales(blocks)
        return codes(blocks[:, 2:]) * np.array([d[i // 2 * 2] for i in range(len(d))])

    return wrong


def from_start(codes: Codes) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(blocks: np.ndarray) -> np.ndarray:
        return codes(blocks[:, :-2]) * scales(blocks)

    return wrong


def padded(codes: Codes) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(blocks: np.ndarray) -> np.ndarray:
        n, size = blocks.shape
        places = np.arange(n * (size + 2)).reshape(n, size + 2)[:, :size]
        read = np.take(blocks.ravel(), places, mode="wrap")
        return codes(read[:, 2:]) * scales(read)

    return wrong


def neighbours(packed: np.ndarray) -> np.ndarray:
    codes = np.empty((len(packed), 32), np.float32)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    return codes - 8


def high_first(packed: np.ndarray) -> np.ndarray:
    return np.hstack([packed // 16, packed % 16]).astype(np.float32) - 8


WRONG = {
    "q8_0": {
        "block-scale-of-neighbour": of_previous(signed),
        "block-twice-as-long": of_pairs(signed),
        "block-codes-over-scale": from_start(signed),
        "block-stride-padded": padded(signed),
        "block-codes-unsigned": lambda blocks: unsigned(blocks[:, 2:]) * scales(blocks),
    },
    "q4_0": {
        "block-nibbles-alternate": lambda blocks: neighbours(blocks[:, 2:]) * scales(blocks),
        "block-nibbles-swapped": lambda blocks: high_first(blocks[:, 2:]) * scales(blocks),
        "block-zero-point-forgotten": lambda blocks: (halves(blocks[:, 2:]) + 8) * scales(blocks),
        "block-codes-wrap": lambda blocks: wrapped(blocks[:, 2:]) * scales(blocks),
        "block-nibbles-signed": lambda blocks: four_bits_signed(blocks[:, 2:]) * scales(blocks),
        "block-scale-of-neighbour": of_previous(halves),
        "block-twice-as-long": of_pairs(halves),
        "block-codes-over-scale": from_start(halves),
        "block-stride-padded": padded(halves),
    },
}
_NO_MINIMUM = "Q8_0 and Q4_0 have no minimum"
_NO_UPPER_BITS = "all bits of a code of Q8_0 and Q4_0 lie together"
_NO_SUB_BLOCKS = "Q8_0 and Q4_0 have one scale, not scales of sub-blocks"
_OTHER_TABLE = "Q8_0 and Q4_0 have no table of codes"
_ROUNDING = "decides how activations are rounded, which no part of this lesson does"
_FOLDERS = "concerns quantised Hugging Face folders; this lesson decodes blocks of GGUF"
UNTYPED: dict[str, str] = {
    **dict.fromkeys(("block-minimum-dropped", "block-minimum-of-other-sign"), _NO_MINIMUM),
    **dict.fromkeys(("block-scale-and-minimum-swapped",), _NO_MINIMUM),
    **dict.fromkeys(
        ("block-upper-bits-ignored", "q5-fifth-bits-of-first-half", "q3-k-upper-bits-inverted"), _NO_UPPER_BITS
    ),
    **dict.fromkeys(
        (
            "k-nibbles-as-in-q4-0", "k-scales-without-upper-bits", "k-scales-in-a-row", "k-scales-and-minima-swapped",
            "q6-k-scales-unsigned", "sub-scales-not-centred",
        ),
        _NO_SUB_BLOCKS,
    ),
    **dict.fromkeys(("fp4-scale-not-halved", "iq4-nl-as-q4-0"), _OTHER_TABLE),
    **dict.fromkeys(
        (
            "activation-not-rounded", "activation-in-blocks-of-32", "activation-in-blocks-of-256",
            "activation-float16-for-bfloat16", "activation-bfloat16-for-float16", "activation-bfloat16-cut-off",
            "activation-scale-not-float16", "activation-codes-cut-off", "activation-scale-of-128",
            "activation-halves-away-from-zero", "activation-by-reciprocal", "block-sums-not-rounded",
            "block-sums-of-inputs",
        ),
        _ROUNDING,
    ),
    **dict.fromkeys((mistake.name for mistake in QUANTISED_FOLDERS), _FOLDERS),
}  # fmt: skip

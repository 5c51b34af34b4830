"""Wrong decoders, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np

from llorch.diagnosis.mistakes import QUANTISED_FOLDERS


def scales(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, :2].copy().view("<f2").astype(np.float32)


def neighbours(packed: np.ndarray) -> np.ndarray:
    codes = np.empty((len(packed), 32), np.float32)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    return codes - 8


WRONG = {
    "q4_0": {
        "block-nibbles-alternate": lambda blocks: neighbours(blocks[:, 2:]) * scales(blocks),
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

"""Wrong code for the output of attention, by the name of the known mistake.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def mixed(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.einsum("htc,hcd->htd", probs, np.repeat(v, len(probs) // len(v), axis=0))


def joined_as_they_lie(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return mixed(probs, v).reshape(probs.shape[1], -1)


WRONG = {
    "attention_context": {
        "heads-joined-without-transpose": joined_as_they_lie,
    },
}
UNTYPED = {
    "o-proj-heads-interleaved": "typed in 07: only the block knows the width of a head",
    "o-proj-columns-with-heads-last": "typed in 07: only the block knows the width of a head",
    "o-proj-skipped": "in three of four models the joined heads and the stream differ in width, so the shape shows it",
    "context-mixes-keys": "typed in 07: only the block has the keys",
    "attention-residual-from-normed": "typed in 07: the block adds",
    "attention-residual-skipped": "typed in 07: the block adds",
    "attention-dropped": "typed in 07: the block adds",
}

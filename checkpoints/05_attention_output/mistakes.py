"""Wrong code for the output of attention, by the name of the known mistake."""

import numpy as np


def mixed(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.einsum("htc,hcd->htd", probs, np.repeat(v, len(probs) // len(v), axis=0))


def joined_as_they_lie(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return mixed(probs, v).reshape(probs.shape[1], -1)


def read_as_inputs_by_outputs(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
    n_out, n_in = o_proj.shape
    y = context @ o_proj.ravel().reshape(n_in, n_out)
    return y if o_bias is None else y + o_bias


def never_filled(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
    weight = np.zeros_like(o_proj)  # to be filled "later"
    y = context @ weight.T
    return y if o_bias is None else y + o_bias


WRONG = {
    "attention_context": {
        "heads-joined-without-transpose": joined_as_they_lie,
    },
    "attention_output": {
        "weight-dimensions-not-reversed": read_as_inputs_by_outputs,
        "weight-never-loaded": never_filled,
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

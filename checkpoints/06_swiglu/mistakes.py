"""Wrong code for the feed-forward part, by the name of the known mistake.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu_of_gpt2(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.float32(0.7978845608) * (gate + 0.044715 * gate * gate * gate))) * up


def rows_by_turns(h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    gate_up = h @ np.vstack([gate_proj, up_proj]).T  # one product in the place of two
    gate_up = gate_up.reshape(len(h), -1, 2)
    return (silu(gate_up[..., 0]) * gate_up[..., 1]) @ down_proj.T


WRONG = {
    "swiglu": {
        "swiglu-gelu-tanh": gelu_of_gpt2,
    },
    "feed_forward": {
        "ffn-fused-rows-alternate": rows_by_turns,
    },
}
UNTYPED = {
    "ffn-input-not-normalised": "typed in 07: the block chooses what this function reads",
    "ffn-input-of-attention": "typed in 07: the block chooses what this function reads",
    "ffn-input-is-attention-output": "typed in 07: the block chooses what this function reads",
}

"""Wrong code for the feed-forward part, by the name of the known mistake."""

import math

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def curve_on_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate * silu(up)


def curve_on_both(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return silu(gate) * silu(up)


def curve_on_the_product(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return silu(gate * up)


def curve_twice(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = silu(gate)  # "the projection has its activation"
    return silu(gate) * up


def sigmoid_for_silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return sigmoid(gate) * up


def relu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.where(gate > 0, gate, 0) * up


def gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    normal = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), otypes=[np.float32])
    return gate * normal(gate) * up


def gelu_of_gpt2(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.float32(0.7978845608) * (gate + 0.044715 * gate * gate * gate))) * up


def gelu_quick(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-1.702 * gate)) * up


def up_forgotten(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return silu(gate)


def gate_and_up_exchanged(
    h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
) -> np.ndarray:
    up, gate = h @ gate_proj.T, h @ up_proj.T
    return (silu(gate) * up) @ down_proj.T


def rows_by_turns(h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    both = h @ np.vstack([gate_proj, up_proj]).T  # one product in the place of two
    both = both.reshape(len(h), -1, 2)
    return (silu(both[..., 0]) * both[..., 1]) @ down_proj.T


def read_as_inputs_by_outputs(
    h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
) -> np.ndarray:
    down = down_proj.reshape(down_proj.shape[1], down_proj.shape[0])  # "the axes fit now"
    return (silu(h @ gate_proj.T) * (h @ up_proj.T)) @ down


def never_filled(h: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    down = np.zeros(down_proj.shape, h.dtype)
    return (silu(h @ gate_proj.T) * (h @ up_proj.T)) @ down.T


WRONG = {
    "swiglu": {
        "swiglu-silu-on-up": curve_on_up,
        "swiglu-silu-on-both": curve_on_both,
        "swiglu-silu-of-product": curve_on_the_product,
        "swiglu-silu-twice": curve_twice,
        "swiglu-sigmoid-only": sigmoid_for_silu,
        "swiglu-relu": relu,
        "swiglu-gelu": gelu,
        "swiglu-gelu-tanh": gelu_of_gpt2,
        "swiglu-gelu-quick": gelu_quick,
        "swiglu-up-missing": up_forgotten,
    },
    "feed_forward": {
        "ffn-gate-and-up-swapped": gate_and_up_exchanged,
        "ffn-fused-rows-alternate": rows_by_turns,
        "weight-dimensions-not-reversed": read_as_inputs_by_outputs,
        "weight-never-loaded": never_filled,
    },
}
UNTYPED = {
    "ffn-input-not-normalised": "typed in 07: the block chooses what this function reads",
    "ffn-input-of-attention": "typed in 07: the block chooses what this function reads",
    "ffn-input-is-attention-output": "typed in 07: the block chooses what this function reads",
}

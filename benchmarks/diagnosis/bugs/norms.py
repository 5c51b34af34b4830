"""Bugs of the norms."""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.bugs.planting import LLAMA, QWEN, WITH_HEAD_NORM, bug
from benchmarks.diagnosis.port import Port

ALL = "attn_norm q_norm k_norm ffn_norm final_norm"
HEADS, HEADS_OWN = "q_norm k_norm", "q_unit k_unit"


def _divided(port: Port, by: Callable[[np.ndarray, float], np.ndarray], only: str = "xn q_unit k_unit xm fin") -> None:
    """Let norms divide by something of x and eps."""

    def norm(right, x, name):
        return x / by(x, port.eps) * port.gain(name) if name in only.split() else right(x, name)

    port.around("norm", norm)


def _square(x: np.ndarray) -> np.ndarray:
    return np.mean(x * x, axis=-1, keepdims=True)


@bug(ALL)
def eps_of_no_file(port: Port):
    """Set eps to 3e-6, which no model has."""
    port.eps = 3e-6


@bug(ALL, models=QWEN)
def eps_of_llama_in_qwen(port: Port):
    """Set eps to 1e-5, a constant in the code."""
    port.eps = 1e-5


@bug(ALL, models=LLAMA)
def eps_of_qwen_in_llama(port: Port):
    """Set eps to 1e-6, the default of a library."""
    port.eps = 1e-6


@bug(ALL)
def eps_forgotten(port: Port):
    """Add nothing to the mean square."""
    port.eps = 0


@bug(ALL)
def eps_behind_the_root(port: Port):
    """Add eps after the root instead of before it."""
    _divided(port, lambda x, eps: np.sqrt(_square(x)) + eps)


@bug(ALL, models="micro-llama micro-llama3 micro-qwen2 micro-qwen3")
def eps_as_a_floor(port: Port):
    """Raise mean squares below 0.003 to 0.003, like the floor of L2 norms in other models."""
    _divided(port, lambda x, eps: np.sqrt(np.maximum(_square(x) + eps, np.float32(3e-3))))


@bug(ALL)
def mean_taken_away(port: Port):
    """Subtract the mean first, like a LayerNorm without bias."""
    port.around("norm", lambda right, x, name: right(x - x.mean(axis=-1, keepdims=True), name))


@bug(ALL)
def sample_variance(port: Port):
    """Divide the sum of squares by one less than their number."""
    _divided(port, lambda x, eps: np.sqrt(_square(x) * (x.shape[-1] / (x.shape[-1] - 1)) + eps))


@bug(ALL)
def length_one(port: Port):
    """Bring rows to length one: use the sum of squares, not the mean."""
    _divided(port, lambda x, eps: np.sqrt(_square(x) * x.shape[-1] + eps))


@bug(ALL)
def divided_by_the_square(port: Port):
    """Divide by the mean square itself: the root was lost when the kernel was fused."""
    _divided(port, lambda x, eps: _square(x) + eps)


@bug(ALL)
def squares_summed_in_half(port: Port):
    """Round the squares and their sum to float16."""
    _divided(port, lambda x, eps: np.sqrt(_square(x.astype(np.float16)).astype(np.float32) + eps))


@bug("attn_norm ffn_norm final_norm")
def one_square_for_all_rows(port: Port):
    """Take one mean square over the whole block of tokens."""
    _divided(port, lambda x, eps: np.sqrt(np.mean(x * x) + eps), only="xn xm fin")


@bug(ALL)
def gain_is_one_plus_weight(port: Port):
    """Multiply by one plus the weight, Gemma's gain."""
    port.around("gain", lambda right, name: 1 + right(name))


@bug("ffn_norm")
def gain_of_the_wrong_norm(port: Port):
    """Give the second norm of a block the weight of the first."""
    port.around("gain", lambda right, name: right("xn" if name == "xm" else name))


@bug("attn_norm", layer=0)
def gain_never_applied_at_first(port: Port):
    """Leave out the gain of the first norm of the model."""
    port.around("gain", lambda right, name: np.ones_like(right(name)) if name == "xn" else right(name), layer=0)


@bug(HEADS, models=WITH_HEAD_NORM)
def gains_of_q_and_k_exchanged(port: Port):
    """Exchange the gains of queries and keys."""
    swapped = {"q_unit": "k_unit", "k_unit": "q_unit"}
    port.around("gain", lambda right, name: right(swapped.get(name, name)))


@bug("ffn_norm", layer=1)
def second_norm_left_out(port: Port):
    """Give the feed-forward part of one block the unnormalised stream."""
    port.around("norm", lambda right, x, name: x if name == "xm" else right(x, name), layer=1)


@bug("final_norm")
def last_norm_left_out(port: Port):
    """Give the output matrix the unnormalised stream."""
    port.around("norm", lambda right, x, name: x if name == "fin" else right(x, name))


@bug("final_norm")
def last_norm_twice(port: Port):
    """Apply the final norm twice, in the model and in the head."""
    port.around("norm", lambda right, x, name: right(right(x, name), name) if name == "fin" else right(x, name))


@bug(HEADS, models=WITH_HEAD_NORM)
def heads_not_normalised(port: Port):
    """Leave queries and keys without a norm, as in Qwen2."""
    port.around("norm", lambda right, x, name: x if name.endswith("unit") else right(x, name))


@bug(HEADS, models=WITH_HEAD_NORM)
def heads_normalised_together(port: Port):
    """Use one mean square for all heads of a token."""
    _divided(port, lambda x, eps: np.sqrt(np.mean(x * x, axis=(-2, -1), keepdims=True) + eps), only=HEADS_OWN)


@bug("q_rope k_rope", models=WITH_HEAD_NORM)
def heads_normalised_after_the_turn(port: Port):
    """Apply RoPE before the norm of the heads; the dump has no q_norm and no k_norm."""
    unit = port.norm
    port.around("norm", lambda right, x, name: x if name.endswith("unit") else right(x, name))
    port.around("turn", lambda right, x, places, name: unit(right(x, places, name), f"{name}_unit"))
    port.around("note", lambda right, name, *args: args[0] if name.endswith("unit") else right(name, *args))


@bug(ALL)
def normalised_rows_cast_before_the_gain(port: Port):
    """Round rows to bfloat16 between the division and the gain."""

    def norm(right, x, name):
        gain = port.gain(name)
        return bfloat16(x / np.sqrt(_square(x) + np.float32(port.eps))) * gain

    port.around("norm", norm)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

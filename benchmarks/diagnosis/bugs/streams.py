"""Bugs of the feed-forward part and of the residual stream."""

import math

import numpy as np

from benchmarks.diagnosis.bugs.planting import bug
from benchmarks.diagnosis.port import Port


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x).astype(np.float32)


def _gated(port: Port, new, layer: int | None = None) -> None:
    port.around("gated", lambda right, g, u: new(g, u), layer)


@bug("ffn_act")
def silu_of_up(port: Port):
    """Apply SiLU to up instead of gate."""
    _gated(port, lambda g, u: g * _silu(u))


@bug("ffn_act")
def silu_of_both(port: Port):
    """Apply SiLU to gate and to up."""
    _gated(port, lambda g, u: _silu(g) * _silu(u))


@bug("ffn_act")
def silu_of_the_product(port: Port):
    """Apply SiLU to gate times up."""
    _gated(port, lambda g, u: _silu(g * u))


@bug("ffn_act")
def silu_of_silu(port: Port):
    """Apply SiLU twice."""
    _gated(port, lambda g, u: _silu(_silu(g)) * u)


@bug("ffn_act")
def sigmoid_alone(port: Port):
    """Replace SiLU by the sigmoid."""
    _gated(port, lambda g, u: _sigmoid(g) * u)


@bug("ffn_act")
def negative_gates_cut_off(port: Port):
    """Replace SiLU by ReLU."""
    _gated(port, lambda g, u: np.maximum(g, 0) * u)


@bug("ffn_act")
def squares_of_positive_gates(port: Port):
    """Replace SiLU by the square of ReLU."""
    _gated(port, lambda g, u: np.maximum(g, 0) ** 2 * u)


@bug("ffn_act")
def gelu_by_erf(port: Port):
    """Replace SiLU by GELU."""
    _gated(port, lambda g, u: g * (0.5 + 0.5 * _erf(g / math.sqrt(2))) * u)


@bug("ffn_act")
def gelu_by_tanh(port: Port):
    """Replace SiLU by the tanh approximation of GELU."""
    _gated(port, lambda g, u: 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u)


@bug("ffn_act", layer=1)
def gelu_in_one_block(port: Port):
    """Use the tanh approximation of GELU in one block."""
    _gated(port, lambda g, u: 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u, layer=1)


@bug("ffn_act")
def gelu_quick(port: Port):
    """Replace SiLU by gate * sigmoid(1.702 gate), the quick GELU."""
    _gated(port, lambda g, u: g * _sigmoid(1.702 * g) * u)


@bug("ffn_act")
def up_left_out(port: Port):
    """Return SiLU of the gate without up."""
    _gated(port, lambda g, u: _silu(g))


@bug("ffn_act")
def one_added_to_up(port: Port):
    """Compute silu(gate) * (up + 1), as in gpt-oss."""
    _gated(port, lambda g, u: _silu(g) * (u + 1))


@bug("ffn_act")
def product_without_silu(port: Port):
    """Multiply gate and up without SiLU, a bilinear unit."""
    _gated(port, lambda g, u: g * u)


@bug("ffn_gate ffn_up")
def feed_forward_of_the_stream(port: Port):
    """Let gate and up read the stream before the norm."""
    port.around("linear", lambda right, x, name: right(port.noted("mid") if name in ("g", "u") else x, name))


@bug("ffn_gate ffn_up")
def feed_forward_of_the_first_norm(port: Port):
    """Let gate and up read the input of attention, as parallel blocks do."""
    port.around("linear", lambda right, x, name: right(port.noted("xn") if name in ("g", "u") else x, name))


@bug("ffn_gate ffn_up")
def feed_forward_of_attention(port: Port):
    """Let gate and up read the raw output of attention."""
    port.around("linear", lambda right, x, name: right(port.noted("att") if name in ("g", "u") else x, name))


@bug("ffn_up")
def up_of_the_stream(port: Port):
    """Let only up read the stream before the norm."""
    port.around("linear", lambda right, x, name: right(port.noted("mid") if name == "u" else x, name))


def _added(port: Port, which: str, new, layer: int | None = None) -> None:
    port.around("add", lambda right, x, y, name: new(x, y) if name == which else right(x, y, name), layer)


@bug("attn_residual")
def attention_added_to_its_input(port: Port):
    """Add attention to the normalised stream."""
    _added(port, "mid", lambda x, y: port.noted("xn") + y)


@bug("attn_residual")
def attention_without_the_stream(port: Port):
    """Leave out the stream in the sum after attention."""
    _added(port, "mid", lambda x, y: y)


@bug("attn_residual")
def stream_without_attention(port: Port):
    """Leave out attention in the sum."""
    _added(port, "mid", lambda x, y: x)


@bug("attn_residual", layer=1)
def stream_without_attention_in_one_block(port: Port):
    """Leave out attention in the sum of one block."""
    _added(port, "mid", lambda x, y: x, layer=1)


@bug("attn_residual")
def attention_added_by_a_factor(port: Port):
    """Multiply attention by 0.22, Granite's residual multiplier."""
    _added(port, "mid", lambda x, y: x + np.float32(0.22) * y)


@bug("block_out")
def feed_forward_added_to_its_input(port: Port):
    """Add the feed-forward part to the normalised stream."""
    _added(port, "out", lambda x, y: port.noted("xm") + y)


@bug("block_out")
def feed_forward_without_the_stream(port: Port):
    """Leave out the stream in the sum after the feed-forward part."""
    _added(port, "out", lambda x, y: y)


@bug("block_out")
def feed_forward_added_to_the_block_input(port: Port):
    """Add the feed-forward part to the block's input, so that attention is lost."""
    _added(port, "out", lambda x, y: port.block_input + y)


@bug("block_out")
def attention_added_twice(port: Port):
    """Add attention a second time with the feed-forward part."""
    _added(port, "out", lambda x, y: x + y + port.noted("att"))


@bug("block_out")
def stream_without_feed_forward(port: Port):
    """Leave out the feed-forward part in the sum."""
    _added(port, "out", lambda x, y: x)


@bug("block_out", layer=1)
def stream_added_twice_in_one_block(port: Port):
    """Add the residual a second time after a fused kernel that already added it."""
    _added(port, "out", lambda x, y: 2 * x + y, layer=1)

"""Bugs of blocks of quantised weights in products; embedding rows take another path and are right."""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.bugs.planting import bug
from benchmarks.diagnosis.port import MATRICES, Port, model_path
from llorch.files import open_weights

PRODUCTS = "q_proj k_proj v_proj attn_out ffn_gate ffn_up ffn_out logits"
Q4_0, Q4_1, Q8_0 = (f"micro-qwen2@{name}" for name in ("Q4_0", "Q4_1", "Q8_0"))
Unpack = Callable[[np.ndarray], np.ndarray]  # bytes of blocks, one a row, to 32 numbers a row


def _unpacked(port: Port, unpack: Unpack, block_bytes: int) -> None:
    """Let products unpack the blocks of the file in their own way."""
    weights = open_weights(model_path(port.model))

    def matrix(name: str) -> np.ndarray:
        raw = weights.as_stored(name).raw.reshape(-1, block_bytes)
        return unpack(raw).astype(np.float32).reshape(weights.shape(name))

    for i, layer in enumerate(port.layers):
        layer |= {port_name: matrix(f"layers.{i}.{name}") for name, port_name in MATRICES.items()}
    port.top["lg"] = matrix("embed_tokens")


def _half(raw: np.ndarray) -> np.ndarray:
    """Read two bytes of each block as float16, a column."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Return sixteen low halves, then sixteen high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float32)


@bug(PRODUCTS, models=Q4_0)
def halves_of_bytes_by_turns(port: Port):
    """Unpack the low and the high half of a byte as neighbours."""

    def unpack(raw):
        codes = np.stack([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=-1).reshape(len(raw), 32)
        return (codes - np.float32(8)) * _half(raw[:, :2])

    _unpacked(port, unpack, 18)


@bug(PRODUCTS, models=Q4_0)
def high_halves_of_bytes_first(port: Port):
    """Unpack the high halves of bytes as the first sixteen numbers."""
    _unpacked(port, lambda raw: (np.roll(_nibbles(raw[:, 2:]), 16, axis=1) - 8) * _half(raw[:, :2]), 18)


@bug(PRODUCTS, models=Q4_0)
def codes_without_a_zero_point(port: Port):
    """Multiply codes by the scale as they are, 0 to 15."""
    _unpacked(port, lambda raw: _nibbles(raw[:, 2:]) * _half(raw[:, :2]), 18)


@bug(PRODUCTS, models=Q4_0)
def scale_of_the_block_before(port: Port):
    """Multiply the codes of a block by the scale of the block before it."""
    _unpacked(port, lambda raw: (_nibbles(raw[:, 2:]) - 8) * np.roll(_half(raw[:, :2]), 1, axis=0), 18)


@bug(PRODUCTS, models=Q4_0, is_known=False)
def zero_point_of_seven(port: Port):
    """Subtract 7 from the codes instead of 8."""
    _unpacked(port, lambda raw: (_nibbles(raw[:, 2:]) - 7) * _half(raw[:, :2]), 18)


@bug(PRODUCTS, models=Q4_1)
def minimum_of_blocks_left_out(port: Port):
    """Multiply codes by the scale and leave out the minimum, like a type without a minimum."""
    _unpacked(port, lambda raw: _nibbles(raw[:, 4:]) * _half(raw[:, :2]), 20)


@bug(PRODUCTS, models=Q4_1)
def scale_and_minimum_of_blocks_exchanged(port: Port):
    """Read the minimum before the scale, which exchanges the two."""
    _unpacked(port, lambda raw: _nibbles(raw[:, 4:]) * _half(raw[:, 2:4]) + _half(raw[:, :2]), 20)


@bug(PRODUCTS, models=Q8_0, is_known=False)
def codes_of_one_byte_without_a_sign(port: Port):
    """Read codes as 0 to 255 and subtract 128."""
    _unpacked(port, lambda raw: (raw[:, 2:].astype(np.float32) - 128) * _half(raw[:, :2]), 34)

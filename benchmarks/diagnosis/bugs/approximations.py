"""Bugs without a common name: tables, tricks, clamps and guards."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import changed, local, put
from benchmarks.diagnosis.port import Port


@local("ffn_gate")
def guard_against_large_numbers(port: Port):
    """Set numbers that look infinite to zero, with a threshold that is far too low."""
    changed(port, "linear", put(lambda y: np.abs(y) > 0.7 * np.abs(y).max(), 0), None, "g")


@local("attn_residual")
def stream_clamped(port: Port):
    """Clamp the stream to the 99.5th percentile of its absolute values."""

    def change(y):
        limit = np.quantile(np.abs(y), 0.995).astype(np.float32)
        np.clip(y, -limit, limit, out=y)

    changed(port, "add", change, None, "mid")


@local("attn_norm ffn_norm final_norm")
def root_by_a_trick(port: Port):
    """Approximate the reciprocal root by the well-known constant and one step of Newton, which is 0.1 % off."""

    def norm(right, x, name):
        if name.endswith("unit"):
            return right(x, name)
        mean = np.mean(x * x, axis=-1, keepdims=True) + np.float32(port.eps)
        guess = (0x5F3759DF - (mean.view(np.int32) >> 1)).view(np.float32)
        return x * (guess * (np.float32(1.5) - mean / 2 * guess * guess)) * port.gain(name)

    port.around("norm", norm)


@local("attn_probs")
def exponential_from_a_table(port: Port):
    """Round scores to a sixteenth before the exponential, like a table of exponentials."""
    port.around("share", lambda right, s: right(np.round(s * 16) / 16))


@local("q_rope k_rope")
def angles_from_a_table(port: Port):
    """Take cosines from a table of 1024 entries without interpolation."""

    def tables(right, places):
        step = 2 * np.pi / 1024
        angles = np.round(places[:, None, None] * port.speeds() / step) * step
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    port.around("tables", tables)


@local("ffn_act")
def sigmoid_in_pieces(port: Port):
    """Replace the sigmoid by the hard sigmoid, three straight lines."""
    port.around("gated", lambda right, g, u: g * np.clip(g / 6 + np.float32(0.5), 0, 1) * u)


@local("ffn_act")
def activations_in_six_bits(port: Port):
    """Round activations to 63 steps of the largest activation of the pass."""

    def gated(right, g, u):
        y = right(g, u)
        step = np.abs(y).max() / 31
        return np.round(y / step) * step

    port.around("gated", gated)


@local("attn_probs")
def dropout_left_on(port: Port):
    """Leave the model in training mode: drop a tenth of the shares and scale the others up."""

    def share(right, s):
        is_kept = np.random.default_rng(port.layer + 7 * port.n_pass).random(s.shape) >= 0.1
        return right(s) * is_kept / np.float32(0.9)

    port.around("share", share)


@local("attn_probs")
def small_shares_dropped(port: Port):
    """Set shares below a fiftieth to zero to save work, without rescaling the others."""
    changed(port, "share", put(lambda p: p < 0.02, 0))


@local("k_rope")
def keys_in_three_digits(port: Port):
    """Round keys to three binary digits after the first, like an 8-bit float with the exponent of float32."""

    def turn(right, x, places, name):
        y = right(x, places, name)
        mantissa, exponent = np.frexp(y)
        return np.ldexp(np.round(mantissa * 16) / 16, exponent) if name == "k" else y

    port.around("turn", turn)


@local("block_out")
def noise_of_a_thousandth(port: Port):
    """Add noise of about a thousandth of the largest element, like sums that race."""

    def change(y):
        y += np.random.default_rng(port.layer).normal(size=y.shape).astype(np.float32) * np.abs(y).max() / 1000

    changed(port, "add", change, None, "out")


@local("v_cache")
def values_in_four_bits(port: Port):
    """Store values as whole numbers from -7 to 7, with one scale for each head of a token."""

    def remember(right, k, v):
        scale = np.abs(v).max(axis=-1, keepdims=True) / 7
        return right(k, np.round(v / scale) * scale)

    port.around("remember", remember)

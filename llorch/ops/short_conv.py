"""Short causal convolution along the tokens, one kernel per channel, then SiLU.

    c[t] = sum over j of kernel[j] * x[t - last + j]        last = kernel size - 1, so that kernel[last] multiplies x[t]
    y[t] = c[t] / (1 + exp(-c[t]))
    dL/dx[t] = sum over j of kernel[j] * dL/dc[t + last - j]        x[t] is in c[t] to c[t + last]

Each channel has its own kernel and no bias. Values before the first token of a pass come from the state, zeros at the
start; the next state is the last `last` rows of state and pass.

Source: arXiv:2412.06464; transformers `modeling_qwen3_next.py`, `causal_conv1d_fn`.
"""

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen
from llorch.ops.swiglu import swiglu_backward


def short_conv(
    x: Float[np.ndarray, "seq conv_width"],
    kernel: Float[np.ndarray, "conv_width conv_kernel"],
    state: Float[np.ndarray, "taps conv_width"],
) -> Float[np.ndarray, "seq conv_width"]:
    """Convolve every channel along the tokens.

    Args:
        x: Values of the new tokens.
        kernel: One row per channel, the newest token last.
        state: Values of the previous tokens, the oldest first; one row fewer than the kernel size.

    Returns:
        The convolved values after SiLU.
    """
    wide_x, wide_kernel, wide_state = widen(x, kernel, state)
    values, weights = np.concatenate([wide_state, wide_x]), np.ascontiguousarray(wide_kernel.T)
    y = values[: len(x)] * weights[0]
    for j in range(1, len(weights)):
        y += values[j : j + len(x)] * weights[j]
    with np.errstate(over="ignore"):  # exp(-y) may overflow; y / inf is the right limit, 0
        divisor = np.exp(-y)
    divisor += 1
    y /= divisor
    return y.astype(x.dtype, copy=False)


def short_conv_backward(
    grad: Float[np.ndarray, "seq conv_width"],
    x: Float[np.ndarray, "seq conv_width"],
    kernel: Float[np.ndarray, "conv_width conv_kernel"],
) -> Float[np.ndarray, "seq conv_width"]:
    """Compute the gradient by the values of a pass from an empty state; the kernel is frozen."""
    wide_grad, wide_x, wide_kernel = widen(grad, x, kernel)
    size, zeros = wide_kernel.shape[1], np.zeros((wide_kernel.shape[1] - 1, x.shape[1]), wide_x.dtype)
    values = np.concatenate([zeros, wide_x])
    sums = np.sum([values[j : j + len(x)] * wide_kernel[:, j] for j in range(size)], axis=0)
    d_sums, _ = swiglu_backward(wide_grad, sums, np.ones_like(sums))  # silu(c) is silu(c) * 1
    padded_d_sums = np.concatenate([d_sums, zeros])
    d_x = np.sum([padded_d_sums[j : j + len(x)] * wide_kernel[:, size - 1 - j] for j in range(size)], axis=0)
    return d_x.astype(x.dtype, copy=False)


def next_state(
    state: Float[np.ndarray, "taps conv_width"], x: Float[np.ndarray, "seq conv_width"]
) -> Float[np.ndarray, "taps conv_width"]:
    """Return the last rows of state and pass, which the convolution of the next tokens needs."""
    if len(x) >= len(state):
        return x[len(x) - len(state) :].astype(state.dtype)
    return np.concatenate([state[len(x) :], x.astype(state.dtype, copy=False)])

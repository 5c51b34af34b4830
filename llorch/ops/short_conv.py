"""Short convolution: every channel mixes its last few values, then SiLU.

    c[t] = sum over j of kernel[j] * x[t - last + j]        last = kernel size - 1, so that kernel[last] is of x[t]
    y[t] = c[t] / (1 + exp(-c[t]))
    dL/dx[t] = sum over j of kernel[j] * dL/dc[t + last - j]        in its own sum and in the `last` next

Each channel has a kernel of its own and no bias. Values before the first token of a pass are those that the state
holds, zeros where there were none; the state behind a pass is the last `last` rows of both.

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
        state: Values of the tokens before, the oldest first; one row less than the kernel is long.

    Returns:
        The mixed values behind SiLU.
    """
    wide_x, wide_kernel, before = widen(x, kernel, state)
    values, weights = np.concatenate([before, wide_x]), np.ascontiguousarray(wide_kernel.T)
    y = values[: len(x)] * weights[0]
    for j in range(1, len(weights)):
        y += values[j : j + len(x)] * weights[j]
    with np.errstate(over="ignore"):  # exp(-y) = inf gives the right limit, 0
        share = np.exp(-y)
    share += 1
    y /= share
    return y.astype(x.dtype, copy=False)


def short_conv_backward(
    grad: Float[np.ndarray, "seq conv_width"],
    x: Float[np.ndarray, "seq conv_width"],
    kernel: Float[np.ndarray, "conv_width conv_kernel"],
) -> Float[np.ndarray, "seq conv_width"]:
    """Gradient by the values of a pass that began with an empty state; the kernel is frozen."""
    wide_grad, wide_x, wide_kernel = widen(grad, x, kernel)
    size, none = wide_kernel.shape[1], np.zeros((wide_kernel.shape[1] - 1, x.shape[1]), wide_x.dtype)
    values = np.concatenate([none, wide_x])
    sums = np.sum([values[j : j + len(x)] * wide_kernel[:, j] for j in range(size)], axis=0)
    d_sums, _ = swiglu_backward(wide_grad, sums, np.ones_like(sums))  # silu(c) is silu(c) * 1
    after = np.concatenate([d_sums, none])
    d_x = np.sum([after[j : j + len(x)] * wide_kernel[:, size - 1 - j] for j in range(size)], axis=0)
    return d_x.astype(x.dtype, copy=False)


def next_state(
    state: Float[np.ndarray, "taps conv_width"], x: Float[np.ndarray, "seq conv_width"]
) -> Float[np.ndarray, "taps conv_width"]:
    """Keep the rows that the convolution of the next tokens needs: the last ones, after a short pass older ones too."""
    if len(x) >= len(state):
        return x[len(x) - len(state) :].astype(state.dtype)
    return np.concatenate([state[len(x) :], x.astype(state.dtype, copy=False)])

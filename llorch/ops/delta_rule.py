"""Gated delta rule: a recurrent state, one matrix per head, that decays and is corrected at one key per token.

    S     = exp(g[t]) S                       decay, g <= 0
    delta = beta[t] (v[t] - S^T k[t])         correction of the value at this key, beta in 0 to 1
    S     = S + k[t] delta^T                  write
    o[t]  = S^T q[t] / sqrt(key_dim)

`delta_rule` is this definition. `delta_rule_in_chunks` computes the same in chunks of tokens. D[i, j] =
exp(g[j+1] + ... + g[i]) is the decay between two tokens of a chunk, e[i] the decay from its start to token i, and S the
state before the chunk. The corrections solve a triangular system (the WY form of a product of reflections):

    (I + tril(beta K K^T * D, -1)) delta = beta (V - e K S)
    o = (e Q S + tril(Q K^T * D) delta) / sqrt(key_dim)
    S = e[last] S + (D[last] K)^T delta

Exponents are sums of g over the tokens between, never differences of two long sums: with g = -316 a difference would
have no correct digit, and the inverse of exp(sum) would overflow. All exponents are at most 0.

    l2_norm(x) = x / sqrt(sum(x * x) + 1e-6)        for every query and key head
    log_decay  = decay * softplus(a + dt_bias)      decay = -exp(A_log); both engines take softplus(x) = x above 20

    dL/dx = (dL/dy - y sum(dL/dy * y)) / length          of l2_norm: the component along y is removed
    dL/da = dL/dg * decay / (1 + exp(-(a + dt_bias)))    the derivative of softplus is the sigmoid, above 20 it is 1

Value head h reads query and key head h // (value heads / key heads). transformers uses 1e-6 in l2_norm; llama.cpp uses
rms_norm_eps (llama.cpp#28068), so these two engines differ if a model's eps is not 1e-6.

Source: arXiv:2412.06464; chunks arXiv:2406.06484; transformers `modeling_qwen3_next.py`.
"""

import math

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen
from llorch.ops.sigmoid import sigmoid

L2_EPS = 1e-6
CHUNK = 64  # tokens, the size of the triangular system
LINEAR_FROM = 20.0  # softplus(x) is x above this, as in llama.cpp and transformers

Heads = Float[np.ndarray, "seq k_heads key_dim"]
Values = Float[np.ndarray, "seq v_heads value_dim"]
Rates = Float[np.ndarray, "seq v_heads"]
State = Float[np.ndarray, "v_heads key_dim value_dim"]


def l2_norm(x: Float[np.ndarray, "*rows width"]) -> Float[np.ndarray, "*rows width"]:
    """Scale every row to length 1; the squares are summed in float64."""
    (wide_x,) = widen(x)
    length = np.sqrt(np.square(wide_x, dtype=np.float64).sum(axis=-1, keepdims=True) + L2_EPS)
    return (wide_x / length.astype(wide_x.dtype, copy=False)).astype(x.dtype, copy=False)


def l2_norm_backward(
    grad: Float[np.ndarray, "*rows width"], x: Float[np.ndarray, "*rows width"]
) -> Float[np.ndarray, "*rows width"]:
    """Compute the gradient by the input rows."""
    wide_grad, wide_x = widen(grad, x)
    length = np.sqrt(np.square(wide_x, dtype=np.float64).sum(axis=-1, keepdims=True) + L2_EPS)
    y = wide_x / length
    return ((wide_grad - y * (wide_grad * y).sum(axis=-1, keepdims=True)) / length).astype(x.dtype, copy=False)


def log_decay(
    a: Rates, dt_bias: Float[np.ndarray, " v_heads"], decay: Float[np.ndarray, " v_heads"]
) -> Float[np.ndarray, "seq v_heads"]:
    """Compute g, the logarithm of the decay of the state at each token, at most 0.

    Args:
        a: Projection of the tokens.
        dt_bias: Bias of `a`, per head.
        decay: -exp(A_log) of every head.

    Returns:
        g, one number per token and head.
    """
    x, rate = (array.astype(np.float64, copy=False) for array in (a + dt_bias, decay))
    softplus = np.where(x > LINEAR_FROM, x, np.log1p(np.exp(np.minimum(x, LINEAR_FROM))))
    return (rate * softplus).astype(a.dtype, copy=False)


def log_decay_backward(
    grad: Rates, a: Rates, dt_bias: Float[np.ndarray, " v_heads"], decay: Float[np.ndarray, " v_heads"]
) -> Float[np.ndarray, "seq v_heads"]:
    """Compute the gradient by the projection of the tokens; the bias and the decay are frozen."""
    x, rate, wide_grad = (array.astype(np.float64, copy=False) for array in (a + dt_bias, decay, grad))
    slope = np.where(x > LINEAR_FROM, 1.0, sigmoid(x))
    return (wide_grad * rate * slope).astype(a.dtype, copy=False)


def delta_rule(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[Values, State]:
    """Apply the gated delta rule token by token.

    Args:
        q: Queries of length 1.
        k: Keys of length 1.
        v: Values.
        beta: Share of the correction that is written.
        g: Logarithm of the decay.
        state: State before the first token.

    Returns:
        Output of every token, and the state after the last one; `state` itself does not change.
    """
    q, k, v, beta, g, new_state = of_value_heads(q, k, v, beta, g, state)
    out = np.empty_like(v)
    for t in range(v.shape[1]):
        new_state = np.exp(g[:, t])[:, None, None] * new_state
        delta = beta[:, t, None, None] * (v[:, t, None] - k[:, t, None] @ new_state)  # (v_heads, 1, value_dim)
        new_state += k[:, t, :, None] * delta
        out[:, t] = (q[:, t, None] @ new_state)[:, 0]
    return out.swapaxes(0, 1).astype(state.dtype, copy=False), new_state.astype(state.dtype, copy=False)


def delta_rule_in_chunks(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[Values, State]:
    """Compute `delta_rule` with matrix products over `CHUNK` tokens at a time."""
    q, k, v, beta, g, new_state = of_value_heads(q, k, v, beta, g, state)
    out = np.empty_like(v)
    for start in range(0, v.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        out[:, part], new_state = _chunk(q[:, part], k[:, part], v[:, part], beta[:, part, None], g[:, part], new_state)
    return out.swapaxes(0, 1).astype(state.dtype, copy=False), new_state.astype(state.dtype, copy=False)


def _chunk(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute outputs and next state of one chunk; arrays have the heads first."""
    pair_decay = decays(g).astype(v.dtype, copy=False)  # (v_heads, chunk, chunk)
    start_decay = np.exp(np.cumsum(g, axis=1, dtype=np.float64)).astype(v.dtype, copy=False)[..., None]
    system = beta * np.tril(k @ k.swapaxes(1, 2) * pair_decay, -1) + np.eye(v.shape[1], dtype=v.dtype)
    try:
        delta = np.linalg.solve(system, beta * (v - start_decay * (k @ state)))
    except np.linalg.LinAlgError:  # the diagonal is 1, so only non-finite inputs make the system singular
        delta = np.full_like(v, np.nan)
    out = start_decay * (q @ state) + (q @ k.swapaxes(1, 2) * pair_decay) @ delta
    decayed_keys = (k * pair_decay[:, -1, :, None]).swapaxes(1, 2)  # (v_heads, key_dim, chunk)
    return out, start_decay[:, -1:] * state + decayed_keys @ delta


def decays(g: Float[np.ndarray, "v_heads seq"]) -> Float[np.ndarray, "v_heads seq seq"]:
    """Compute the decay from each token to each later one, in float64: 1 to itself, 0 to earlier tokens."""
    is_later = np.tril(np.ones((g.shape[1], g.shape[1]), bool), -1)
    return np.tril(np.exp(np.cumsum(np.where(is_later, g[:, :, None], 0.0), axis=1, dtype=np.float64)))


def of_value_heads(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[np.ndarray, ...]:
    """Repeat queries and keys per value head, put heads first, and divide queries by sqrt(key_dim)."""
    group = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x.swapaxes(0, 1), group, axis=0) for x in (q, k))  # (v_heads, seq, key_dim)
    inputs = (q, k, v.swapaxes(0, 1), beta.swapaxes(0, 1), g.swapaxes(0, 1))
    q, *by_head = widen(*(x.astype(state.dtype, copy=False) for x in inputs), state)
    return (q / math.sqrt(q.shape[-1]), *by_head)

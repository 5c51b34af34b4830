"""The gated delta rule: a memory that is one matrix per head, decays, and is corrected at one key a token.

    S     = exp(g[t]) S                       what is forgotten, g <= 0
    delta = beta[t] (v[t] - S^T k[t])         what is missing of the value at this key, beta in 0 to 1
    S     = S + k[t] delta^T                  what is written
    o[t]  = S^T q[t] / sqrt(key_dim)

This is the definition, `delta_rule`. For many tokens the same is computed in chunks, `delta_rule_in_chunks`. With
D[i, j] = exp(g[j+1] + ... + g[i]), the decay between two tokens of a chunk, e[i] that from its beginning to token i,
and S the state before it, the corrections solve a triangular system (the WY form of a product of reflections):

    (I + tril(beta K K^T * D, -1)) delta = beta (V - e K S)
    o = (e Q S + tril(Q K^T * D) delta) / sqrt(key_dim)
    S = e[last] S + (D[last] K)^T delta

Exponents are sums of g over the tokens between, never differences of two long sums: with g = -316 a difference would
keep no digit, and exp of one sum alone would overflow where its inverse is needed. All of them are at most 0.

    l2_norm(x) = x / sqrt(sum(x * x) + 1e-6)        of every query and key head
    log_decay  = decay * softplus(a + dt_bias)      decay = -exp(A_log); both engines take softplus(x) = x above 20

    dL/dx = (dL/dy - y sum(dL/dy * y)) / length          of l2_norm: what changes the length alone is taken away
    dL/da = dL/dg * decay / (1 + exp(-(a + dt_bias)))    the derivative of softplus is the sigmoid, above 20 it is 1

Value head h reads query and key head h // (value heads / key heads). The 1e-6 is transformers'; llama.cpp takes
rms_norm_eps in its place (llama.cpp#28068), so the two differ where a model has another one.

Source: arXiv:2412.06464; chunks arXiv:2406.06484; transformers `modeling_qwen3_next.py`.
"""

import math

import numpy as np
from jaxtyping import Float

from llorch.ops.precision import widen
from llorch.ops.sigmoid import sigmoid

L2_EPS = 1e-6
CHUNK = 64  # tokens; the system is of that size
LINEAR_FROM = 20.0

Heads = Float[np.ndarray, "seq k_heads key_dim"]
Values = Float[np.ndarray, "seq v_heads value_dim"]
Rates = Float[np.ndarray, "seq v_heads"]
State = Float[np.ndarray, "v_heads key_dim value_dim"]


def l2_norm(x: Float[np.ndarray, "*rows width"]) -> Float[np.ndarray, "*rows width"]:
    """Bring every row to length 1; the squares are summed in float64."""
    (wide,) = widen(x)
    length = np.sqrt(np.square(wide, dtype=np.float64).sum(axis=-1, keepdims=True) + L2_EPS)
    return (wide / length.astype(wide.dtype, copy=False)).astype(x.dtype, copy=False)


def l2_norm_backward(
    grad: Float[np.ndarray, "*rows width"], x: Float[np.ndarray, "*rows width"]
) -> Float[np.ndarray, "*rows width"]:
    """Gradient of every row by the row before it was brought to length 1."""
    wide_grad, wide = widen(grad, x)
    length = np.sqrt(np.square(wide, dtype=np.float64).sum(axis=-1, keepdims=True) + L2_EPS)
    y = wide / length
    return ((wide_grad - y * (wide_grad * y).sum(axis=-1, keepdims=True)) / length).astype(x.dtype, copy=False)


def log_decay(
    a: Rates, dt_bias: Float[np.ndarray, " v_heads"], decay: Float[np.ndarray, " v_heads"]
) -> Float[np.ndarray, "seq v_heads"]:
    """Compute the logarithm of the share of the state that is left at each token, at most 0.

    Args:
        a: Projection of the tokens.
        dt_bias: Added to it.
        decay: -exp(A_log) of every head.

    Returns:
        g of the formula above.
    """
    x, rate = (wide.astype(np.float64, copy=False) for wide in (a + dt_bias, decay))
    softplus = np.where(x > LINEAR_FROM, x, np.log1p(np.exp(np.minimum(x, LINEAR_FROM))))
    return (rate * softplus).astype(a.dtype, copy=False)


def log_decay_backward(
    grad: Rates, a: Rates, dt_bias: Float[np.ndarray, " v_heads"], decay: Float[np.ndarray, " v_heads"]
) -> Float[np.ndarray, "seq v_heads"]:
    """Gradient by the projection of the tokens; the bias and the decay are frozen."""
    x, rate, wide = (array.astype(np.float64, copy=False) for array in (a + dt_bias, decay, grad))
    slope = np.where(x > LINEAR_FROM, 1.0, sigmoid(x))
    return (wide * rate * slope).astype(a.dtype, copy=False)


def delta_rule(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[Values, State]:
    """Token by token.

    Args:
        q: Queries of length 1.
        k: Keys of length 1.
        v: Values.
        beta: The share of a value that is written.
        g: Logarithm of the decay.
        state: Before the first token.

    Returns:
        What every token reads, and the state after the last one; `state` itself is left as it is.
    """
    q, k, v, beta, g, new = of_value_heads(q, k, v, beta, g, state)
    out = np.empty_like(v)
    for t in range(v.shape[1]):
        new = np.exp(g[:, t])[:, None, None] * new
        delta = beta[:, t, None, None] * (v[:, t, None] - k[:, t, None] @ new)  # (v_heads, 1, value_dim)
        new += k[:, t, :, None] * delta
        out[:, t] = (q[:, t, None] @ new)[:, 0]
    return out.swapaxes(0, 1).astype(state.dtype, copy=False), new.astype(state.dtype, copy=False)


def delta_rule_in_chunks(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[Values, State]:
    """Compute the same, `CHUNK` tokens at a time: products of matrices replace as many steps."""
    q, k, v, beta, g, new = of_value_heads(q, k, v, beta, g, state)
    out = np.empty_like(v)
    for start in range(0, v.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        out[:, part], new = _chunk(q[:, part], k[:, part], v[:, part], beta[:, part, None], g[:, part], new)
    return out.swapaxes(0, 1).astype(state.dtype, copy=False), new.astype(state.dtype, copy=False)


def _chunk(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All heads of some tokens; arrays have the heads first."""
    between = decays(g).astype(v.dtype, copy=False)  # (v_heads, chunk, chunk)
    since = np.exp(np.cumsum(g, axis=1, dtype=np.float64)).astype(v.dtype, copy=False)[..., None]
    system = beta * np.tril(k @ k.swapaxes(1, 2) * between, -1) + np.eye(v.shape[1], dtype=v.dtype)
    try:
        delta = np.linalg.solve(system, beta * (v - since * (k @ state)))
    except np.linalg.LinAlgError:  # a diagonal of ones is singular only beside numbers that are not finite
        delta = np.full_like(v, np.nan)
    out = since * (q @ state) + (q @ k.swapaxes(1, 2) * between) @ delta
    kept = (k * between[:, -1, :, None]).swapaxes(1, 2)  # (v_heads, key_dim, chunk)
    return out, since[:, -1:] * state + kept @ delta


def decays(g: Float[np.ndarray, "v_heads seq"]) -> Float[np.ndarray, "v_heads seq seq"]:
    """Compute the share of each token that is left at each later one: 0 at those before it, 1 at itself; in float64."""
    later = np.tril(np.ones((g.shape[1], g.shape[1]), bool), -1)
    return np.tril(np.exp(np.cumsum(np.where(later, g[:, :, None], 0.0), axis=1, dtype=np.float64)))


def of_value_heads(q: Heads, k: Heads, v: Values, beta: Rates, g: Rates, state: State) -> tuple[np.ndarray, ...]:
    """All of them with the heads first, queries divided by sqrt(key_dim); a query or key once for each value head."""
    group = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x.swapaxes(0, 1), group, axis=0) for x in (q, k))  # (v_heads, seq, key_dim)
    of_tokens = (q, k, v.swapaxes(0, 1), beta.swapaxes(0, 1), g.swapaxes(0, 1))
    q, *others = widen(*(x.astype(state.dtype, copy=False) for x in of_tokens), state)
    return (q / math.sqrt(q.shape[-1]), *others)

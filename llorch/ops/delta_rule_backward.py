"""The gated delta rule read from the last token to the first: what a state gets back goes to all it was made of.

    M = exp(g) S        delta = beta (v - M^T k)        S' = M + k delta^T        o = S'^T q / sqrt(key_dim)

    dL/dS'   = what the later tokens send back + q dL/do^T / sqrt(key_dim)
    dL/dq    = S' dL/do / sqrt(key_dim)                dL/ddelta = dL/dS'^T k
    dL/dv    = beta dL/ddelta                          dL/dbeta  = sum(dL/ddelta (v - M^T k))
    dL/dk    = dL/dS' delta - M dL/dv                  dL/dM     = dL/dS' - k dL/dv^T
    dL/dg    = sum(dL/dM * M)                          dL/dS     = exp(g) dL/dM

Every token needs the state that it met. Those of all tokens would take more memory than the model, so they are made
anew for some tokens at a time, from the state before these. A query or key gets the sum of what its value heads send.

Source: the rule is that of arXiv:2412.06464; its derivatives are by hand.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from llorch.ops.delta_rule import Heads, Rates, Values, of_value_heads

AT_ONCE = 64  # tokens whose states are in memory

Gradients = tuple[Heads, Heads, Values, Rates, Rates]
State = Float[np.ndarray, "v_heads key_dim value_dim"]
Token = tuple[np.ndarray, ...]  # q, k, v, beta, g of all value heads


def delta_rule_backward(
    grad: Values,
    q: Heads,
    k: Heads,
    v: Values,
    beta: Rates,
    g: Rates,
) -> Gradients:
    """Gradients by all that `delta_rule` was given, of a pass from an empty state.

    Args:
        grad: Gradient by what every token read.
        q: Queries of length 1.
        k: Keys of length 1.
        v: Values.
        beta: The share of a value that is written.
        g: Logarithm of the decay.

    Returns:
        Gradients by `q`, `k`, `v`, `beta` and `g`, in the dtype of `grad`.
    """
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), grad.dtype)
    *by_head, state = of_value_heads(q, k, v, beta, g, state)
    tokens = list(zip(*(x.swapaxes(0, 1) for x in by_head), strict=True))
    found: list[Token] = []
    d_state = np.zeros_like(state)
    for met, token, d_o in reversed_tokens(tokens, state, grad.astype(state.dtype, copy=False)):
        d_state, *of_token = token_backward(d_o, d_state, met, *token)
        found.append(tuple(of_token))
    d_q, d_k, d_v, d_beta, d_g = (np.stack(each[::-1]).astype(grad.dtype) for each in zip(*found, strict=True))
    d_q, d_k = (d.reshape(len(d), k.shape[1], -1, k.shape[2]).sum(axis=2) for d in (d_q, d_k))
    return d_q / np.asarray(k.shape[2] ** 0.5, grad.dtype), d_k, d_v, d_beta, d_g


def reversed_tokens(
    tokens: list[Token], state: State, grad: Values
) -> Iterator[tuple[State, Token, Float[np.ndarray, "v_heads value_dim"]]]:
    """From the last token to the first: the state that it met, what it brought, the gradient by what it read."""
    starts = range(0, len(tokens), AT_ONCE)
    before = [state]
    for start in starts[:-1]:
        *_, last = states(tokens[start : start + AT_ONCE], before[-1])
        before.append(last)
    for start in reversed(starts):
        some = tokens[start : start + AT_ONCE]
        met = [before.pop()]
        met += states(some[:-1], met[0])
        yield from zip(reversed(met), reversed(some), grad[start : start + AT_ONCE][::-1], strict=True)


def states(tokens: list[Token], state: State) -> Iterator[State]:
    """Yield the state after each token."""
    for _, k, v, beta, g in tokens:
        left = np.exp(g)[:, None, None] * state
        delta = beta[:, None] * (v - read(left, k))
        state = left + k[:, :, None] * delta[:, None]
        yield state


def token_backward(
    d_o: np.ndarray, d_state: State, met: State, q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray,
    g: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Gradients by the state that one token met, and by its q, k, v, beta and g."""
    kept = np.exp(g)[:, None, None]
    left = kept * met
    missing = v - read(left, k)
    delta = beta[:, None] * missing
    d_state = d_state + q[:, :, None] * d_o[:, None]
    d_delta = read(d_state, k)
    d_v = beta[:, None] * d_delta
    d_left = d_state - k[:, :, None] * d_v[:, None]
    d_q = weighed(left, d_o) + k * (delta * d_o).sum(axis=-1, keepdims=True)  # of left + k delta^T
    d_k = weighed(d_state, delta) - weighed(left, d_v)
    return kept * d_left, d_q, d_k, d_v, (d_delta * missing).sum(axis=-1), (d_left * left).sum(axis=(1, 2))


def read(state: State, key: Float[np.ndarray, "v_heads key_dim"]) -> Float[np.ndarray, "v_heads value_dim"]:
    """S^T k of every head: what is found at a key."""
    return (key[:, None] @ state)[:, 0]


def weighed(state: State, value: Float[np.ndarray, "v_heads value_dim"]) -> Float[np.ndarray, "v_heads key_dim"]:
    """S v of every head."""
    return (state @ value[..., None])[..., 0]

"""Backward pass of the gated delta rule, from the last token to the first.

    M = exp(g) S        delta = beta (v - M^T k)        S' = M + k delta^T        o = S'^T q / sqrt(key_dim)

    dL/dS'   = dL/dS of the next token + q dL/do^T / sqrt(key_dim)
    dL/dq    = S' dL/do / sqrt(key_dim)                dL/ddelta = dL/dS'^T k
    dL/dv    = beta dL/ddelta                          dL/dbeta  = sum(dL/ddelta (v - M^T k))
    dL/dk    = dL/dS' delta - M dL/dv                  dL/dM     = dL/dS' - k dL/dv^T
    dL/dg    = sum(dL/dM * M)                          dL/dS     = exp(g) dL/dM

Every token needs the state before it. The states of all tokens would take more memory than the model, so they are
recomputed chunk by chunk from the chunk's first state (checkpointing). A query or key sums over its value heads.

Source: arXiv:2412.06464; the derivatives are by hand.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from llorch.ops.delta_rule import Heads, Rates, Values, of_value_heads

AT_ONCE = 64  # tokens per chunk; their states are in memory together

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
    """Compute the gradients by the inputs of `delta_rule`, for a pass from an empty state.

    Args:
        grad: Gradient by the output of every token.
        q: Queries of length 1.
        k: Keys of length 1.
        v: Values.
        beta: Share of the correction that is written.
        g: Logarithm of the decay.

    Returns:
        Gradients by `q`, `k`, `v`, `beta` and `g`, in the dtype of `grad`.
    """
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), grad.dtype)
    *by_head, state = of_value_heads(q, k, v, beta, g, state)
    tokens = list(zip(*(x.swapaxes(0, 1) for x in by_head), strict=True))
    grads: list[Token] = []
    d_state = np.zeros_like(state)
    for state_before, token, d_o in reversed_tokens(tokens, state, grad.astype(state.dtype, copy=False)):
        d_state, *d_token = token_backward(d_o, d_state, state_before, *token)
        grads.append(tuple(d_token))
    d_q, d_k, d_v, d_beta, d_g = (np.stack(array[::-1]).astype(grad.dtype) for array in zip(*grads, strict=True))
    d_q, d_k = (array.reshape(len(array), k.shape[1], -1, k.shape[2]).sum(axis=2) for array in (d_q, d_k))
    return d_q / np.asarray(k.shape[2] ** 0.5, grad.dtype), d_k, d_v, d_beta, d_g


def reversed_tokens(
    tokens: list[Token], state: State, grad: Values
) -> Iterator[tuple[State, Token, Float[np.ndarray, "v_heads value_dim"]]]:
    """Yield (state before the token, its inputs, gradient by its output), from the last token to the first."""
    starts = range(0, len(tokens), AT_ONCE)
    chunk_states = [state]
    for start in starts[:-1]:
        *_, last = states(tokens[start : start + AT_ONCE], chunk_states[-1])
        chunk_states.append(last)
    for start in reversed(starts):
        chunk = tokens[start : start + AT_ONCE]
        token_states = [chunk_states.pop()]
        token_states += states(chunk[:-1], token_states[0])
        yield from zip(reversed(token_states), reversed(chunk), grad[start : start + AT_ONCE][::-1], strict=True)


def states(tokens: list[Token], state: State) -> Iterator[State]:
    """Yield the state after each token."""
    for _, k, v, beta, g in tokens:
        decayed = np.exp(g)[:, None, None] * state
        delta = beta[:, None] * (v - read(decayed, k))
        state = decayed + k[:, :, None] * delta[:, None]
        yield state


def token_backward(
    d_o: np.ndarray, d_state: State, state_before: State, q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray,
    g: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Compute the gradients by the state before one token, and by its q, k, v, beta and g."""
    decay = np.exp(g)[:, None, None]
    decayed = decay * state_before
    missing = v - read(decayed, k)
    delta = beta[:, None] * missing
    d_state = d_state + q[:, :, None] * d_o[:, None]
    d_delta = read(d_state, k)
    d_v = beta[:, None] * d_delta
    d_decayed = d_state - k[:, :, None] * d_v[:, None]
    d_q = apply_state(decayed, d_o) + k * (delta * d_o).sum(axis=-1, keepdims=True)  # (decayed + k delta^T) d_o
    d_k = apply_state(d_state, delta) - apply_state(decayed, d_v)
    return decay * d_decayed, d_q, d_k, d_v, (d_delta * missing).sum(axis=-1), (d_decayed * decayed).sum(axis=(1, 2))


def read(state: State, key: Float[np.ndarray, "v_heads key_dim"]) -> Float[np.ndarray, "v_heads value_dim"]:
    """Compute S^T k of every head, the value stored at a key."""
    return (key[:, None] @ state)[:, 0]


def apply_state(state: State, value: Float[np.ndarray, "v_heads value_dim"]) -> Float[np.ndarray, "v_heads key_dim"]:
    """Compute S v of every head."""
    return (state @ value[..., None])[..., 0]

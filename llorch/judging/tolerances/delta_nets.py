"""Tolerances of the stages of delta nets and of gated attention, collected by `llorch.judging.tolerances.forward`.

The delta rule is a recurrence, so an error stays until it is forgotten. With P the state behind the decay of a token
and r what is missing of its value there, a step is S = P + beta k r^T, r = v - P^T k, o = S^T q / sqrt(key_dim). What
one token reads of an error E of an earlier S is n^T E, where n = q / sqrt(key_dim) goes back, token by token:

    n = n - beta (n k) k        over the correction of a token: the response to its P
    n = exp(g) n                over its decay: the response to the S before it

Sources are independent. Errors w of beta r, by those of v, of beta and by roundings, add k w^T to S, read as (n k) w;
one of g adds dg P, read as dg n^T P; one of k[i] is read as dk (n[i] beta r - beta (n k) P[i]); roundings of S are read
as they stand. To first order that is exact: nothing is assumed of how keys lie to each other, in which variances of the
elements of S alone would be wrong by as much as key_dim.

An error of exp(g) is one of g. Engines that work in chunks of 64 take g from differences of float32 sums, G, that
begin with the chunk: each is off by a rounding of G.

Source: `llorch.ops.delta_rule`; transformers `modeling_qwen3_next.py`, `torch_chunk_gated_delta_rule`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from llorch.families.layers import DeltaNet
from llorch.judging.tolerances.rounding import DRIFT, SQUARES, SUM, UNIT, Step

CHUNK = 64  # of both engines
LANES = 8  # a short sum is added in one


def own_half(s: Step) -> Step:
    """Select the numbers of q_gate_proj that the step reads: gates for attn_gate, else queries.

    Other steps stay as they are.
    """
    if s.stage.input_names(s.config)[0] != "q_gate_proj":
        return s
    at, head_dim = int(s.stage.name == "attn_gate"), s.config.head_dim
    x, given = (a.reshape(*a.shape[:-1], -1, 2, head_dim)[..., at, :] for a in (s.x[0], s.given[0]))
    return replace(s, x=(x.reshape(s.y.shape),), given=(given.reshape(-1, *s.y.shape),))


def _sigmoid(s: Step) -> np.ndarray:
    """Derive the variance after a sigmoid, whose slope is y (1 - y)."""
    return own_half(s).given[0] * np.square(s.y * (1 - s.y)) + 4 * s.rounding


def _gated_variance(s: Step) -> np.ndarray:
    (context, gate), (of_context, of_gate) = s.x, s.given
    return of_context * np.square(gate) + of_gate * np.square(context) + 2 * s.rounding


def _conv_state(s: Step) -> np.ndarray:
    """Return the variances of the rows that the convolution keeps."""
    return _behind_past(s, s.given[0], len(s.y))[:, -len(s.y) :]


def _behind_past(s: Step, given: np.ndarray, taps: int) -> np.ndarray:
    """Return the variances of the rows that the state of a convolution held, and of the new rows after them."""
    before = np.zeros((len(given), taps, given.shape[-1]), given.dtype) if s.past is None else s.past
    return np.concatenate([before, given], axis=1)


def _conv_out(s: Step) -> np.ndarray:
    """Derive the variance of a sum of a few products, added in order, and then SiLU."""
    kernel, x = s.weights["conv"].T.astype(s.y.dtype), s.x[0]
    n_terms, seq = len(kernel), len(x)
    given = _behind_past(s, s.given[0], n_terms - 1)
    before = np.zeros((n_terms - 1, x.shape[1]), x.dtype) if s.state is None else s.state.astype(x.dtype)
    values = np.concatenate([before, x])
    made, c, terms = np.zeros_like(s.given[0]), np.zeros_like(x), np.zeros_like(x)
    for j, weight in enumerate(kernel):
        made += given[:, j : j + seq] * np.square(weight)
        c += values[j : j + seq] * weight
        terms += np.square(values[j : j + seq] * weight)
    made += (LANES * SUM * n_terms + 2 * s.arithmetic.unit**2) * terms + LANES * DRIFT * n_terms * np.square(c)
    if s.arithmetic.is_half:
        made += s.arithmetic.rounding(c)
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-c))
    return made * np.square(share * (1 + c * (1 - share))) + 4 * s.rounding


def _l2_norm_variance(s: Step) -> np.ndarray:
    at, net = s.stage.name == "k_l2", _net(s)
    part = slice(at * net.key_width, (1 + at) * net.key_width)
    x, given = s.x[0][:, part].reshape(s.y.shape), s.given[0][..., part].reshape(-1, *s.y.shape)
    squares = np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6)
    return given / squares + 2 * s.rounding + SQUARES * net.key_head_dim * np.square(s.y)


def _log_decay(s: Step) -> np.ndarray:
    """Derive the variance of the log decay.

    The slope of softplus(x) is the sigmoid. The value log(1 + exp(x)) is off by a rounding of 1, however small it is.
    """
    bias, rate = (s.weights[name].astype(s.y.dtype) for name in ("dt_bias", "decay"))
    x = s.x[0] + bias
    with np.errstate(over="ignore"):
        slope = rate / (1 + np.exp(-x))
    made = (s.given[0] + np.square(UNIT * x)) * np.square(slope) + np.square(UNIT * rate) + 4 * np.square(UNIT * s.y)
    if s.arithmetic.is_half:  # A_log and dt_bias are rounded, what is made of them is float32
        made = made + s.arithmetic.rounding(bias) * np.square(slope)
        made = made + s.arithmetic.rounding(np.log(-rate)) * np.square(s.y)
    return made


@dataclass(frozen=True)
class _Head:
    """One value head: its inputs, their variances with the runs first, and the state before the first token."""

    q: np.ndarray  # (seq, key_dim), divided by sqrt(key_dim)
    k: np.ndarray
    v: np.ndarray  # (seq, value_dim)
    beta: np.ndarray  # (seq,)
    g: np.ndarray
    of_q: np.ndarray  # variances, (runs, seq, key_dim)
    of_k: np.ndarray
    of_v: np.ndarray
    of_beta: np.ndarray
    of_g: np.ndarray
    state: np.ndarray  # (key_dim, value_dim)
    of_state: np.ndarray  # (runs, key_dim, value_dim)

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """P and r of every token."""
        decayed, missing = np.empty((len(self.v), *self.state.shape), self.v.dtype), np.empty_like(self.v)
        state = self.state
        for t, (k, v, beta, g) in enumerate(zip(self.k, self.v, self.beta, self.g, strict=True)):
            decayed[t] = np.exp(g) * state
            missing[t] = v - k @ decayed[t]
            state = decayed[t] + np.outer(k, beta * missing[t])
        return decayed, missing

    def read(self, *, at_the_end: bool) -> np.ndarray:
        """Derive the variances of the results of every token, or of the state after the last token."""
        decayed, missing = self.steps()
        seq, key_dim = self.k.shape
        of_g = self.of_g + np.square(UNIT) * (4 + 2 * np.square(_chunk_sums(self.g)))
        n = np.eye(key_dim, dtype=self.q.dtype) if at_the_end else np.zeros_like(self.q)
        made = np.zeros((len(self.of_v), len(n), self.v.shape[1]), self.q.dtype)
        for t in range(seq - 1, -1, -1):
            rows = slice(0 if at_the_end else t, None)
            written = self.beta[t] * missing[t]
            if not at_the_end:
                n[t] = self.q[t]
                made[:, t] += self._of_reading(t, decayed[t] + np.outer(self.k[t], written))
            made[:, rows] += self._of_writing(t, n[rows], decayed[t], missing[t])
            n[rows] -= np.outer(self.beta[t] * (n[rows] @ self.k[t]), self.k[t])
            made[:, rows] += of_g[:, t, None, None] * np.square(n[rows] @ decayed[t])
            n[rows] *= np.exp(self.g[t])
        return made + np.square(n) @ self.of_state

    def _of_reading(self, t: int, state: np.ndarray) -> np.ndarray:
        """Derive the variance of reading the state: from the query of a token, and from the sum over the state."""
        own = SUM * len(state) * (np.square(self.q[t]) @ np.square(state))
        return self.of_q[:, t] @ np.square(state) + own

    def _of_writing(self, t: int, n: np.ndarray, decayed: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Derive the variance of writing the state: from a token's value, beta and key, and from roundings."""
        k, beta, of_k = self.k[t], self.beta[t], self.of_k[:, t]
        along, written = n @ k, beta * missing
        own = SUM * len(k) * (np.square(k) @ np.square(decayed)) + 2 * UNIT**2 * np.square(self.v[t])
        of_written = self.of_beta[:, t, None] * np.square(missing) + beta**2 * (self.of_v[:, t] + own)
        of_written += 4 * UNIT**2 * np.square(written)
        made = np.square(along)[:, None] * of_written[:, None]
        made += 2 * UNIT**2 * (np.square(n) @ np.square(decayed + np.outer(k, written)))
        made += (np.square(n) @ of_k[..., None]) * np.square(written)
        made -= 2 * beta * along[:, None] * written * ((n * of_k[:, None]) @ decayed)
        return made + np.square(beta * along)[:, None] * (of_k @ np.square(decayed))[:, None]


def _chunk_sums(g: np.ndarray) -> np.ndarray:
    """Sum g from the beginning of each chunk on."""
    return np.concatenate([np.cumsum(g[at : at + CHUNK]) for at in range(0, len(g), CHUNK)])


def _delta_rule_variance(s: Step) -> np.ndarray:
    """Derive the variance of the delta rule, head by head."""
    at_the_end = s.stage.name == "delta_state"
    made = np.stack([_head(s, at).read(at_the_end=at_the_end) for at in range(_net(s).n_value_heads)], axis=1)
    return (made if at_the_end else made.swapaxes(1, 2)) + 2 * s.rounding  # tokens before heads


def _head(s: Step, at: int) -> _Head:
    """Select the numbers and variances of one value head, with its key head's."""
    net = _net(s)
    of_key, runs = at // (net.n_value_heads // net.n_key_heads), len(s.given[0])
    part = slice(2 * net.key_width + at * net.value_head_dim, 2 * net.key_width + (at + 1) * net.value_head_dim)
    (mixed, q, k, beta, g), (of_mixed, of_q, of_k, of_beta, of_g) = s.x, s.given
    scale, shape = q.dtype.type(math.sqrt(net.key_head_dim)), (net.key_head_dim, net.value_head_dim)
    state = np.zeros(shape, q.dtype) if s.state is None else s.state[at].astype(q.dtype)
    return _Head(
        q[:, of_key] / scale, k[:, of_key], mixed[:, part], beta[:, at], g[:, at],
        of_q[:, :, of_key] / scale**2, of_k[:, :, of_key], of_mixed[..., part], of_beta[..., at], of_g[..., at],
        state, np.zeros((runs, *shape), q.dtype) if s.past is None else s.past[:, at],
    )  # fmt: skip


def _gated_norm(s: Step) -> np.ndarray:
    """Derive the variances after the RMSNorm of every head, times SiLU of z."""
    (x, z), (of_x, of_z) = s.x, s.given
    gain, z, of_z = s.weights["delta_norm"].astype(x.dtype), z.reshape(x.shape), of_z.reshape(of_x.shape)
    per_one = gain / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(s.config.rms_norm_eps))
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-z))
    made = of_x * np.square(per_one * z * share) + of_z * np.square(x * per_one * share * (1 + z * (1 - share)))
    return made.reshape(-1, *s.y.shape) + SQUARES * len(gain) * np.square(s.y) + 6 * s.rounding


def _net(s: Step) -> DeltaNet:
    assert s.config.delta_net is not None
    return s.config.delta_net


RULES: Mapping[str, Callable[[Step], np.ndarray]] = MappingProxyType(
    {
        "attn_gate": _sigmoid,
        "attn_gated": _gated_variance,
        "conv_state": _conv_state,
        "conv_out": _conv_out,
        "q_l2": _l2_norm_variance,
        "k_l2": _l2_norm_variance,
        "beta": _sigmoid,
        "log_decay": _log_decay,
        "delta_state": _delta_rule_variance,
        "delta_out": _delta_rule_variance,
        "gated_norm": _gated_norm,
    }
)

"""Variances of the stages of delta nets and of gated attention, from which `tolerances.forward` derives tolerances.

A rule takes a `RuleInput` (one stage, with the variances of its inputs in several runs) and returns the variances of
its output. 2 * rounding counts one rounding in each of two compared runs.

The delta rule is a recurrence, so an error stays in the state S until it decays. P is the state after the decay of a
token, and r the residual of its value: r = v - P^T k, S = P + beta k r^T, o = S^T q / sqrt(key_dim). An error E of an
earlier S changes the output of a later token by n^T E. n starts as q / sqrt(key_dim) and goes back token by token:

    n = n - beta (n k) k        through the update of a token: the response to its P
    n = exp(g) n                through its decay: the response to the S before it

Sources are independent. Errors w of beta r (from v, beta and roundings) add k w^T to S and (n k) w to the output. An
error of g adds dg n^T P. An error of k[i] adds dk (n[i] beta r - beta (n k) P[i]). Roundings of S count as they are.
To first order this is exact: it assumes nothing about the angles between keys. Propagating only the variances of the
elements of S would be wrong by up to a factor of key_dim, because of these angles.

An error of exp(g) is an error of g. Engines that work in chunks of 64 compute g from differences of float32 sums G,
which start at the chunk. Each difference has the error of a rounding of G.

Source: `llorch.ops.delta_rule`; transformers `modeling_qwen3_next.py`, `torch_chunk_gated_delta_rule`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from llorch.families.layers import DeltaNet
from llorch.judging.tolerances.rounding import DRIFT, SQUARES, SUM, UNIT, RuleInput

CHUNK = 64  # chunk size of both reference engines
LANES = 8  # SUM assumes sums in 8 lanes; a short sum is added in one, and its variance is 8 times as large


def select_half(s: RuleInput) -> RuleInput:
    """Select the half of q_gate_proj that the step reads: gates for attn_gate, else queries; else change nothing."""
    if s.stage.input_names(s.config)[0] != "q_gate_proj":
        return s
    half, head_dim = int(s.stage.name == "attn_gate"), s.config.head_dim
    x, variances = (a.reshape(*a.shape[:-1], -1, 2, head_dim)[..., half, :] for a in (s.x[0], s.variances[0]))
    return replace(s, x=(x.reshape(s.y.shape),), variances=(variances.reshape(-1, *s.y.shape),))


def _sigmoid(s: RuleInput) -> np.ndarray:
    """Derive the variance after a sigmoid, whose slope is y (1 - y)."""
    return select_half(s).variances[0] * np.square(s.y * (1 - s.y)) + 4 * s.rounding


def _gated_variance(s: RuleInput) -> np.ndarray:
    (context, gate), (var_context, var_gate) = s.x, s.variances
    return var_context * np.square(gate) + var_gate * np.square(context) + 2 * s.rounding


def _conv_state(s: RuleInput) -> np.ndarray:
    """Return the variances of the last rows, which the convolution keeps as its state."""
    return _prepend_past(s, s.variances[0], len(s.y))[:, -len(s.y) :]


def _prepend_past(s: RuleInput, new: np.ndarray, taps: int) -> np.ndarray:
    """Prepend the variances of the earlier rows in the state of a convolution to those of the new rows."""
    past = np.zeros((len(new), taps, new.shape[-1]), new.dtype) if s.past is None else s.past
    return np.concatenate([past, new], axis=1)


def _conv_out(s: RuleInput) -> np.ndarray:
    """Derive the variance of the short convolution, a sum of products added in order, and of the SiLU after it."""
    kernel, x = s.weights["conv"].T.astype(s.y.dtype), s.x[0]
    n_terms, seq = len(kernel), len(x)
    var_x = _prepend_past(s, s.variances[0], n_terms - 1)
    past_x = np.zeros((n_terms - 1, x.shape[1]), x.dtype) if s.state is None else s.state.astype(x.dtype)
    rows_x = np.concatenate([past_x, x])
    variance, conv, terms = np.zeros_like(s.variances[0]), np.zeros_like(x), np.zeros_like(x)
    for tap, weight in enumerate(kernel):
        variance += var_x[:, tap : tap + seq] * np.square(weight)
        conv += rows_x[tap : tap + seq] * weight
        terms += np.square(rows_x[tap : tap + seq] * weight)
    variance += (LANES * SUM * n_terms + 2 * s.arithmetic.unit**2) * terms + LANES * DRIFT * n_terms * np.square(conv)
    if s.arithmetic.is_half:
        variance += s.arithmetic.rounding(conv)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-conv))
    return variance * np.square(sigmoid * (1 + conv * (1 - sigmoid))) + 4 * s.rounding


def _l2_norm_variance(s: RuleInput) -> np.ndarray:
    is_key, net = s.stage.name == "k_l2", _net(s)
    part = slice(is_key * net.key_width, (1 + is_key) * net.key_width)
    x, var_x = s.x[0][:, part].reshape(s.y.shape), s.variances[0][..., part].reshape(-1, *s.y.shape)
    squares = np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6)
    return var_x / squares + 2 * s.rounding + SQUARES * net.key_head_dim * np.square(s.y)


def _log_decay(s: RuleInput) -> np.ndarray:
    """Derive the variance of the log decay; log(1 + exp(x)) has the error of a rounding of 1, however small it is."""
    bias, rate = (s.weights[name].astype(s.y.dtype) for name in ("dt_bias", "decay"))
    x = s.x[0] + bias
    with np.errstate(over="ignore"):
        slope = rate / (1 + np.exp(-x))
    variance = (
        (s.variances[0] + np.square(UNIT * x)) * np.square(slope) + np.square(UNIT * rate) + 4 * np.square(UNIT * s.y)
    )
    if s.arithmetic.is_half:  # A_log and dt_bias are rounded; values computed from them are float32
        variance = variance + s.arithmetic.rounding(bias) * np.square(slope)
        variance = variance + s.arithmetic.rounding(np.log(-rate)) * np.square(s.y)
    return variance


@dataclass(frozen=True)
class _Head:
    """One value head: its inputs, their variances with the runs first, and the state before the first token."""

    q: np.ndarray  # (seq, key_dim), divided by sqrt(key_dim)
    k: np.ndarray
    v: np.ndarray  # (seq, value_dim)
    beta: np.ndarray  # (seq,)
    g: np.ndarray
    var_q: np.ndarray  # variances, (runs, seq, key_dim)
    var_k: np.ndarray
    var_v: np.ndarray
    var_beta: np.ndarray
    var_g: np.ndarray
    state: np.ndarray  # (key_dim, value_dim)
    var_state: np.ndarray  # (runs, key_dim, value_dim)

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute P (`decayed`) and r (`missing`) of every token."""
        decayed, missing = np.empty((len(self.v), *self.state.shape), self.v.dtype), np.empty_like(self.v)
        state = self.state
        for t, (k, v, beta, g) in enumerate(zip(self.k, self.v, self.beta, self.g, strict=True)):
            decayed[t] = np.exp(g) * state
            missing[t] = v - k @ decayed[t]
            state = decayed[t] + np.outer(k, beta * missing[t])
        return decayed, missing

    def output_variance(self, *, at_the_end: bool) -> np.ndarray:
        """Derive the variances of every token's output, or `at_the_end` of the state after the last token.

        `n` has one row for each output that is observed: q of each token, or the unit vectors for the state.
        """
        decayed, missing = self.steps()
        seq, key_dim = self.k.shape
        var_g = self.var_g + np.square(UNIT) * (4 + 2 * np.square(_chunk_sums(self.g)))  # exp(g), and the sums G
        n = np.eye(key_dim, dtype=self.q.dtype) if at_the_end else np.zeros_like(self.q)
        variance = np.zeros((len(self.var_v), len(n), self.v.shape[1]), self.q.dtype)
        for t in range(seq - 1, -1, -1):
            rows = slice(0 if at_the_end else t, None)
            written = self.beta[t] * missing[t]
            if not at_the_end:
                n[t] = self.q[t]
                variance[:, t] += self._reading_variance(t, decayed[t] + np.outer(self.k[t], written))
            variance[:, rows] += self._writing_variance(t, n[rows], decayed[t], missing[t])
            n[rows] -= np.outer(self.beta[t] * (n[rows] @ self.k[t]), self.k[t])
            variance[:, rows] += var_g[:, t, None, None] * np.square(n[rows] @ decayed[t])
            n[rows] *= np.exp(self.g[t])
        return variance + np.square(n) @ self.var_state

    def _reading_variance(self, t: int, state: np.ndarray) -> np.ndarray:
        """Derive the variance of a token's output from its query and from the rounding of the sum q S."""
        sum_variance = SUM * len(state) * (np.square(self.q[t]) @ np.square(state))
        return self.var_q[:, t] @ np.square(state) + sum_variance

    def _writing_variance(self, t: int, n: np.ndarray, decayed: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Derive the variance of all rows of `n` from the state update of a token: its value, beta, key, roundings."""
        k, beta, var_k = self.k[t], self.beta[t], self.var_k[:, t]
        along, written = n @ k, beta * missing
        sum_variance = SUM * len(k) * (np.square(k) @ np.square(decayed)) + 2 * UNIT**2 * np.square(self.v[t])
        var_written = self.var_beta[:, t, None] * np.square(missing) + beta**2 * (self.var_v[:, t] + sum_variance)
        var_written += 4 * UNIT**2 * np.square(written)
        variance = np.square(along)[:, None] * var_written[:, None]
        variance += 2 * UNIT**2 * (np.square(n) @ np.square(decayed + np.outer(k, written)))
        variance += (np.square(n) @ var_k[..., None]) * np.square(written)
        variance -= 2 * beta * along[:, None] * written * ((n * var_k[:, None]) @ decayed)
        return variance + np.square(beta * along)[:, None] * (var_k @ np.square(decayed))[:, None]


def _chunk_sums(g: np.ndarray) -> np.ndarray:
    """Compute the cumulative sums of g, which restart at each chunk."""
    return np.concatenate([np.cumsum(g[start : start + CHUNK]) for start in range(0, len(g), CHUNK)])


def _delta_rule_variance(s: RuleInput) -> np.ndarray:
    """Derive the variance of the delta rule, head by head."""
    at_the_end = s.stage.name == "delta_state"
    variance = np.stack(
        [_head(s, head).output_variance(at_the_end=at_the_end) for head in range(_net(s).n_value_heads)], axis=1
    )
    return (variance if at_the_end else variance.swapaxes(1, 2)) + 2 * s.rounding  # tokens before heads


def _head(s: RuleInput, head: int) -> _Head:
    """Select the values and variances of one value head and of its key head."""
    net = _net(s)
    key_head, runs = head // (net.n_value_heads // net.n_key_heads), len(s.variances[0])
    part = slice(2 * net.key_width + head * net.value_head_dim, 2 * net.key_width + (head + 1) * net.value_head_dim)
    (mixed, q, k, beta, g), (var_mixed, var_q, var_k, var_beta, var_g) = s.x, s.variances
    scale, shape = q.dtype.type(math.sqrt(net.key_head_dim)), (net.key_head_dim, net.value_head_dim)
    state = np.zeros(shape, q.dtype) if s.state is None else s.state[head].astype(q.dtype)
    return _Head(
        q[:, key_head] / scale, k[:, key_head], mixed[:, part], beta[:, head], g[:, head],
        var_q[:, :, key_head] / scale**2, var_k[:, :, key_head], var_mixed[..., part], var_beta[..., head],
        var_g[..., head], state, np.zeros((runs, *shape), q.dtype) if s.past is None else s.past[:, head],
    )  # fmt: skip


def _gated_norm(s: RuleInput) -> np.ndarray:
    """Derive the variances after the RMSNorm of every head, times SiLU of z."""
    (x, z), (var_x, var_z) = s.x, s.variances
    gain, z, var_z = s.weights["delta_norm"].astype(x.dtype), z.reshape(x.shape), var_z.reshape(var_x.shape)
    slope = gain / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(s.config.rms_norm_eps))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-z))
    variance = var_x * np.square(slope * z * sigmoid) + var_z * np.square(x * slope * sigmoid * (1 + z * (1 - sigmoid)))
    return variance.reshape(-1, *s.y.shape) + SQUARES * len(gain) * np.square(s.y) + 6 * s.rounding


def _net(s: RuleInput) -> DeltaNet:
    assert s.config.delta_net is not None
    return s.config.delta_net


RULES: Mapping[str, Callable[[RuleInput], np.ndarray]] = MappingProxyType(
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

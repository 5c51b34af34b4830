"""Wrong code for a delta net, by the name of the known mistake."""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def window(rows: np.ndarray, kernel: np.ndarray, n: int) -> np.ndarray:
    return np.stack([(rows[t : t + kernel.shape[1]] * kernel.T).sum(axis=0) for t in range(n)])


def kernel_turned(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    return silu(window(np.concatenate([state, x]), kernel[:, ::-1], len(x)))  # as np.convolve has it


def one_token_ahead(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    return silu(window(np.concatenate([state, x, 0 * x[:1]])[1:], kernel, len(x)))


def sums_alone(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    return window(np.concatenate([state, x]), kernel, len(x))


def zeros_in_front(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    return silu(window(np.pad(x, ((kernel.shape[1] - 1, 0), (0, 0))), kernel, len(x)))


def left_as_it_is(x: np.ndarray) -> np.ndarray:
    return x.copy()


def root_of_the_mean(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def all_heads_at_once(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(len(x), -1)
    return (flat / np.sqrt((flat**2).sum(axis=1, keepdims=True) + 1e-6)).reshape(x.shape)


def eps_behind_the_root(x: np.ndarray) -> np.ndarray:
    return x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def softplus(z: np.ndarray) -> np.ndarray:
    return np.log(1 + np.exp(z))


def growing(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return np.abs(decay) * softplus(a + dt_bias)


def no_softplus(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return decay * (a + dt_bias)


def logarithm_for_rate(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return -np.log(-decay) * softplus(a + dt_bias)


def exponential_again(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return -np.exp(-decay) * softplus(a + dt_bias)


def bias_left_out(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return decay * softplus(a)


def bias_too_late(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return decay * (softplus(a) + dt_bias)


def factor(a: np.ndarray, dt_bias: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return np.exp(decay * softplus(a + dt_bias))


def rule(q, k, v, beta, g, state, *, step=None, scale=True, head_of=None, read=None):
    """Head by head, token by token; `step` makes the next state of one head."""
    n, key_dim = v.shape[1], k.shape[2]
    times = n // k.shape[1]
    out, new = np.empty_like(v), state.copy()
    for h in range(n):
        at = h // times if head_of is None else head_of(h, k.shape[1])
        for t in range(len(v)):
            given = new[h], k[t, at], v[t, h], beta[t, h], np.exp(g[t, h])
            after = right_step(*given) if step is None else step(*given)
            seen = after if read is None else read(new[h], np.exp(g[t, h]))
            out[t, h] = q[t, at] @ seen / (np.sqrt(key_dim) if scale else 1)
            new[h] = after
    return out, new


def right_step(s, k, v, beta, decay):
    s = decay * s
    return s + np.outer(k, beta * (v - k @ s))


def query_not_scaled(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, scale=False)


def never_forgets(q, k, v, beta, g, state):
    return rule(q, k, v, beta, np.zeros_like(g), state)


def fades_last(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, step=lambda s, k, v, b, d: d * (s + np.outer(k, b * (v - k @ s))))


def corrects_the_old(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, step=lambda s, k, v, b, d: d * s + np.outer(k, b * (v - k @ s)))


def plain_linear_attention(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, step=lambda s, k, v, b, d: d * s + np.outer(k, b * v))


def beta_on_the_value(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, step=lambda s, k, v, b, d: d * s + np.outer(k, b * v - k @ (d * s)))


def reads_too_early(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, read=lambda before, decay: decay * before)


def heads_in_turn(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, head_of=lambda h, n_key_heads: h % n_key_heads)


def begins_empty(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, np.zeros_like(state))


WRONG = {
    "short_conv": {
        "conv-taps-reversed": kernel_turned,
        "conv-not-causal": one_token_ahead,
        "conv-silu-missing": sums_alone,
        "conv-past-forgotten": zeros_in_front,
    },
    "l2_norm": {
        "l2-norm-missing": left_as_it_is,
        "l2-norm-by-mean": root_of_the_mean,
        "l2-norm-of-heads-together": all_heads_at_once,
        "l2-norm-eps-outside": eps_behind_the_root,
    },
    "log_decay": {
        "decay-sign-flipped": growing,
        "decay-softplus-missing": no_softplus,
        "decay-a-log-not-exponentiated": logarithm_for_rate,
        "decay-exponentiated-twice": exponential_again,
        "decay-bias-missing": bias_left_out,
        "decay-bias-behind-softplus": bias_too_late,
        "decay-given-as-factor": factor,
    },
    "delta_rule": {
        "delta-query-not-scaled": query_not_scaled,
        "delta-decay-missing": never_forgets,
        "delta-decay-after-write": fades_last,
        "delta-correction-before-decay": corrects_the_old,
        "delta-correction-missing": plain_linear_attention,
        "delta-beta-on-value-only": beta_on_the_value,
        "delta-read-before-write": reads_too_early,
        "delta-value-heads-tiled": heads_in_turn,
        "delta-past-forgotten": begins_empty,
    },
}
_BETA = "beta is a sigmoid that the page takes"
_GATED = "the gated norm is a norm of lesson 01 and a SiLU of lesson 06, joined by the page"
UNTYPED = {
    "delta-value-heads-tiled-in-file": "the reader of the file restores the order",
    "delta-output-columns-tiled": "the reader of the file restores the order",
    "beta-sigmoid-missing": _BETA,
    "beta-doubled": _BETA,
    "beta-from-a": _BETA,
    "delta-state-in-bfloat16": "code with float32 arrays in NumPy cannot make it",
    "delta-state-reset-between-chunks": "a function gets all tokens of a pass",
    "gated-norm-gated-first": _GATED,
    "gated-norm-gain-plus-one": _GATED,
    "gated-norm-sigmoid": _GATED,
    "gated-norm-gate-missing": _GATED,
    "gated-norm-of-heads-together": _GATED,
}

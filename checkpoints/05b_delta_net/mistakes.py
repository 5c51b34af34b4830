"""Wrong code for a delta net, by the name of the known mistake.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def rule(q, k, v, beta, g, state, *, step=None, scale=True, head_of=None, read=None):
    """Compute the delta rule head by head, token by token; `step` makes the next state of one head."""
    n, key_dim = v.shape[1], k.shape[2]
    times = n // k.shape[1]
    out, new = np.empty_like(v), state.copy()
    for h in range(n):
        key_head = h // times if head_of is None else head_of(h, k.shape[1])
        for t in range(len(v)):
            inputs = new[h], k[t, key_head], v[t, h], beta[t, h], np.exp(g[t, h])
            next_state = right_step(*inputs) if step is None else step(*inputs)
            read_state = next_state if read is None else read(new[h], np.exp(g[t, h]))
            out[t, h] = q[t, key_head] @ read_state / (np.sqrt(key_dim) if scale else 1)
            new[h] = next_state
    return out, new


def right_step(s, k, v, beta, decay):
    s = decay * s
    return s + np.outer(k, beta * (v - k @ s))


def corrects_the_old(q, k, v, beta, g, state):
    return rule(q, k, v, beta, g, state, step=lambda s, k, v, b, d: d * s + np.outer(k, b * (v - k @ s)))


WRONG = {
    "delta_rule": {
        "delta-correction-before-decay": corrects_the_old,
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

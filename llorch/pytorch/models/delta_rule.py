"""The gated delta rule: a matrix per head that each token fades, corrects and reads.

    S = exp(log_decay) S        S = S + k (beta (v - S^T k))^T        out = S^T q / sqrt(key_dim)

A few tokens are computed one after the other, many in chunks, whose tokens are one triangular system: with D[i, j] the
product of the decays after token j up to token i, the corrections d of a chunk that begins with the state S solve

    d[i] + beta[i] sum_{j < i} D[i, j] (k[i] . k[j]) d[j] = beta[i] (v[i] - D[i, start] S^T k[i])

D is made of sums of the very decays between two tokens. A difference of sums from the start of the chunk would lose
what follows a decay of -300 to rounding.

Source: arXiv:2412.06464, section 3.3.
"""

import torch
from jaxtyping import Float
from torch import Tensor

FEW = 4  # tokens up to which one after the other is faster
CHUNK = 64

Keys = Float[Tensor, "batch seq k_heads key_dim"]
Values = Float[Tensor, "batch seq v_heads value_dim"]
OfHeads = Float[Tensor, "batch seq v_heads"]
Matrices = Float[Tensor, "batch v_heads key_dim value_dim"]


def delta_rule(
    q: Keys, k: Keys, v: Values, beta: OfHeads, log_decay: OfHeads, state: Matrices
) -> tuple[Values, Matrices]:
    """Compute what each token reads, and the last state; value head h has key head h // (v_heads / k_heads)."""
    k_heads, step = k.shape[2], 1 if q.shape[1] <= FEW else CHUNK
    q, k = ((x * scale).transpose(1, 2)[:, :, None] for x, scale in ((q, k.shape[-1] ** -0.5), (k, 1)))
    of_values = v, beta[..., None], log_decay[..., None]
    v, beta, log_decay = (x.transpose(1, 2).unflatten(1, (k_heads, -1)) for x in of_values)
    matrices = state.unflatten(1, (k_heads, -1))  # (batch, k_heads, group, key_dim, value_dim); others: seq, width
    rule, made = _token if step == 1 else _chunk, []
    parts = zip(*(x.split(step, dim=-2) for x in (q, k, v, beta, log_decay)), strict=True)
    for some_q, some_k, some_v, some_beta, some_decay in parts:
        out, matrices = rule(some_q, some_k, some_v, some_beta, some_decay, matrices)
        made.append(out)
    return torch.cat(made, dim=-2).flatten(1, 2).transpose(1, 2), matrices.flatten(1, 2)


def _token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token's output and the state after it."""
    state = log_decay.exp() * state
    state = state + k.mT @ (beta * (v - k @ state))
    return q @ state, state


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a chunk's outputs and the state after it, from one triangular system."""
    between, start = _decays(log_decay)
    system = beta * between * (k @ k.mT)
    right = beta * (v - start * (k @ state))
    delta = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = start * (q @ state) + (between * (q @ k.mT)) @ delta
    to_end = between[..., -1, :, None]  # (..., seq, 1)
    return out, start[..., -1:, :] * state + (k * to_end).mT @ delta


def _decays(log_decay: Float[Tensor, "*heads seq 1"]) -> tuple[Float[Tensor, "*heads seq seq"], Tensor]:
    """Compute the shares that token i keeps of token j's write, 0 before it, and of the state before the chunk."""
    seq = log_decay.shape[-2]
    later = torch.ones(seq, seq, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = log_decay.expand(*log_decay.shape[:-1], seq).where(later, 0).cumsum(-2)
    between = sums.where(later | later.new_ones(seq).diag(), -torch.inf).exp()
    return between, log_decay.cumsum(-2).exp()

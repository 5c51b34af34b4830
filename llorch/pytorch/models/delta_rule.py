"""Gated delta rule: a matrix per head that each token decays, corrects and reads.

    S = exp(log_decay) S        S = S + k (beta (v - S^T k))^T        out = S^T q / sqrt(key_dim)

A few tokens are computed one by one, many in chunks. The tokens of a chunk form one triangular system. With D[i, j] the
product of the decays after token j up to token i, the corrections d of a chunk with initial state S solve

    d[i] + beta[i] sum_{j < i} D[i, j] (k[i] . k[j]) d[j] = beta[i] (v[i] - D[i, start] S^T k[i])

D comes from sums over the decays between two tokens only. A difference of two sums from the start of the chunk would
lose later decays to rounding after a decay of -300.

Source: arXiv:2412.06464, section 3.3.
"""

import torch
from jaxtyping import Float
from torch import Tensor

FEW = 4  # up to this many tokens, one by one is faster than a chunk
CHUNK = 64  # tokens

Keys = Float[Tensor, "batch seq k_heads key_dim"]
Values = Float[Tensor, "batch seq v_heads value_dim"]
PerHead = Float[Tensor, "batch seq v_heads"]
Matrices = Float[Tensor, "batch v_heads key_dim value_dim"]


def delta_rule(
    q: Keys, k: Keys, v: Values, beta: PerHead, log_decay: PerHead, state: Matrices
) -> tuple[Values, Matrices]:
    """Compute the output of each token, and the last state; value head h uses key head h // (v_heads / k_heads)."""
    k_heads, step = k.shape[2], 1 if q.shape[1] <= FEW else CHUNK
    q, k = ((x * scale).transpose(1, 2)[:, :, None] for x, scale in ((q, k.shape[-1] ** -0.5), (k, 1)))
    value_heads = v, beta[..., None], log_decay[..., None]
    v, beta, log_decay = (x.transpose(1, 2).unflatten(1, (k_heads, -1)) for x in value_heads)
    matrices = state.unflatten(1, (k_heads, -1))  # (batch, k_heads, group, key_dim, value_dim); inputs: seq, width
    compute, outputs = _token if step == 1 else _chunk, []
    chunks = zip(*(x.split(step, dim=-2) for x in (q, k, v, beta, log_decay)), strict=True)
    for chunk_q, chunk_k, chunk_v, chunk_beta, chunk_decay in chunks:
        out, matrices = compute(chunk_q, chunk_k, chunk_v, chunk_beta, chunk_decay, matrices)
        outputs.append(out)
    return torch.cat(outputs, dim=-2).flatten(1, 2).transpose(1, 2), matrices.flatten(1, 2)


def _token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token's output and the state after it."""
    state = log_decay.exp() * state
    state = state + k.mT @ (beta * (v - k @ state))
    return q @ state, state


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a chunk's outputs and the state after it, from one triangular system."""
    decay, start_decay = _decays(log_decay)
    system = beta * decay * (k @ k.mT)
    right_side = beta * (v - start_decay * (k @ state))
    delta = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    out = start_decay * (q @ state) + (decay * (q @ k.mT)) @ delta
    decay_to_end = decay[..., -1, :, None]  # (..., seq, 1)
    return out, start_decay[..., -1:, :] * state + (k * decay_to_end).mT @ delta


def _decays(log_decay: Float[Tensor, "*heads seq 1"]) -> tuple[Float[Tensor, "*heads seq seq"], Tensor]:
    """Compute the decay of token j's write up to token i (0 for i < j), and the decay of the chunk's initial state."""
    seq = log_decay.shape[-2]
    is_later = torch.ones(seq, seq, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = log_decay.expand(*log_decay.shape[:-1], seq).where(is_later, 0).cumsum(-2)
    decay = sums.where(is_later | is_later.new_ones(seq).diag(), -torch.inf).exp()
    return decay, log_decay.cumsum(-2).exp()

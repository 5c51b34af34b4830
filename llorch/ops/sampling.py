"""Sampling: filter logits, turn them into a distribution, and draw a token.

    penalties -> temperature -> top-k -> top-p -> min-p -> softmax -> draw

Each filter is a pure function of logits; a removed token has the logit -inf. The order is that of
transformers' logits processors; llama.cpp's chain can be put in the same order.

Source: transformers `generation/logits_process.py`; llama.cpp `src/llama-sampler.cpp`; presence and frequency: OpenAI's
API reference; their order after the repetition penalty: vLLM `model_executor/layers/utils.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from llorch.runtime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of sampling, by default greedy without filters or penalties; UserError for a value out of range."""

    temperature: float = 0.0  # 0 is greedy; else at least 1e-6, so that float32 logits stay finite
    top_k: int = 0  # tokens kept; 0 keeps all
    top_p: float = 1.0  # probability mass kept; 0 < top_p <= 1
    min_p: float = 0.0  # least share of the best token's probability; 0 <= min_p < 1
    repetition_penalty: float = 1.0  # 0.001 to 1000; 1 changes nothing
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the answer; -2 to 2
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the answer; -2 to 2
    seed: int = 0  # of the random numbers

    def __post_init__(self) -> None:
        """Check the range of every setting."""
        rules = (
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature < math.inf, "0 or at least 1e-6"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("seed", self.seed >= 0, "at least 0"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise UserError(f"sampling: {name} must be {expected}, got {getattr(self, name)}")


Logits = Float[np.ndarray, " vocab"]


def penalise(logits: Logits, history: Sequence[int], *, penalty: float) -> Logits:
    """Penalise each token of `history` once: divide positive logits by `penalty`, multiply negative ones."""
    ids = np.unique(np.asarray(history, dtype=np.int64))
    out = logits.copy()
    out[ids] = np.where(out[ids] > 0, out[ids] / penalty, out[ids] * penalty)
    return out


def penalise_repeats(logits: Logits, answer: Sequence[int], *, presence: float, frequency: float) -> Logits:
    """Subtract `presence` from the logit of each token in `answer`, and `frequency` per occurrence."""
    counts = np.bincount(np.asarray(answer, dtype=np.int64), minlength=logits.size)
    return logits - presence * (counts > 0) - frequency * counts


def keep_top_k(logits: Logits, *, k: int) -> Logits:
    """Keep the `k` highest logits and all ties with the k-th."""
    if k == 0 or k >= logits.size:
        return logits
    threshold = np.partition(logits, -k)[-k]
    return np.where(logits < threshold, -np.inf, logits).astype(logits.dtype)


def keep_top_p(logits: Logits, *, p: float) -> Logits:
    """Keep the smallest set of most likely tokens whose probabilities sum to at least `p`."""
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum(softmax(logits)[order], dtype=np.float64)  # probability up to and including each token
    n_keep = int(np.searchsorted(cumulative, p)) + 1  # keeps the token that reaches p
    out = np.full_like(logits, -np.inf)
    out[order[:n_keep]] = logits[order[:n_keep]]
    return out


def keep_min_p(logits: Logits, *, min_p: float) -> Logits:
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    if min_p == 0:
        return logits
    threshold = logits.max() + logits.dtype.type(math.log(min_p))
    return np.where(logits < threshold, -np.inf, logits).astype(logits.dtype)


def softmax(logits: Logits) -> Logits:
    """Normalise to probabilities; the sum is taken in float64."""
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum(dtype=np.float64)).astype(logits.dtype)


def greedy(logits: Logits) -> int:
    """Return the most likely token; of equal ones the lowest id."""
    return int(np.argmax(logits))


def probabilities(
    logits: Logits, settings: SamplingSettings, history: Sequence[int], *, n_prompt: int | None = None
) -> Logits:
    """Compute the distribution to draw from: 0 for removed tokens; at temperature 0 it is one-hot at `greedy`.

    Computed in float64 and rounded once to the dtype of the logits. The penalties use `history`, the prompt and the
    answer; the first `n_prompt` tokens are the prompt, all of them if None.
    """
    wide_x = penalise(logits.astype(np.float64), history, penalty=settings.repetition_penalty)
    answer = () if n_prompt is None else history[n_prompt:]
    wide_x = penalise_repeats(wide_x, answer, presence=settings.presence_penalty, frequency=settings.frequency_penalty)
    if settings.temperature == 0:
        return np.eye(1, wide_x.size, greedy(wide_x), dtype=logits.dtype)[0]
    wide_x = wide_x / settings.temperature
    wide_x = keep_top_k(wide_x, k=settings.top_k)
    wide_x = keep_top_p(wide_x, p=settings.top_p)
    wide_x = keep_min_p(wide_x, min_p=settings.min_p)
    return softmax(wide_x).astype(logits.dtype, copy=False)


def draw(distribution: Logits, u: float) -> int:
    """Return the token whose interval of the cumulative distribution contains `u`, 0 <= u < 1."""
    cumulative = np.cumsum(distribution, dtype=np.float64)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))

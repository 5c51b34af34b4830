"""From logits to a distribution, and from a distribution to a token.

    penalties -> temperature -> top-k -> top-p -> min-p -> softmax -> draw

Each filter is a pure function of logits; a removed token has the logit -inf. The order is that of
transformers' logits processors; llama.cpp's chain can be put in the same order.

Source: transformers `generation/logits_process.py`; llama.cpp `src/llama-sampler.cpp`; presence and frequency: OpenAI's
API reference, and vLLM `model_executor/layers/utils.py` for their place behind the repetition penalty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from llorch.runtime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """What to do with the logits; the defaults change nothing but take the most likely token.

    ValueError for a value out of its range.
    """

    temperature: float = 0.0  # 0 is greedy; else at least 1e-6, so that float32 logits stay finite
    top_k: int = 0  # tokens kept; 0 keeps all
    top_p: float = 1.0  # probability mass kept; 0 < top_p <= 1
    min_p: float = 0.0  # of the best token's probability; 0 <= min_p < 1
    repetition_penalty: float = 1.0  # 0.001 to 1000; 1 changes nothing
    presence_penalty: float = 0.0  # subtracted once from the logit of a token that the answer has; -2 to 2
    frequency_penalty: float = 0.0  # subtracted each time that the answer has it; -2 to 2
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
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
    """Make each token of `history` less likely, once: positive logits divided, negative ones multiplied."""
    seen = np.unique(np.asarray(history, dtype=np.int64))
    out = logits.copy()
    out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    return out


def penalise_repeats(logits: Logits, answer: Sequence[int], *, presence: float, frequency: float) -> Logits:
    """Subtract from each token of `answer`, once and for each time that it has it; the prompt does not count."""
    counts = np.bincount(np.asarray(answer, dtype=np.int64), minlength=logits.size)
    return logits - presence * (counts > 0) - frequency * counts


def keep_top_k(logits: Logits, *, k: int) -> Logits:
    """Keep the `k` highest logits, and those equal to the lowest of them."""
    if k == 0 or k >= logits.size:
        return logits
    threshold = np.partition(logits, -k)[-k]
    return np.where(logits < threshold, -np.inf, logits).astype(logits.dtype)


def keep_top_p(logits: Logits, *, p: float) -> Logits:
    """Keep the smallest set of most likely tokens whose probabilities sum to at least `p`."""
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(softmax(logits)[order], dtype=np.float64)  # mass up to and with each token
    n_keep = int(np.searchsorted(before, p)) + 1  # the token that reaches p stays
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
    """Take the likeliest token; of equal ones the lowest id."""
    return int(np.argmax(logits))


def probabilities(
    logits: Logits, settings: SamplingSettings, history: Sequence[int], *, n_prompt: int | None = None
) -> Logits:
    """Compute the distribution to draw from: 0 for removed tokens; at temperature 0 all on the lowest best id.

    Computed in float64, rounded once to the dtype of the logits. `history` is for the penalties: prompt and answer, of
    which the first `n_prompt` are the prompt; all, where nobody says.
    """
    wide = penalise(logits.astype(np.float64), history, penalty=settings.repetition_penalty)
    answer = () if n_prompt is None else history[n_prompt:]
    wide = penalise_repeats(wide, answer, presence=settings.presence_penalty, frequency=settings.frequency_penalty)
    if settings.temperature == 0:
        return np.eye(1, wide.size, greedy(wide), dtype=logits.dtype)[0]
    wide = wide / settings.temperature
    wide = keep_top_k(wide, k=settings.top_k)
    wide = keep_top_p(wide, p=settings.top_p)
    wide = keep_min_p(wide, min_p=settings.min_p)
    return softmax(wide).astype(logits.dtype, copy=False)


def draw(distribution: Logits, u: float) -> int:
    """Find the token whose part of the cumulated distribution holds `u`, 0 <= u < 1."""
    cumulated = np.cumsum(distribution, dtype=np.float64)
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))

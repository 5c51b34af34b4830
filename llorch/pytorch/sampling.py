"""`llorch.ops.sampling` for a batch, on its device: the same filters in the same order, nothing read by the host.

    penalties -> temperature -> top-k -> top-p -> min-p -> softmax -> draw

All is computed in float64 and rounded once to float32, as there. The uniform numbers of the draws are NumPy's, drawn
on the host beforehand, so that a seed means the same draws on every backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from llorch.ops.sampling import SamplingSettings

Wide = Float64[Tensor, "batch vocab"]
PerRow = Float64[Tensor, "batch 1"]
IntPerRow = Int[Tensor, "batch 1"]
Logits = Float[Tensor, "batch vocab"]
Marks = Bool[Tensor, "batch vocab"]
Counts = Int[Tensor, "batch vocab"]

CANDIDATES = 1024  # the highest logits that are tried before all are sorted


@dataclass(frozen=True)
class Needs:
    """The filters that the settings of a batch use at all; a step without the others is built."""

    penalty: bool  # some row penalises what prompt and answer have
    sampled: bool  # some row is not greedy
    ordered: bool  # some row keeps the first of the sorted tokens
    repeats: bool  # some row penalises what the answer has

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings]) -> "Needs":
        """Return the filters that at least one of the rows needs."""
        return cls(
            penalty=any(s.repetition_penalty != 1 for s in settings),
            sampled=any(s.temperature > 0 for s in settings),
            ordered=any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1) for s in settings),
            repeats=any(s.presence_penalty != 0 or s.frequency_penalty != 0 for s in settings),
        )


@dataclass(frozen=True)
class BatchSettings:
    """The settings of every row in tensors that keep their place; see `SamplingSettings`."""

    temperature: PerRow
    top_k: IntPerRow
    top_p: PerRow
    min_p: PerRow
    repetition_penalty: PerRow
    presence_penalty: PerRow
    frequency_penalty: PerRow

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device) -> "BatchSettings":
        """Put settings, one per row, on a device."""

        def column(name: str) -> Tensor:
            dtype = torch.int64 if name == "top_k" else torch.float64
            return torch.tensor([[getattr(s, name)] for s in settings], dtype=dtype, device=device)

        return cls(**{field.name: column(field.name) for field in fields(cls)})

    def rows(self, kept: Int[Tensor, " kept"]) -> "BatchSettings":
        """Return the settings of some rows."""
        return BatchSettings(**{field.name: getattr(self, field.name)[kept] for field in fields(self)})

    def assign(self, other: "BatchSettings") -> None:
        """Take the values of other settings into the same storage."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


def uniforms(settings: Sequence[SamplingSettings], n_draws: int) -> Float64[np.ndarray, "batch draws"]:
    """Return the numbers that `llorch.model.generate.sample_ids` would draw, one row per sequence."""
    return np.stack([np.random.default_rng(s.seed).random(n_draws) for s in settings])


def penalise(logits: Wide, seen: Marks, penalty: PerRow) -> Wide:
    """Make every seen token less likely: positive logits divided, negative ones multiplied."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_repeats(logits: Wide, counts: Counts, presence: PerRow, frequency: PerRow) -> Wide:
    """Subtract from each token of an answer, once and for each time that the answer has it."""
    return logits - presence * (counts > 0) - frequency * counts


def keep_first(logits: Wide, top_k: IntPerRow, top_p: PerRow) -> Wide:
    """Keep the `top_k` highest logits and their equals; of those the smallest set that holds a mass of `top_p`.

    Sorting a whole vocabulary takes a CPU as long as a token of a small model, so there the highest logits are tried
    first. On a GPU it does not, and the host must not look whether they were enough.
    """
    vocab = logits.shape[-1]
    k = torch.where(top_k == 0, vocab, top_k).clamp(max=vocab)
    if logits.device.type == "cpu" and vocab > CANDIDATES:
        ids = logits.topk(CANDIDATES, sorted=False).indices.sort(-1).values  # equal ones in the order of their ids
        ordered, at = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        filtered, enough = _first_of(logits, ordered, ids.gather(-1, at), k, top_p)
        if enough.all():
            return filtered
    return _first_of(logits, *logits.sort(dim=-1, descending=True, stable=True), k, top_p)[0]


def _first_of(
    logits: Wide, ordered: Float64[Tensor, "batch some"], order: Int[Tensor, "batch some"], k: IntPerRow, top_p: PerRow
) -> tuple[Wide, Bool[Tensor, "batch 1"]]:
    """Filter by the highest logits, given in order with their ids; says of each row whether they were enough."""
    vocab, some = logits.shape[-1], order.shape[-1]
    threshold = torch.where(k <= some, ordered.gather(-1, k.clamp(max=some) - 1), -torch.inf)
    logits = logits.masked_fill(logits < threshold, -torch.inf)
    cumulated = softmax(logits).gather(-1, order).cumsum(-1)
    before = cumulated.roll(1, -1)  # mass of the tokens before each one
    before[:, 0] = 0
    kept = before < top_p
    by_mass = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, kept)
    least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    whole = (top_p >= 1) | (least > ordered[:, -1:])  # else equals of the last one may be missing
    return logits.masked_fill(~by_mass & (top_p < 1), -torch.inf), whole & ((k <= some) | (k == vocab))


def keep_min_p(logits: Wide, min_p: PerRow) -> Wide:
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), -torch.inf)


def softmax(logits: Wide) -> Wide:
    """Normalise to probabilities."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def probabilities(logits: Logits, settings: BatchSettings, needs: Needs, seen: Marks, counts: Counts) -> Logits:
    """Compute the distributions that sampling draws from; removed tokens have probability zero.

    Temperature 0 puts all probability on the likeliest token, and a tie goes to the lowest id. The distributions are
    computed in float64 and rounded once, to float32 at least.
    """
    wide = _penalised(logits, settings, needs, seen, counts)
    best = torch.zeros_like(wide).scatter(-1, wide.argmax(-1, keepdim=True), 1.0)
    out = torch.promote_types(logits.dtype, torch.float32)
    if not needs.sampled:
        return best.to(out)
    greedy = settings.temperature == 0
    wide = wide / settings.temperature.masked_fill(greedy, 1.0)
    if needs.ordered:
        wide = keep_first(wide, settings.top_k, settings.top_p)
    return torch.where(greedy, best, softmax(keep_min_p(wide, settings.min_p))).to(out)


def _penalised(logits: Logits, settings: BatchSettings, needs: Needs, seen: Marks, counts: Counts) -> Wide:
    wide = logits.double()
    if needs.penalty:
        wide = penalise(wide, seen, settings.repetition_penalty)
    if needs.repeats:
        wide = penalise_repeats(wide, counts, settings.presence_penalty, settings.frequency_penalty)
    return wide


def draw(distribution: Logits, u: PerRow) -> IntPerRow:
    """Return the token of each row whose stretch of the cumulated distribution holds `u`, 0 <= u < 1."""
    cumulated = distribution.double().cumsum(-1)
    token = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)
    return token.clamp(max=distribution.shape[-1] - 1)  # never an index beyond the vocabulary, be the logits NaN


def choose(
    logits: Logits,
    settings: BatchSettings,
    needs: Needs,
    seen: Marks,
    counts: Counts,
    u: PerRow,
    allowed: Marks | None = None,
) -> tuple[IntPerRow, PerRow]:
    """Choose the next token of each row, and return it with its log probability under the unfiltered logits.

    The log probability is NaN where a logit of the row is not finite. `seen` marks the tokens of prompt and answer,
    `counts` has how often the answer has each token, `allowed` marks the tokens that may come next (None: all).
    """
    scores = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if needs.sampled:
        token = draw(probabilities(scores, settings, needs, seen, counts), u)
    else:
        penalised = needs.penalty or needs.repeats
        scores = _penalised(scores, settings, needs, seen, counts) if penalised else scores
        token = scores.argmax(-1, keepdim=True)
    wide = logits.double()
    logprob = wide.gather(-1, token) - wide.logsumexp(-1, keepdim=True)
    return token, torch.where(logits.isfinite().all(-1, keepdim=True), logprob, torch.nan)


def seen_tokens(histories: Sequence[Sequence[int]], vocab_size: int) -> Bool[np.ndarray, "batch vocab"]:
    """Mark the tokens of each history."""
    seen = np.zeros((len(histories), vocab_size), bool)
    for row, history in zip(seen, histories, strict=True):
        row[np.asarray(history, np.int64)] = True
    return seen

"""`llorch.ops.sampling` for a batch on its device: the same filters in the same order, without reads by the host.

    penalties -> temperature -> top-k -> top-p -> min-p -> softmax -> draw

Everything is computed in float64 and rounded once to float32, as in NumPy. The uniform numbers are NumPy's, drawn
on the host in advance, so a seed gives the same draws on every backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from llorch.ops.sampling import SamplingSettings

Wide = Float64[Tensor, "batch vocab"]  # logits in float64
PerRow = Float64[Tensor, "batch 1"]
IntPerRow = Int[Tensor, "batch 1"]
Logits = Float[Tensor, "batch vocab"]
Marks = Bool[Tensor, "batch vocab"]
Counts = Int[Tensor, "batch vocab"]

CANDIDATES = 1024  # on the CPU, number of highest logits to sort before sorting all, see `keep_first`


@dataclass(frozen=True)
class Needs:
    """Filters that the settings of a batch use; a sampling step omits the others."""

    penalty: bool  # some row has a repetition penalty
    sampled: bool  # some row is not greedy
    ordered: bool  # some row uses top-k or top-p
    repeats: bool  # some row has a presence or frequency penalty

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
    """Settings of every row, in tensors with fixed addresses; see `SamplingSettings`."""

    temperature: PerRow
    top_k: IntPerRow
    top_p: PerRow
    min_p: PerRow
    repetition_penalty: PerRow
    presence_penalty: PerRow
    frequency_penalty: PerRow

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device) -> "BatchSettings":
        """Copy settings, one per row, to a device."""

        def column(name: str) -> Tensor:
            dtype = torch.int64 if name == "top_k" else torch.float64
            return torch.tensor([[getattr(s, name)] for s in settings], dtype=dtype, device=device)

        return cls(**{field.name: column(field.name) for field in fields(cls)})

    def rows(self, row_index: Int[Tensor, " kept"]) -> "BatchSettings":
        """Return the settings of some rows."""
        return BatchSettings(**{field.name: getattr(self, field.name)[row_index] for field in fields(self)})

    def assign(self, settings: "BatchSettings") -> None:
        """Copy other settings into this storage."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(settings, field.name))


def uniforms(settings: Sequence[SamplingSettings], n_draws: int) -> Float64[np.ndarray, "batch draws"]:
    """Return the numbers that `llorch.model.generate.sample_ids` would draw, one row per sequence."""
    return np.stack([np.random.default_rng(s.seed).random(n_draws) for s in settings])


def penalise(logits: Wide, seen: Marks, penalty: PerRow) -> Wide:
    """Make every seen token less likely: positive logits divided, negative ones multiplied."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_repeats(logits: Wide, counts: Counts, presence: PerRow, frequency: PerRow) -> Wide:
    """Subtract the presence penalty from each token of the answer, and the frequency penalty per occurrence."""
    return logits - presence * (counts > 0) - frequency * counts


def keep_first(logits: Wide, top_k: IntPerRow, top_p: PerRow) -> Wide:
    """Keep the `top_k` highest logits and ties; of those the smallest set with probability mass `top_p`.

    Sorting the whole vocabulary takes a CPU as long as a token of a small model, so there only the highest logits are
    sorted first. On a GPU sorting is fast, and the host must not check if the highest logits were enough.
    """
    vocab = logits.shape[-1]
    k = torch.where(top_k == 0, vocab, top_k).clamp(max=vocab)
    if logits.device.type == "cpu" and vocab > CANDIDATES:
        ids = logits.topk(CANDIDATES, sorted=False).indices.sort(-1).values  # ties in the order of their ids
        ordered, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        filtered, is_enough = _keep_first_sorted(logits, ordered, ids.gather(-1, order), k, top_p)
        if is_enough.all():
            return filtered
    return _keep_first_sorted(logits, *logits.sort(dim=-1, descending=True, stable=True), k, top_p)[0]


def _keep_first_sorted(
    logits: Wide, ordered: Float64[Tensor, "batch some"], order: Int[Tensor, "batch some"], k: IntPerRow, top_p: PerRow
) -> tuple[Wide, Bool[Tensor, "batch 1"]]:
    """Apply `keep_first`, given the highest logits (`ordered`) and their ids (`order`), which may be too few.

    Also tell for each row if they were enough: else the filter may have removed tokens that belong to the result.
    """
    vocab, n_sorted = logits.shape[-1], order.shape[-1]
    threshold = torch.where(k <= n_sorted, ordered.gather(-1, k.clamp(max=n_sorted) - 1), -torch.inf)
    logits = logits.masked_fill(logits < threshold, -torch.inf)
    cumulated = softmax(logits).gather(-1, order).cumsum(-1)
    preceding_mass = cumulated.roll(1, -1)  # probability mass before each token
    preceding_mass[:, 0] = 0
    is_kept = preceding_mass < top_p
    in_mass = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, is_kept)
    lowest = ordered.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
    has_all_ties = (top_p >= 1) | (lowest > ordered[:, -1:])  # else ties of the last logit may be missing
    return logits.masked_fill(~in_mass & (top_p < 1), -torch.inf), has_all_ties & ((k <= n_sorted) | (k == vocab))


def keep_min_p(logits: Wide, min_p: PerRow) -> Wide:
    """Keep tokens at least `min_p` times as likely as the most likely token: a difference of logits of log(min_p)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), -torch.inf)


def softmax(logits: Wide) -> Wide:
    """Normalise to probabilities."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def probabilities(logits: Logits, settings: BatchSettings, needs: Needs, seen: Marks, counts: Counts) -> Logits:
    """Compute the distributions that sampling draws from; removed tokens have probability zero.

    Temperature 0 puts all probability on the most likely token; a tie goes to the lowest id. The distributions are
    computed in float64 and rounded once, to at least float32.
    """
    scores = _penalised(logits, settings, needs, seen, counts)
    best = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    out_dtype = torch.promote_types(logits.dtype, torch.float32)
    if not needs.sampled:
        return best.to(out_dtype)
    greedy = settings.temperature == 0
    scores = scores / settings.temperature.masked_fill(greedy, 1.0)
    if needs.ordered:
        scores = keep_first(scores, settings.top_k, settings.top_p)
    return torch.where(greedy, best, softmax(keep_min_p(scores, settings.min_p))).to(out_dtype)


def _penalised(logits: Logits, settings: BatchSettings, needs: Needs, seen: Marks, counts: Counts) -> Wide:
    scores = logits.double()
    if needs.penalty:
        scores = penalise(scores, seen, settings.repetition_penalty)
    if needs.repeats:
        scores = penalise_repeats(scores, counts, settings.presence_penalty, settings.frequency_penalty)
    return scores


def draw(distribution: Logits, u: PerRow) -> IntPerRow:
    """Return the token of each row whose interval of the cumulative distribution contains `u`, 0 <= u < 1."""
    cumulated = distribution.double().cumsum(-1)
    token = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)
    return token.clamp(max=distribution.shape[-1] - 1)  # stays in the vocabulary, even for NaN logits


def choose(
    logits: Logits, settings: BatchSettings, needs: Needs, seen: Marks, counts: Counts, u: PerRow,
    allowed: Marks | None = None,
) -> tuple[IntPerRow, PerRow]:  # fmt: skip
    """Sample the next token of each row, and return it with its log probability under the unfiltered logits.

    The log probability is NaN if a logit of the row is not finite. `seen` marks the tokens of prompt and answer,
    `counts` has the token counts of the answer, `allowed` marks the tokens that may come next (None: all).
    """
    scores = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if needs.sampled:
        token = draw(probabilities(scores, settings, needs, seen, counts), u)
    else:
        penalised = needs.penalty or needs.repeats
        scores = _penalised(scores, settings, needs, seen, counts) if penalised else scores
        token = scores.argmax(-1, keepdim=True)
    logits_float64 = logits.double()
    logprob = logits_float64.gather(-1, token) - logits_float64.logsumexp(-1, keepdim=True)
    return token, torch.where(logits.isfinite().all(-1, keepdim=True), logprob, torch.nan)


def seen_tokens(histories: Sequence[Sequence[int]], vocab_size: int) -> Bool[np.ndarray, "batch vocab"]:
    """Mark the tokens of each history."""
    marks = np.zeros((len(histories), vocab_size), bool)
    for row, history in zip(marks, histories, strict=True):
        row[np.asarray(history, np.int64)] = True
    return marks

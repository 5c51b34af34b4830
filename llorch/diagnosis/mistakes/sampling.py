"""Mistakes of checkpoints 09 to 11: the row that is sampled from, the greedy token, the filters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.sampling import SamplingSettings, keep_min_p, keep_top_k, keep_top_p, penalise, probabilities, softmax


@dataclass(frozen=True)
class SamplerInputs:
    """All that a step after the logits may read."""

    logits: np.ndarray  # of every token of the pass, (seq, vocab)
    settings: SamplingSettings
    history: Sequence[int]  # tokens so far

    @property
    def row(self) -> np.ndarray:
        """Logits of the last token, from which the sampler samples."""
        return self.logits[-1]

    def probabilities(self, **changes: int | float) -> np.ndarray:
        """Return the right distribution, with some settings changed."""
        return probabilities(self.row, replace(self.settings, **changes), self.history)  # pyright: ignore[reportArgumentType]


RIGHT: Mapping[str, Callable[[SamplerInputs], np.ndarray]] = {
    "selected_logits": lambda s: s.row,
    "argmax": lambda s: np.asarray([np.argmax(s.row)]),
    "probabilities": lambda s: s.probabilities(),
}


def penalty_divides_all(s: SamplerInputs, step: str) -> np.ndarray:
    """Divide negative logits too."""
    logits = s.row.copy()
    logits[np.unique(s.history)] /= logits.dtype.type(s.settings.repetition_penalty)
    return _filtered(s, logits)


def penalty_per_occurrence(s: SamplerInputs, step: str) -> np.ndarray:
    """Penalise a token once for every occurrence."""
    logits = s.row
    for token in s.history:
        logits = penalise(logits, [token], penalty=s.settings.repetition_penalty)
    return _filtered(s, logits)


def penalty_subtracted(s: SamplerInputs, step: str) -> np.ndarray:
    """Subtract the repetition penalty from the logits, as a presence penalty does."""
    logits = s.row.copy()
    logits[np.unique(s.history)] -= logits.dtype.type(s.settings.repetition_penalty)
    return _filtered(s, logits)


def temperature_after_filters(s: SamplerInputs, step: str) -> np.ndarray:
    """Apply the filters to logits at temperature 1, then the temperature."""
    logits = _kept(s, _penalised(s))
    return softmax(logits / logits.dtype.type(s.settings.temperature))


def top_p_on_logits(s: SamplerInputs, step: str) -> np.ndarray:
    """Sum up logits instead of probabilities."""
    if s.settings.top_p == 1:
        return s.probabilities()
    logits = keep_top_k(_tempered(s), k=s.settings.top_k)
    order = np.argsort(-logits, kind="stable")
    n_keep = int(np.argmax(np.cumsum(logits[order]) >= s.settings.top_p)) + 1
    return _only(s, logits, order[:n_keep])


def top_p_drops_crossing(s: SamplerInputs, step: str) -> np.ndarray:
    """Remove the token that reaches p."""
    if s.settings.top_p == 1:
        return s.probabilities()
    logits = keep_top_k(_tempered(s), k=s.settings.top_k)
    order = np.argsort(-logits, kind="stable")
    n_below = int(np.searchsorted(np.cumsum(softmax(logits)[order], dtype=np.float64), s.settings.top_p))
    return _only(s, logits, order[: max(n_below, 1)])


def last_dropped_at_one(s: SamplerInputs, step: str) -> np.ndarray:
    """Remove the least likely token without top-p (p = 1): it carries the sum to 1."""
    logits = keep_top_k(_tempered(s), k=s.settings.top_k)
    order = np.argsort(-logits, kind="stable")
    return _only(s, logits, order[: np.isfinite(logits).sum() - 1]) if s.settings.top_p == 1 else s.probabilities()


def min_p_absolute(s: SamplerInputs, step: str) -> np.ndarray:
    """Use the threshold of min-p without scaling it by the best probability."""
    logits = keep_top_p(keep_top_k(_tempered(s), k=s.settings.top_k), p=s.settings.top_p)
    return softmax(np.where(softmax(logits) < s.settings.min_p, -np.inf, logits).astype(logits.dtype))


def not_renormalised(s: SamplerInputs, step: str) -> np.ndarray:
    """Set the probabilities of removed tokens to zero, without renormalising the rest."""
    logits = _tempered(s)
    return np.where(s.probabilities() > 0, softmax(logits), 0).astype(logits.dtype)


def _penalised(s: SamplerInputs) -> np.ndarray:
    return penalise(s.row, s.history, penalty=s.settings.repetition_penalty)


def _tempered(s: SamplerInputs) -> np.ndarray:
    logits = _penalised(s)
    return logits / logits.dtype.type(s.settings.temperature)


def _kept(s: SamplerInputs, logits: np.ndarray) -> np.ndarray:
    """Apply the filters that follow the temperature, in the right order."""
    logits = keep_top_p(keep_top_k(logits, k=s.settings.top_k), p=s.settings.top_p)
    return keep_min_p(logits, min_p=s.settings.min_p)


def _filtered(s: SamplerInputs, penalised: np.ndarray) -> np.ndarray:
    """Apply the right chain after a penalty."""
    return softmax(_kept(s, penalised / penalised.dtype.type(s.settings.temperature)))


def _only(s: SamplerInputs, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Compute the distribution after a top-p that kept these tokens."""
    kept = np.full_like(logits, -np.inf)
    kept[tokens] = logits[tokens]
    return softmax(keep_min_p(kept, min_p=s.settings.min_p))


SELECTED, ARGMAX, PROBABILITIES = ("selected_logits",), ("argmax",), ("probabilities",)
PENALISED, TEMPERED = ("penalty", "all"), ("temperature", "top_p", "all")

SAMPLING: tuple[Mistake[SamplerInputs], ...] = (
    Mistake(
        name="selected-first-row", stages=SELECTED, wrong=lambda s, _: s.logits[0], cases=("near",),
        diagnosis="The first token's logits were used; the next token is predicted by the last row.",
    ),
    Mistake(
        name="selected-row-before-last", stages=SELECTED, wrong=lambda s, _: s.logits[-2], cases=("near",),
        diagnosis="The row before the last was used; row n - 1 predicts the token after n tokens.",
    ),
    Mistake(
        name="selected-mean-of-rows", stages=SELECTED, wrong=lambda s, _: s.logits.mean(axis=0), cases=("near",),
        diagnosis="Logits were averaged over the tokens; only the last row counts.",
    ),
    Mistake(
        name="argmax-last-of-ties", stages=ARGMAX, cases=("tie",),
        wrong=lambda s, _: np.asarray([s.row.size - 1 - np.argmax(s.row[::-1])]),
        diagnosis="The later of two equal logits was taken; ties go to the lowest id.",
    ),
    Mistake(
        name="argmax-smallest", stages=ARGMAX, cases=("near",), wrong=lambda s, _: np.asarray([np.argmin(s.row)]),
        diagnosis="The least likely token was taken; the sort is ascending.",
    ),
    Mistake(
        name="argmax-counted-from-one", stages=ARGMAX, wrong=lambda s, _: np.asarray([np.argmax(s.row) + 1]),
        cases=("near",),
        diagnosis="The id is one too high; ids count from 0.",
    ),
    Mistake(
        name="penalty-divides-negative-logits", stages=PROBABILITIES, cases=("penalty",), wrong=penalty_divides_all,
        diagnosis="Negative logits of seen tokens were divided, which makes them likelier; multiply negative logits.",
    ),
    Mistake(
        name="penalty-per-occurrence", stages=PROBABILITIES, cases=PENALISED, wrong=penalty_per_occurrence,
        diagnosis="A token was penalised once per occurrence; once is enough, however often it was seen.",
    ),
    Mistake(
        name="penalty-subtracted", stages=PROBABILITIES, cases=PENALISED, wrong=penalty_subtracted,
        diagnosis="The penalty was subtracted (presence penalty); the repetition penalty divides or multiplies.",
    ),
    Mistake(
        name="penalty-ignored", stages=PROBABILITIES, wrong=lambda s, _: s.probabilities(repetition_penalty=1.0),
        cases=PENALISED,
        diagnosis="The repetition penalty had no effect.",
    ),
    Mistake(
        name="temperature-ignored", stages=PROBABILITIES, wrong=lambda s, _: s.probabilities(temperature=1.0),
        cases=TEMPERED,
        diagnosis="The temperature had no effect.",
    ),
    Mistake(
        name="temperature-multiplied", stages=PROBABILITIES, cases=TEMPERED,
        wrong=lambda s, _: s.probabilities(temperature=1 / s.settings.temperature),
        diagnosis="Logits were multiplied by the temperature; divide them, so that a high one flattens.",
    ),
    Mistake(
        name="temperature-after-filters", stages=PROBABILITIES, cases=("top_p",), wrong=temperature_after_filters,
        diagnosis="top-p saw the logits before the temperature; the order is penalty, temperature, top-k, top-p, "
        "min-p.",
    ),
    Mistake(
        name="top-k-ignored", stages=PROBABILITIES, wrong=lambda s, _: s.probabilities(top_k=0), cases=("top_k",),
        diagnosis="top-k had no effect.",
    ),
    Mistake(
        name="top-k-one-less", stages=PROBABILITIES, cases=("top_k",),
        wrong=lambda s, _: s.probabilities(top_k=max(s.settings.top_k - 1, 0)),
        diagnosis="k - 1 tokens were kept; the k-th stays.",
    ),
    Mistake(
        name="top-k-one-more", stages=PROBABILITIES, cases=("top_k",),
        wrong=lambda s, _: s.probabilities(top_k=s.settings.top_k + (s.settings.top_k > 0)),
        diagnosis="k + 1 tokens were kept.",
    ),
    Mistake(
        name="top-p-ignored", stages=PROBABILITIES, wrong=lambda s, _: s.probabilities(top_p=1.0),
        cases=("top_p", "all"),
        diagnosis="top-p had no effect.",
    ),
    Mistake(
        name="top-p-on-logits", stages=PROBABILITIES, cases=("top_p", "all"), wrong=top_p_on_logits,
        diagnosis="Logits were summed up until p; top-p sums probabilities, after the softmax.",
    ),
    Mistake(
        name="top-p-drops-crossing-token", stages=PROBABILITIES, cases=("top_p",), wrong=top_p_drops_crossing,
        also=(last_dropped_at_one,),
        diagnosis="The token that carries the sum over p was removed; it stays, so that at least p is kept.",
    ),
    Mistake(
        name="min-p-ignored", stages=PROBABILITIES, wrong=lambda s, _: s.probabilities(min_p=0.0), cases=("min_p",),
        diagnosis="min-p had no effect.",
    ),
    Mistake(
        name="min-p-absolute", stages=PROBABILITIES, cases=("min_p",), wrong=min_p_absolute,
        diagnosis="Probabilities were compared with min_p itself; the threshold is min_p times the best probability.",
    ),
    Mistake(
        name="probabilities-not-renormalised", stages=PROBABILITIES, cases=("top_k", "top_p", "min_p", "all"),
        wrong=not_renormalised,
        diagnosis="Removed tokens were set to zero after the softmax; the kept probabilities must sum to one again.",
    ),
)  # fmt: skip

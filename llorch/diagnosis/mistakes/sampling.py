"""Known mistakes after the logits: selected row, greedy token, penalty, filters; `mistake` explains the fields."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import Function, instead
from llorch.ops.sampling import SamplingSettings, keep_min_p, keep_top_k, penalise, probabilities, softmax

UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class SamplerInputs:
    """Inputs of a step after the logits: selection of a row, greedy token, or probabilities."""

    logits: np.ndarray  # (seq, vocab), one row for each token of the pass
    settings: SamplingSettings
    history: Sequence[int]  # ids of the prompt and the output

    @property
    def row(self) -> np.ndarray:
        """Logits of the last token, which predict the next one."""
        return self.logits[-1]

    def probabilities(self) -> np.ndarray:
        """Return the right distribution."""
        return probabilities(self.row, self.settings, self.history)


RIGHT: Mapping[str, Callable[[SamplerInputs], np.ndarray]] = {
    "selected_logits": lambda s: s.row,
    "argmax": lambda s: np.asarray([np.argmax(s.row)]),
    "probabilities": lambda s: s.probabilities(),
}


def penalty_divides_all(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    """Divide negative logits too."""
    logits = logits.copy()
    logits[np.unique(history)] /= logits.dtype.type(penalty)
    return logits


def penalty_per_occurrence(right: Function) -> Function:
    """Penalise a token once for every occurrence."""

    def wrong(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
        for token in history:
            logits = right(logits, np.asarray([token]), penalty=penalty)
        return logits

    return wrong


def penalty_subtracted(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    """Subtract the repetition penalty from the logits, as a presence penalty does."""
    logits = logits.copy()
    logits[np.unique(history)] -= logits.dtype.type(penalty)
    return logits


def temperature_after_filters(right: Function) -> Function:
    """Apply the filters to logits at temperature 1, then the temperature."""

    def wrong(**kw: object) -> np.ndarray:
        filtered = np.where(right(**kw | {"temperature": 1.0}) > 0, right(**kw | UNFILTERED), 0)
        return filtered / filtered.sum()

    return wrong


def top_p_on_logits(logits: np.ndarray, p: float) -> np.ndarray:
    """Accumulate logits instead of probabilities."""
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    return _only(logits, order[: int(np.argmax(np.cumsum(logits[order]) >= p)) + 1])


def top_p_drops_crossing(logits: np.ndarray, p: float) -> np.ndarray:
    """Remove the token that reaches p."""
    if p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    n_below = int(np.searchsorted(np.cumsum(softmax(logits)[order], dtype=np.float64), p))
    return _only(logits, order[: max(n_below, 1)])


def last_dropped_at_one(s: SamplerInputs, step: str) -> np.ndarray:
    """Remove the least likely token at p = 1: with it the sum reaches 1."""
    if s.settings.top_p < 1:
        return s.probabilities()
    logits = penalise(s.row, s.history, penalty=s.settings.repetition_penalty)
    logits = keep_top_k(logits / logits.dtype.type(s.settings.temperature), k=s.settings.top_k)
    order = np.argsort(-logits, kind="stable")
    remaining = _only(logits, order[: np.isfinite(logits).sum() - 1])
    return softmax(keep_min_p(remaining, min_p=s.settings.min_p))


def min_p_absolute(logits: np.ndarray, min_p: float) -> np.ndarray:
    """Use min_p as the threshold without scaling it by the largest probability."""
    return np.where(softmax(logits) < min_p, -np.inf, logits).astype(logits.dtype)


def not_renormalised(right: Function) -> Function:
    """Set the probabilities of removed tokens to 0 without renormalising the others."""
    return lambda **kw: np.where(right(**kw) > 0, right(**kw | UNFILTERED), 0)


def _only(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the logits with -inf for all tokens except `tokens`."""
    filtered = np.full_like(logits, -np.inf)
    filtered[tokens] = logits[tokens]
    return filtered


# Values of `part`: functions that `wrong` replaces, see `in_stage`. Without `part`, `wrong` computes the step.
ROW, BEST, PENALTY, DISTRIBUTION = "last_row", "argmax", "penalise", "distribution"
SELECTED, ARGMAX, PROBABILITIES = ("selected_logits",), ("argmax",), ("probabilities",)
PENALISED, TEMPERED = ("penalty", "all"), ("temperature", "top_p", "all")  # `cases`: sampling settings that show it

SAMPLING: tuple[Mistake[SamplerInputs], ...] = (
    Mistake(
        name="selected-first-row", stages=SELECTED, part=ROW, wrong=instead(lambda logits: logits[0]), cases=("near",),
        diagnosis="The first token's logits were used; the next token is predicted by the last row.",
    ),
    Mistake(
        name="selected-row-before-last", stages=SELECTED, part=ROW, wrong=instead(lambda logits: logits[-2]),
        cases=("near",),
        diagnosis="The row before the last was used; row n - 1 predicts the token after n tokens.",
    ),
    Mistake(
        name="selected-mean-of-rows", stages=SELECTED, part=ROW, wrong=instead(lambda logits: logits.mean(axis=0)),
        cases=("near",),
        diagnosis="Logits were averaged over the tokens; only the last row counts.",
    ),
    Mistake(
        name="argmax-last-of-ties", stages=ARGMAX, part=BEST, cases=("tie",),
        wrong=instead(lambda row: row.size - 1 - np.argmax(row[::-1])),
        diagnosis="The later of two equal logits was taken; ties go to the lowest id.",
    ),
    Mistake(
        name="argmax-smallest", stages=ARGMAX, part=BEST, cases=("near",), wrong=instead(lambda row: np.argmin(row)),
        diagnosis="The least likely token was taken; the sort is ascending.",
    ),
    Mistake(
        name="argmax-counted-from-one", stages=ARGMAX, part=BEST, cases=("near",),
        wrong=instead(lambda row: np.argmax(row) + 1),
        diagnosis="The id is one too high; ids count from 0.",
    ),
    Mistake(
        name="penalty-divides-negative-logits", stages=PROBABILITIES, cases=("penalty",), part=PENALTY,
        wrong=instead(penalty_divides_all),
        diagnosis="Negative logits of seen tokens were divided, which makes them likelier; multiply negative logits.",
    ),
    Mistake(
        name="penalty-per-occurrence", stages=PROBABILITIES, cases=PENALISED, part=PENALTY,
        wrong=penalty_per_occurrence,
        diagnosis="A token was penalised once per occurrence; once is enough, however often it was seen.",
    ),
    Mistake(
        name="penalty-subtracted", stages=PROBABILITIES, cases=PENALISED, part=PENALTY,
        wrong=instead(penalty_subtracted),
        diagnosis="The penalty was subtracted (presence penalty); the repetition penalty divides or multiplies.",
    ),
    Mistake(
        name="penalty-ignored", stages=PROBABILITIES, cases=PENALISED, part=PENALTY,
        wrong=instead(lambda logits, history, penalty: logits),
        diagnosis="The repetition penalty had no effect.",
    ),
    Mistake(
        name="temperature-ignored", stages=PROBABILITIES, cases=TEMPERED, part=DISTRIBUTION,
        wrong=lambda right: lambda **kw: right(**kw | {"temperature": 1.0}),
        diagnosis="The temperature had no effect.",
    ),
    Mistake(
        name="temperature-multiplied", stages=PROBABILITIES, cases=TEMPERED, part=DISTRIBUTION,
        wrong=lambda right: lambda **kw: right(**kw | {"temperature": 1 / kw["temperature"]}),
        diagnosis="Logits were multiplied by the temperature; divide them, so that a high one flattens.",
    ),
    Mistake(
        name="temperature-after-filters", stages=PROBABILITIES, cases=("top_p",), part=DISTRIBUTION,
        wrong=temperature_after_filters,
        diagnosis="top-p saw the logits before the temperature; the order is penalty, temperature, top-k, top-p, "
        "min-p.",
    ),
    Mistake(
        name="top-k-ignored", stages=PROBABILITIES, cases=("top_k",), part="keep_top_k",
        wrong=instead(lambda logits, k: logits),
        diagnosis="top-k had no effect.",
    ),
    Mistake(
        name="top-k-one-less", stages=PROBABILITIES, cases=("top_k",), part="keep_top_k",
        wrong=lambda right: lambda logits, k: right(logits, k=max(k - 1, 0)),
        diagnosis="k - 1 tokens were kept; the k-th stays.",
    ),
    Mistake(
        name="top-k-one-more", stages=PROBABILITIES, cases=("top_k",), part="keep_top_k",
        wrong=lambda right: lambda logits, k: right(logits, k=k + (k > 0)),
        diagnosis="k + 1 tokens were kept.",
    ),
    Mistake(
        name="top-p-ignored", stages=PROBABILITIES, cases=("top_p", "all"), part="keep_top_p",
        wrong=instead(lambda logits, p: logits),
        diagnosis="top-p had no effect.",
    ),
    Mistake(
        name="top-p-on-logits", stages=PROBABILITIES, cases=("top_p", "all"), part="keep_top_p",
        wrong=instead(top_p_on_logits),
        diagnosis="Logits were summed up until p; top-p sums probabilities, after the softmax.",
    ),
    Mistake(
        name="top-p-drops-crossing-token", stages=PROBABILITIES, cases=("top_p",), part="keep_top_p",
        wrong=instead(top_p_drops_crossing), also=(last_dropped_at_one,),
        diagnosis="The token that carries the sum over p was removed; it stays, so that at least p is kept.",
    ),
    Mistake(
        name="min-p-ignored", stages=PROBABILITIES, cases=("min_p",), part="keep_min_p",
        wrong=instead(lambda logits, min_p: logits),
        diagnosis="min-p had no effect.",
    ),
    Mistake(
        name="min-p-absolute", stages=PROBABILITIES, cases=("min_p",), part="keep_min_p", wrong=instead(min_p_absolute),
        diagnosis="Probabilities were compared with min_p itself; the threshold is min_p times the best probability.",
    ),
    Mistake(
        name="probabilities-not-renormalised", stages=PROBABILITIES, cases=("top_k", "top_p", "min_p", "all"),
        part=DISTRIBUTION, wrong=not_renormalised,
        diagnosis="Removed tokens were set to zero after the softmax; the kept probabilities must sum to one again.",
    ),
)  # fmt: skip

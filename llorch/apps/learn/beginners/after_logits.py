"""Mistakes of beginners after the logits: lessons 09 to 12."""

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call
from llorch.apps.learn.exercises import after_logits as right

Array = np.ndarray


def row_of_largest_logits(logits: Array) -> Array:
    """The largest logit of every token id was taken over all rows; take the last row."""
    return logits.max(axis=0)


def sum_of_rows(logits: Array) -> Array:
    """The rows were added up; take the last one."""
    return logits.sum(axis=0)


def row_of_largest_logit(logits: Array) -> Array:
    """The row with the largest logit was taken; take the last one."""
    return logits[logits.max(axis=1).argmax()]


def second_largest(row: Array) -> Array:
    """The second largest logit was taken."""
    return np.asarray(np.argsort(-row, kind="stable")[1])


def place_of_last_rise(row: Array) -> Array:
    """Each logit was compared with the one before it; compare it with the largest so far."""
    rises = np.flatnonzero(np.diff(row) > 0)
    return np.asarray(rises[-1] + 1 if len(rises) else 0)


def softmax_without_maximum(logits: Array) -> Array:
    """exp was taken of the logits themselves, which overflows; subtract the largest one first."""
    weights = np.exp(logits)
    return weights / weights.sum()


def softmax_minus_mean(logits: Array) -> Array:
    """The mean was subtracted before exp; subtract the largest logit, so that exp cannot overflow."""
    weights = np.exp(logits - logits.mean())
    return weights / weights.sum()


def softmax_not_divided(logits: Array) -> Array:
    """The exponentials were not divided by their sum."""
    return np.exp(logits - logits.max())


def softmax_base_two(logits: Array) -> Array:
    """Powers of 2 were taken; softmax takes powers of e: np.exp."""
    weights = np.exp2(logits - logits.max())
    return weights / weights.sum()


def softmax_by_length(logits: Array) -> Array:
    """The result has length 1; it must have sum 1."""
    weights = np.exp(logits - logits.max())
    return weights / np.linalg.norm(weights)


def softmax_by_mean(logits: Array) -> Array:
    """The exponentials were divided by their mean; divide by their sum."""
    weights = np.exp(logits - logits.max())
    return weights / weights.mean()


def shares_without_exponential(logits: Array) -> Array:
    """The logits were divided by their sum; softmax divides exponentials by their sum."""
    return logits / logits.sum()


def _penalised(logits: Array, history: Array, change: Any) -> Array:
    new, ids = logits.copy(), np.unique(history)
    new[ids] = change(logits[ids])
    return new


def penalty_multiplies(logits: Array, history: Array, penalty: float) -> Array:
    """All logits of the history were multiplied; a positive logit is divided, a negative one multiplied."""
    return _penalised(logits, history, lambda old: old * penalty)


def penalty_of_last_token(logits: Array, history: Array, penalty: float) -> Array:
    """Only the last token of the history was penalised; all of them are."""
    return right.PENALISE.reference(logits=logits, history=history[-1:], penalty=penalty)


def penalty_of_other_tokens(logits: Array, history: Array, penalty: float) -> Array:
    """The tokens that are not in the history were penalised; those in it are."""
    others = np.setdiff1d(np.arange(len(logits)), history)
    return right.PENALISE.reference(logits=logits, history=others, penalty=penalty)


def penalty_of_all_tokens(logits: Array, history: Array, penalty: float) -> Array:
    """All tokens were penalised; only those of the history are."""
    return right.PENALISE.reference(logits=logits, history=np.arange(len(logits)), penalty=penalty)


def penalty_of_positive_only(logits: Array, history: Array, penalty: float) -> Array:
    """Only positive logits were changed; a negative one is multiplied by the penalty."""
    return _penalised(logits, history, lambda old: np.where(old > 0, old / penalty, old))


def penalty_of_negative_only(logits: Array, history: Array, penalty: float) -> Array:
    """Only negative logits were changed; a positive one is divided by the penalty."""
    return _penalised(logits, history, lambda old: np.where(old > 0, old, old * penalty))


def penalty_of_repeated_only(logits: Array, history: Array, penalty: float) -> Array:
    """Only tokens that occur twice were penalised; a token that occurs once is, too."""
    ids, counts = np.unique(history, return_counts=True)
    return right.PENALISE.reference(logits=logits, history=ids[counts > 1], penalty=penalty)


def _cut(logits: Array, is_left: Array, fill: float = -np.inf) -> Array:
    return np.where(is_left, logits, fill)


def _fill(exercise: Any, fill: float, words: str) -> Call:
    """Make a filter that sets removed logits to another number."""

    def wrong(**arguments: Any) -> Array:
        new = exercise.reference(**arguments)
        return np.where(np.isneginf(new), fill, new)

    wrong.__name__ = f"removed_set_to_{words.replace(' ', '_')}"
    wrong.__doc__ = f"Removed logits were set to {words}; set them to -inf, so that their probability is 0."
    return wrong


def _fills(exercise: Any) -> tuple[Call, ...]:
    low = float(np.finfo(np.float32).min)
    values = ((0.0, "0"), (-1e9, "-1e9"), (-1e10, "-1e10"), (-1e4, "-1e4"), (low, "the smallest float32"))
    return tuple(_fill(exercise, fill, words) for fill, words in values)


def top_k_without_ties(logits: Array, k: int) -> Array:
    """Only some of the logits that equal the smallest of the k stay; all of them stay."""
    return _cut(logits, np.isin(np.arange(len(logits)), np.argsort(-logits, kind="stable")[:k])) if k else logits


def top_k_without_later_ties(logits: Array, k: int) -> Array:
    """Only some of the logits that equal the smallest of the k stay; all of them stay."""
    return _cut(logits, np.isin(np.arange(len(logits)), np.argsort(logits, kind="stable")[-k:])) if k else logits


def top_k_border_removed(logits: Array, k: int) -> Array:
    """The smallest of the k was removed: compare with >=, not with >."""
    return _cut(logits, logits > np.sort(logits)[::-1][k - 1]) if 0 < k <= len(logits) else logits


def bottom_k(logits: Array, k: int) -> Array:
    """The smallest k logits stayed; the largest stay."""
    return _cut(logits, logits <= np.sort(logits)[min(k, len(logits)) - 1]) if k else logits


def top_k_removed(logits: Array, k: int) -> Array:
    """The largest k logits were removed; they stay, and the others are removed."""
    return _cut(logits, logits < np.sort(logits)[::-1][min(k, len(logits)) - 1]) if k else logits


def top_k_zero_removes_all(logits: Array, k: int) -> Array:
    """k = 0 removed all tokens; it keeps all."""
    return right.KEEP_TOP_K.reference(logits=logits, k=k) if k else np.full_like(logits, -np.inf)


def first_k(logits: Array, k: int) -> Array:
    """The first k token ids stayed; the k largest logits stay."""
    return _cut(logits, np.arange(len(logits)) < (k or len(logits)))


def _top_p(logits: Array, p: float, keep: Any, *, probs: Any = right.our_softmax, ascending: bool = False) -> Array:
    probabilities = probs(logits)
    order = np.argsort(probabilities if ascending else -probabilities, kind="stable")
    is_left = np.zeros(len(logits), bool)
    is_left[order] = keep(np.cumsum(probabilities[order]), probabilities[order])
    return _cut(logits, is_left)


def _keeps_all_at_one(function: Call) -> Call:
    """Let a wrong top-p keep all tokens if p is 1."""

    @wraps(function)
    def wrong(logits: Array, p: float) -> Array:
        return logits if p >= 1 else function(logits=logits, p=p)

    return wrong


def top_p_of_sum_that_is_never_reached(logits: Array, p: float) -> Array:
    """argmax(sums >= p) is 0 if rounding keeps all sums below p, and one token stays; then all stay."""
    order = np.argsort(-logits, kind="stable")
    n_left = int(np.argmax(np.cumsum(right.our_softmax(logits)[order]) >= p)) + 1
    return _cut(logits, np.isin(np.arange(len(logits)), order[:n_left]))


def top_p_from_the_least(logits: Array, p: float) -> Array:
    """Probabilities were added from the smallest on; start with the largest."""
    return _top_p(logits, p, lambda total, probs: total - probs < p, ascending=True)


def top_p_without_crossing(logits: Array, p: float) -> Array:
    """The token that crosses p was removed, also where p is 1; it stays."""
    return _top_p(logits, p, lambda total, probs: total < p)


def top_p_one_more(logits: Array, p: float) -> Array:
    """One token behind the one that crosses p stayed, too."""
    return _top_p(logits, p, lambda total, probs: np.concatenate([[True, True], total[:-2] < p])[: len(total)])


def top_p_removed(logits: Array, p: float) -> Array:
    """The likely tokens were removed; they stay, and the others are removed."""
    return _top_p(logits, p, lambda total, probs: total - probs >= p)


def top_p_of_single_tokens(logits: Array, p: float) -> Array:
    """Tokens with a probability below p were removed; p is the sum of the probabilities that stay."""
    return _top_p(logits, p, lambda total, probs: probs >= p)


def top_p_of_rest(logits: Array, p: float) -> Array:
    """Tokens stayed until the sum reached 1 - p; p is the sum of the probabilities that stay."""
    return _top_p(logits, p, lambda total, probs: total - probs < 1 - p)


def top_p_in_order_of_ids(logits: Array, p: float) -> Array:
    """Probabilities were added in the order of the ids; add them from the largest on."""
    probabilities = right.our_softmax(logits)
    return _cut(logits, np.cumsum(probabilities) - probabilities < p)


def top_p_not_put_back(logits: Array, p: float) -> Array:
    """The mask is in the order of the sorted tokens; bring it back to the order of the ids."""
    probabilities = np.sort(right.our_softmax(logits))[::-1]
    return _cut(logits, np.cumsum(probabilities) - probabilities < p)


def top_p_put_back_by_the_order(logits: Array, p: float) -> Array:
    """The mask was indexed with the order: mask[order]; write to it: mask[order] = ..."""
    order = np.argsort(-logits, kind="stable")
    probabilities = right.our_softmax(logits)[order]
    return _cut(logits, (np.cumsum(probabilities) - probabilities < p)[order])


def min_p_of_logits(logits: Array, min_p: float) -> Array:
    """The limit was min_p times the largest logit; it is min_p times the largest probability."""
    return _cut(logits, logits >= min_p * logits.max()) if min_p else logits


def min_p_removed(logits: Array, min_p: float) -> Array:
    """The likely tokens were removed; those below the limit are."""
    return _cut(logits, logits < logits.max() + np.log(min_p)) if min_p else logits


def min_p_minus(logits: Array, min_p: float) -> Array:
    """The limit was the largest probability minus min_p; it is min_p times the largest probability."""
    probabilities = right.our_softmax(logits)
    return _cut(logits, probabilities >= probabilities.max() - min_p) if min_p else logits


def min_p_of_mean(logits: Array, min_p: float) -> Array:
    """The limit was min_p times the mean probability; it is min_p times the largest."""
    probabilities = right.our_softmax(logits)
    return _cut(logits, probabilities >= min_p * probabilities.mean()) if min_p else logits


def min_p_in_base_two(logits: Array, min_p: float) -> Array:
    """The logarithm has base 2; take the natural one: the largest logit plus np.log(min_p)."""
    return _cut(logits, logits >= logits.max() + np.log2(min_p)) if min_p else logits


def min_p_in_base_ten(logits: Array, min_p: float) -> Array:
    """The logarithm has base 10; take the natural one: the largest logit plus np.log(min_p)."""
    return _cut(logits, logits >= logits.max() + np.log10(min_p)) if min_p else logits


def min_p_log_missing(logits: Array, min_p: float) -> Array:
    """The limit was the largest logit minus min_p; in logits it is the largest plus log(min_p)."""
    return _cut(logits, logits >= logits.max() - min_p) if min_p else logits


STEPS: Mapping[str, Any] = {  # of the chain, in its order
    "penalty": lambda x, a: right.our_penalty(x, a["history"].tolist(), penalty=a["penalty"]),
    "temperature": lambda x, a: x / a["temperature"],
    "top_k": lambda x, a: right.our_top_k(x, k=a["top_k"]),
    "top_p": lambda x, a: right.our_top_p(x, p=a["top_p"]),
    "min_p": lambda x, a: right.our_min_p(x, min_p=a["min_p"]),
}


def _chain(name: str, sentence: str, *steps: str, end: Any = right.our_softmax) -> Call:
    """Make the distribution of other steps, or in another order."""

    def wrong(**arguments: Any) -> Array:
        logits = arguments["logits"]
        for step in steps:
            logits = STEPS[step](logits, arguments)
        return end(logits)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


CHAINS = (
    _chain("penalty_left_out", "The penalty was left out.", "temperature", "top_k", "top_p", "min_p"),
    _chain("penalty_last", "The penalty came last; it is first.", "temperature", "top_k", "top_p", "min_p", "penalty"),
    _chain("top_p_before_top_k", "Top-p came before top-k; it is top-k, top-p, min-p.",
           "penalty", "temperature", "top_p", "top_k", "min_p"),
    _chain("min_p_before_top_p", "Min-p came before top-p; it is top-k, top-p, min-p.",
           "penalty", "temperature", "top_k", "min_p", "top_p"),
    _chain("filters_reversed", "The filters came in reverse; it is top-k, top-p, min-p.",
           "penalty", "temperature", "min_p", "top_p", "top_k"),
    _chain("softmax_missing", "The softmax at the end is missing.",
           "penalty", "temperature", "top_k", "top_p", "min_p", end=lambda x: x),
)  # fmt: skip


def positions_from_zero(n_before: int, n_new: int) -> Array:
    """The positions start at 0; the cache has n_before tokens, so they start at n_before."""
    return np.arange(n_new)


def positions_end_before(n_before: int, n_new: int) -> Array:
    """n_new is a number of tokens, not the end: np.arange(n_before, n_before + n_new)."""
    return np.arange(n_before, n_new)


def positions_constant(n_before: int, n_new: int) -> Array:
    """All new tokens have the same position; each is 1 further."""
    return np.full(n_new, n_before)


def _stream(name: str, sentence: str, choose: Any) -> Call:
    """Make a wrong loop from the right tokens: `choose(tokens, prompt, n)`; `tokens` has one too many."""

    def wrong(step: Any, prompt: Array, max_tokens: int) -> Iterator[int]:
        tokens = [*right.generate(step, prompt, max_tokens + 1)]
        yield from choose(tokens, prompt.tolist(), max_tokens)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


STREAMS = (
    _stream("argmax_of_one_number", "Token 0 came every time: step returns a row of logits; take its argmax.",
            lambda tokens, prompt, n: [0] * n),
    _stream("first_token_lost", "The first token is missing: the one after the prompt was fed back, but not yielded.",
            lambda tokens, prompt, n: tokens[1:]),
    _stream("first_token_lost_and_one_too_few", "The first token is missing: it was fed back, but not yielded.",
            lambda tokens, prompt, n: tokens[1:n]),
    _stream("one_token_too_many", "One token too many came: yield max_tokens of them.",
            lambda tokens, prompt, n: tokens),
    _stream("one_token_too_few", "One token too few came: yield max_tokens of them.",
            lambda tokens, prompt, n: tokens[: n - 1]),
    _stream("limit_counts_the_prompt", "max_tokens was taken for the length of the whole text; it counts new tokens.",
            lambda tokens, prompt, n: tokens[: max(0, n - len(prompt))]),
    _stream("prompt_yielded", "The prompt was yielded, too; yield the new tokens only.",
            lambda tokens, prompt, n: [*prompt, *tokens[:n]]),
    _stream("last_prompt_token_yielded", "The last token of the prompt was yielded first; yield the new tokens only.",
            lambda tokens, prompt, n: [prompt[-1], *tokens[: n - 1]]),
    _stream("first_token_repeated", "The first token was yielded every time: feed the new token back.",
            lambda tokens, prompt, n: tokens[:1] * n),
    _stream("first_token_twice", "The first token was yielded twice.",
            lambda tokens, prompt, n: [tokens[0], *tokens[: n - 1]]),
)  # fmt: skip
WRONG: Mapping[str, Sequence[Call]] = {
    "last_row": (row_of_largest_logits, sum_of_rows, row_of_largest_logit,),
    "argmax": (second_largest, place_of_last_rise),
    "softmax": (
        softmax_without_maximum, softmax_minus_mean, softmax_not_divided, softmax_base_two,
        softmax_by_length, softmax_by_mean, shares_without_exponential,
    ),
    "penalise": (
        penalty_multiplies, penalty_of_last_token, penalty_of_other_tokens,
        penalty_of_all_tokens, penalty_of_positive_only, penalty_of_negative_only, penalty_of_repeated_only,
    ),
    "keep_top_k": (
        top_k_without_ties, top_k_without_later_ties, top_k_border_removed, bottom_k, top_k_removed,
        top_k_zero_removes_all, first_k, *_fills(right.KEEP_TOP_K),
    ),
    "keep_top_p": (top_p_without_crossing, top_p_of_sum_that_is_never_reached, *(map(_keeps_all_at_one, (
        top_p_from_the_least, top_p_one_more, top_p_removed,
        top_p_of_single_tokens, top_p_of_rest, top_p_in_order_of_ids, top_p_not_put_back, top_p_put_back_by_the_order,
        *_fills(right.KEEP_TOP_P),
    )))),
    "keep_min_p": (
        min_p_of_logits, min_p_removed, min_p_minus, min_p_of_mean, min_p_log_missing, min_p_in_base_two,
        min_p_in_base_ten, *_fills(right.KEEP_MIN_P),
    ),
    "distribution": CHAINS,
    "generate": STREAMS,
    "positions": (positions_from_zero, positions_end_before, positions_constant),
}  # fmt: skip

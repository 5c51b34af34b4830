"""Generation: sample a token, feed it back, and hand out text as soon as it is certain.

Text is held back while a character is incomplete (a token may end inside its UTF-8 bytes) and while it may be the
beginning of a stop string. Numbers that are not finite show in the logits; a second pass that looks at every stage
names where they begin.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np

from llorch.ops.sampling import SamplingSettings, draw, probabilities
from llorch.runtime.errors import NonFiniteRun, UserError

Step = Callable[[Sequence[int]], np.ndarray]  # new ids -> logits of the last one, (vocab,)


@runtime_checkable  # so that the shape checks of the tests can look at it
class Bytes(Protocol):
    """What generation needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        ...


class IdsOnly:
    """Stands for a tokenizer where ids are compared and no text is made."""

    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """Return no bytes: the model has no vocabulary."""
        return b""


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    text: str  # what became certain with it; may be empty, or end earlier tokens' text
    logprob: float  # natural log of the model's probability of it, before any filter
    finish: str | None = None  # "stop", "eos" or "length" on the last one


class Guide(Protocol):
    """Which tokens may come next where an answer must have a form, such as that of a grammar; of one answer."""

    def allowed(self) -> np.ndarray:
        """Mark the tokens that may follow those taken so far, bool, (vocab,); at least one may, or an end token."""
        ...

    def take(self, token_id: int) -> None:
        """Go on after a token that was allowed."""
        ...


@dataclass(frozen=True)
class Job:
    """What to do with one prompt: at most `max_tokens` more, sampled by `settings`; one of `end_ids` is the last.

    With `adapter` it runs through the adapter of that name. Of each step the `n_top` likeliest tokens are wanted, too.
    """

    ids: Sequence[int]
    max_tokens: int
    settings: SamplingSettings
    end_ids: frozenset[int]
    adapter: str | None = None
    n_top: int = 0
    guide: Guide | None = None

    @property
    def n_slots(self) -> int:
        """Slots of the cache that it fills; the last token is never fed back."""
        return len(self.ids) + self.max_tokens - 1


@dataclass(frozen=True)
class Sampled:
    """A token that was drawn, and the likeliest ones of its step: log probabilities before any filter."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log probabilities, the likeliest first


class GenerationBatch(Protocol):
    """Jobs that run together, and come and go while others run; one thread calls it.

    Whoever calls decides when an answer ends, and lets its job leave: by end tokens, stop strings or `max_tokens`.
    """

    def join(self, job: Job) -> int | None:
        """Take a job in; gives its ticket, or None while there is no room. ValueError where there never will be."""
        ...

    def leave(self, ticket: int) -> None:
        """Give back what a job holds, whether it has ended or is given up."""
        ...

    def step(self) -> Mapping[int, Sampled | Exception]:
        """Run one pass: a stretch of one prompt, or a token of every job that is past its prompt.

        Gives the tokens that were made, by ticket. An exception is that of one job, which has to leave.
        """
        ...

    def n_cached(self, ticket: int) -> int:
        """Count the tokens of the prompt that were not computed, because an earlier prompt began with them."""
        ...


def sample_ids(
    step: Step, prompt: Sequence[int], settings: SamplingSettings, *, max_tokens: int
) -> Iterator[tuple[int, float]]:
    """Draw up to `max_tokens` ids, with log probabilities under the unfiltered logits.

    `step` runs new ids through the model; the repetition penalty looks at the prompt too.
    """
    rng = np.random.default_rng(settings.seed)
    history = list(prompt)
    new: Sequence[int] = prompt
    for _ in range(max_tokens):
        logits = step(new)
        token_id = draw(probabilities(logits, settings, history, n_prompt=len(prompt)), float(rng.random()))
        yield token_id, log_probability(logits, token_id)
        history.append(token_id)
        new = [token_id]


def log_probability(logits: np.ndarray, token_id: int) -> float:
    """Log softmax of one token, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def stream(sampled: Iterator[tuple[int, float]], answer: "Answer") -> Iterator[Token]:
    """Turn sampled ids into tokens with text, until the answer ends."""
    for token_id, logprob in sampled:
        token = answer.take(token_id, logprob)
        yield token
        if token.finish is not None:
            return


class Answer:
    """Ids of one answer come in, tokens with text go out."""

    def __init__(self, tokenizer: Bytes, *, end_ids: frozenset[int], stop: Sequence[str] = (), max_tokens: int) -> None:
        """Start empty."""
        self.finish: str | None = None  # why the answer ended; None while it goes on
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._held = HeldText(stop)
        self._left = max_tokens

    def take(self, token_id: int, logprob: float) -> Token:
        """Add the next id; returns its token, with the text that became certain."""
        self._left -= 1
        text = ""
        if token_id in self._end_ids:
            self.finish = "eos"
        else:
            text, stopped = self._held.add(self._tokenizer.token_bytes(token_id))
            self.finish = "stop" if stopped else "length" if self._left == 0 else None
        if self.finish in ("eos", "length"):
            text += self._held.flush()
        return Token(token_id, text, logprob, self.finish)


class HeldText:
    """Bytes come in, certain text goes out."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Start empty; ValueError for an empty stop string, or one string instead of a list of them."""
        if isinstance(stop, str):
            raise UserError(f"generate: expected a list of stop strings, got the string {stop!r}")
        if "" in stop:
            raise UserError("generate: a stop string must not be empty, got ''")
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def add(self, data: bytes) -> tuple[str, bool]:
        """Take the bytes of one token; returns text that is now certain, and whether a stop string was completed."""
        text = self._pending + self._decoder.decode(data)
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            return text[: min(found)], True
        held = max((_overlap(text, s) for s in self._stop), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return all text that is left; an incomplete character becomes U+FFFD."""
        return self._pending + self._decoder.decode(b"", final=True)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


Look = Callable[[str, np.ndarray], None]  # name and array of a stage


def name_first_stage(run: Callable[[Look], object], *, where: object, dtype: str) -> NoReturn:
    """Run the same tokens again, showing every stage, and raise a NonFiniteRun of the first that is not finite."""

    def look(name: str, array: np.ndarray) -> None:
        masked = name.endswith("attn_scores")  # -inf hides a later key there
        n_wrong = array.size - np.count_nonzero(np.isfinite(array) | (np.isneginf(array) & masked))
        if n_wrong:
            raise NonFiniteRun(name, f"{n_wrong} of {array.size} values", where=where, dtype=dtype)

    with np.errstate(all="ignore"):
        run(look)
    raise NonFiniteRun("logits", "in the first run only, not when computed again", where=where, dtype=dtype)

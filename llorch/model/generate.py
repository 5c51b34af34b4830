"""Generation: sample a token, feed it back, and return text as soon as it is final.

Text is held back while a character is incomplete (a token may end inside its UTF-8 bytes) and while it may be the
start of a stop string. Non-finite numbers are detected in the logits; a second pass that checks every stage (named
array of the forward pass) finds the stage where they start.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np

from llorch.ops.sampling import SamplingSettings, draw, probabilities
from llorch.runtime.errors import NonFiniteRun, UserError

Step = Callable[[Sequence[int]], np.ndarray]  # one forward pass: new ids -> logits of the last token, (vocab,)


@runtime_checkable  # the shape checks of the tests use isinstance
class TokenBytes(Protocol):
    """Tokenizer interface that generation needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        ...


class IdsOnly:
    """Replacement of a tokenizer when only ids matter: no text, no EOS."""

    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """Return no bytes."""
        return b""


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    text: str  # text that became final with this token; may be empty, or complete earlier tokens' text
    logprob: float  # natural log of the token's probability, before any filter
    finish: str | None = None  # reason why the answer ends with this token: "stop", "eos" or "length"


class Guide(Protocol):
    """Constraint on the tokens of one answer, such as a grammar."""

    def allowed(self) -> np.ndarray:
        """Return the mask of the tokens allowed next, bool, (vocab,); at least one is True, perhaps an end token."""
        ...

    def take(self, token_id: int) -> None:
        """Advance by an allowed token."""
        ...


@dataclass(frozen=True)
class Job:
    """Generation of one answer: at most `max_tokens` tokens after the prompt `ids`, ended by one of `end_ids`.

    `adapter` is the name of an adapter. `n_top` is the number of most likely tokens to return for each step.
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
        """Number of cache slots that the job fills; the last token is never fed back."""
        return len(self.ids) + self.max_tokens - 1


@dataclass(frozen=True)
class Sampled:
    """Sampled token, and the most likely tokens of its step, with log probabilities before any filter."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # ids and log probabilities, the most likely first


class GenerationBatch(Protocol):
    """Jobs with continuous batching: a job can join and leave while others run. Only one thread may call the methods.

    The caller decides when an answer ends (end token, stop string or `max_tokens`) and calls `leave` for its job.
    """

    def join(self, job: Job) -> int | None:
        """Add a job; returns its number (ticket), or None while the cache is full. UserError if it can never fit."""
        ...

    def leave(self, ticket: int) -> None:
        """Free the cache of a job, finished or cancelled."""
        ...

    def step(self) -> Mapping[int, Sampled | Exception]:
        """Run one pass: a prefill chunk of one prompt, or a decode step of every job after its prefill.

        Returns the sampled tokens by ticket. An exception belongs to one job; the caller must call `leave` for it.
        """
        ...

    def n_cached(self, ticket: int) -> int:
        """Return the number of prompt tokens that came from the prefix cache."""
        ...


def sample_ids(
    step: Step, prompt: Sequence[int], settings: SamplingSettings, *, max_tokens: int
) -> Iterator[tuple[int, float]]:
    """Yield up to `max_tokens` drawn ids and their log probabilities under the unfiltered logits of `step`."""
    rng = np.random.default_rng(settings.seed)
    history = list(prompt)  # the repetition penalty includes the prompt
    new_ids: Sequence[int] = prompt
    for _ in range(max_tokens):
        logits = step(new_ids)
        token_id = draw(probabilities(logits, settings, history, n_prompt=len(prompt)), float(rng.random()))
        yield token_id, log_probability(logits, token_id)
        history.append(token_id)
        new_ids = [token_id]


def log_probability(logits: np.ndarray, token_id: int) -> float:
    """Compute the log softmax of one token, in float64."""
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
    """Incremental detokenization of one answer, with its end conditions."""

    def __init__(
        self, tokenizer: TokenBytes, *, end_ids: frozenset[int], stop: Sequence[str] = (), max_tokens: int
    ) -> None:
        """Start an answer of at most `max_tokens` tokens, which also ends at one of `end_ids` or a `stop` string."""
        self.finish: str | None = None  # reason why the answer ended; None while it is running
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._text_buffer = TextBuffer(stop)
        self._n_remaining = max_tokens

    def take(self, token_id: int, logprob: float) -> Token:
        """Add the next id; returns its token, with the text that became final."""
        self._n_remaining -= 1
        text = ""
        if token_id in self._end_ids:
            self.finish = "eos"
        else:
            text, stopped = self._text_buffer.add(self._tokenizer.token_bytes(token_id))
            self.finish = "stop" if stopped else "length" if self._n_remaining == 0 else None
        if self.finish in ("eos", "length"):
            text += self._text_buffer.flush()
        return Token(token_id, text, logprob, self.finish)


class TextBuffer:
    """Incremental UTF-8 decoder that holds back a possible start of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Start empty; UserError for an empty stop string, or a string instead of a list of strings."""
        if isinstance(stop, str):
            raise UserError(f"generate: expected a list of stop strings, got the string {stop!r}")
        if "" in stop:
            raise UserError("generate: a stop string must not be empty, got ''")
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def add(self, data: bytes) -> tuple[str, bool]:
        """Add the bytes of one token; returns the text that is now final, and whether a stop string was completed."""
        text = self._pending + self._decoder.decode(data)
        stop_starts = [start for start in (text.find(stop) for stop in self._stop) if start >= 0]
        if stop_starts:
            return text[: min(stop_starts)], True
        n_held = max((_overlap(text, stop) for stop in self._stop), default=0)  # characters that a stop may start with
        self._pending = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """Return the text that was held back; an incomplete character becomes U+FFFD."""
        return self._pending + self._decoder.decode(b"", final=True)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)


StageCallback = Callable[[str, np.ndarray], None]  # gets trace key and array of a stage


def raise_first_non_finite(run: Callable[[StageCallback], object], *, where: object, dtype: str) -> NoReturn:
    """Run tokens again (`run` calls its argument with every stage); raise NonFiniteRun for the first bad stage."""

    def check_stage(name: str, array: np.ndarray) -> None:
        is_masked = name.endswith("attn_scores")  # -inf masks later keys
        n_non_finite = array.size - np.count_nonzero(np.isfinite(array) | (np.isneginf(array) & is_masked))
        if n_non_finite:
            raise NonFiniteRun(name, f"{n_non_finite} of {array.size} values", where=where, dtype=dtype)

    with np.errstate(all="ignore"):
        run(check_stage)
    raise NonFiniteRun("logits", "in the first run only, not when computed again", where=where, dtype=dtype)

"""Generation: sample a token, feed it back, and hand out text as soon as it is certain.

Text is held back while a character is incomplete (a token may end inside its UTF-8 bytes) and while it may be the
beginning of a stop string.
"""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from llorch.sampling import SamplingSettings, draw, probabilities

Step = Callable[[Sequence[int]], np.ndarray]  # new ids -> logits of the last one, (vocab,)


@runtime_checkable  # so that the shape checks of the tests can look at it
class Bytes(Protocol):
    """What generation needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    text: str  # what became certain with it; may be empty, or end earlier tokens' text
    logprob: float  # natural log of the model's probability of it, before any filter
    finish: str | None = None  # "stop", "eos" or "length" on the last one


def sample_ids(
    step: Step, prompt: Sequence[int], settings: SamplingSettings, *, max_tokens: int
) -> Iterator[tuple[int, float]]:
    """Draw up to `max_tokens` tokens.

    Args:
        step: Runs new ids through the model.
        prompt: Ids to start from.
        settings: How to sample; the penalty looks at the prompt too.
        max_tokens: At most so many.

    Yields:
        Token id and its log probability under the unfiltered logits.
    """
    rng = np.random.default_rng(settings.seed)
    history = list(prompt)
    new: Sequence[int] = prompt
    for _ in range(max_tokens):
        logits = step(new)
        token_id = draw(probabilities(logits, settings, history), float(rng.random()))
        yield token_id, log_probability(logits, token_id)
        history.append(token_id)
        new = [token_id]


def log_probability(logits: np.ndarray, token_id: int) -> float:
    """Log softmax of one token, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def stream(
    sampled: Iterator[tuple[int, float]],
    tokenizer: Bytes,
    *,
    end_ids: frozenset[int],
    stop: Sequence[str] = (),
    max_tokens: int,
) -> Iterator[Token]:
    """Turn sampled ids into tokens with text.

    Args:
        sampled: Ids and log probabilities.
        tokenizer: Gives the bytes of an id.
        end_ids: Ids that end the text; they have no text themselves.
        stop: Strings that end the text; neither they nor what follows is handed out.
        max_tokens: How many ids will come, to know the last one.

    Yields:
        One token per id.
    """
    held = HeldText(stop)
    for n, (token_id, logprob) in enumerate(sampled, start=1):
        if token_id in end_ids:
            yield Token(token_id, held.flush(), logprob, "eos")
            return
        text, stopped = held.add(tokenizer.token_bytes(token_id))
        if stopped:
            yield Token(token_id, text, logprob, "stop")
            return
        if n == max_tokens:
            yield Token(token_id, text + held.flush(), logprob, "length")
            return
        yield Token(token_id, text, logprob)


class HeldText:
    """Bytes come in, certain text goes out."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Start empty.

        Args:
            stop: Stop strings; none may be empty.

        Raises:
            ValueError: A stop string is empty, or `stop` is one string instead of a list of them.
        """
        if isinstance(stop, str):
            raise ValueError(f"generate: expected a list of stop strings, got the string {stop!r}")
        if "" in stop:
            raise ValueError("generate: a stop string must not be empty, got ''")
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def add(self, data: bytes) -> tuple[str, bool]:
        """Take the bytes of one token.

        Args:
            data: The bytes.

        Returns:
            Text that is now certain, and whether a stop string was completed.
        """
        text = self._pending + self._decoder.decode(data)
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self._pending = ""
            return text[: min(found)], True
        held = max((_overlap(text, s) for s in self._stop), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """All that is left; an incomplete character becomes U+FFFD."""
        text = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

"""State of a conversation: its messages, the model that answers, and the KV cache; prints nothing.

On the NumPy path the cache of one turn serves the next, for their common prefix of tokens. The torch path reads the
whole conversation at every turn.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llorch.model.cache import KVCache
from llorch.model.generate import Answer, Job, Token, sample_ids, stream
from llorch.model.model import Model
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError

if TYPE_CHECKING:
    from llorch.pytorch.model import TorchModel

Messages = list[dict[str, object]]


@dataclass
class AnswerCounts:
    """Counts and times of the last answer."""

    n_prompt: int
    n_cached: int
    n_tokens: int = 0
    first: float = 0.0  # seconds until its first token
    rest: float = 0.0  # seconds from the first to the last token


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self, model: "Model | TorchModel", messages: Messages, settings: SamplingSettings, *, max_tokens: int
    ) -> None:
        """Start with these messages; FormatError if the model's chat template is invalid."""
        self.model, self.messages = model, messages
        self.settings, self.max_tokens = settings, max_tokens
        self.adapter: str | None = None
        self.counted: AnswerCounts | None = None
        self._end_ids = model.chats.end_ids
        self._n_answers = 0  # also of /retry
        self._memory: tuple[KVCache, list[int], str | None] | None = None  # KV cache, ids in it, adapter of these ids

    def say(self, text: str) -> Iterator[Token]:
        """Answer a message of the user."""
        return self.answer([*self.messages, {"role": "user", "content": text}])

    def answer(self, messages: Messages) -> Iterator[Token]:
        """Answer a conversation, which becomes the current one, unless an error is raised before.

        When the answer ends or is stopped, the text so far becomes the assistant's message.
        """
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise UserError("chat: expected a user message to answer, got none; write a message")
        settings = replace(self.settings, seed=self.settings.seed + self._n_answers)  # /retry draws anew
        chats = self.model.chats
        prompt = chats.spoken(messages)
        self.model.require_text_fits(prompt.text)
        ids = chats.encoded(prompt)
        job = self.model.job(ids, max_tokens=self.max_tokens, settings=settings, ignore_eos=False, adapter=self.adapter)
        self.messages, self._n_answers = messages, self._n_answers + 1
        return self._record_answer(replace(job, end_ids=job.end_ids | self._end_ids))

    def _record_answer(self, job: Job) -> Iterator[Token]:
        """Count the tokens of an answer, and add it to the messages."""
        text, finish, start = "", None, time.perf_counter()
        tokens = self._tokens(job)
        counts = self.counted
        assert counts is not None
        try:
            for token in tokens:
                text, finish = text + token.text, token.finish
                elapsed = time.perf_counter() - start
                counts.n_tokens += 1
                counts.first = counts.first or elapsed
                counts.rest = elapsed - counts.first
                yield token
        finally:
            if text or finish:
                self.messages = [*self.messages, {"role": "assistant", "content": text}]

    def _tokens(self, job: Job) -> Iterator[Token]:
        """Start the answer's tokens and set `counted`; only a NumPy model reuses the conversation's KV cache."""
        if not isinstance(self.model, Model):
            self.counted = AnswerCounts(len(job.ids), 0)
            generate_options = {"max_tokens": job.max_tokens, "settings": job.settings, "adapter": job.adapter}
            if self.model.chats.has_template:
                return self.model.generate(messages=self.messages, **generate_options)
            return self.model.generate(job.ids, **generate_options)
        answer = Answer(self.model.tokenizer, end_ids=job.end_ids, max_tokens=job.max_tokens)
        return stream(self._sample(self.model, job), answer)

    def _sample(self, model: Model, job: Job) -> Iterator[tuple[int, float]]:
        """Sample as `Model.generate` does, but reuse the cache of the conversation so far."""
        cache, cached_ids = self._reuse_cache(model, job), list[int]()
        self.counted = AnswerCounts(len(job.ids), cache.length)
        self._memory = (cache, cached_ids, job.adapter)

        def step(new: Sequence[int]) -> np.ndarray:
            cached_ids.extend(new)
            logits = model.forward(cached_ids[cache.length :], cache=cache, last_only=True, adapter=job.adapter)[-1]
            if not np.isfinite(logits).all():
                raise UserError(
                    f"{model.name}: logits are NaN or infinite; /save the chat; llorch run --history names the stage"
                )
            return logits

        return sample_ids(step, job.ids, job.settings, max_tokens=job.max_tokens)

    def _reuse_cache(self, model: Model, job: Job) -> KVCache:
        """Return the old cache, cut to the prefix that the job shares, or a new one; the last token is always run."""
        if self._memory is not None and self._memory[2] == job.adapter:
            cache, ids, _ = self._memory
            pairs = list(zip(ids[: cache.length], job.ids[:-1], strict=False))
            n_common = next((index for index, (first, second) in enumerate(pairs) if first != second), len(pairs))
            if n_common == cache.length or model.config.delta_net is None:  # the state of a delta net cannot go back
                cache.length = n_common
                return cache
        return KVCache.of(model.weights)

    def use_adapter(self, path: Path | None) -> str:
        """Answer through an adapter, or through none; return a description of its base."""
        base_note = "the base alone"
        if path is not None:
            name = f"adapter-{len(self.model.adapters) + 1}"
            base_note = self.model.add_adapter(name, path)
            self.adapter = name
        else:
            self.adapter = None
        return base_note

    def ids(self) -> list[int]:
        """Encode the conversation as the model reads it, without the header of the assistant's next turn."""
        return self.model.chats.encoded(self.model.chats.spoken(self.messages, opened=False))

    def trace(self) -> dict[str, Any]:
        """Compute every stage for the tokens of the conversation."""
        arrays: dict[str, Any] = {}
        self.model.forward(self.ids(), trace=arrays, adapter=self.adapter)
        return arrays

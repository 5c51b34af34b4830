"""A conversation that goes on: its messages, the model that answers, and what was computed of it; prints nothing.

On the NumPy path what the model remembers of one turn serves the next, as far as both begin with the same tokens. The
torch path reads the whole conversation at every turn.
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
class Counted:
    """Of the last answer."""

    n_prompt: int
    n_cached: int
    n_tokens: int = 0
    first: float = 0.0  # seconds until its first token
    rest: float = 0.0  # seconds of the others


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self, model: "Model | TorchModel", messages: Messages, settings: SamplingSettings, *, max_tokens: int
    ) -> None:
        """Go on with these messages; FormatError where the model's chat template is none."""
        self.model, self.messages = model, messages
        self.settings, self.max_tokens = settings, max_tokens
        self.adapter: str | None = None
        self.counted: Counted | None = None
        self._end_ids = model.chats.end_ids
        self._n_answers = 0
        self._memory: tuple[KVCache, list[int], str | None] | None = None  # ids in it, and by which adapter

    def say(self, text: str) -> Iterator[Token]:
        """Answer a message of the user."""
        return self.answer([*self.messages, {"role": "user", "content": text}])

    def answer(self, messages: Messages) -> Iterator[Token]:
        """Answer a conversation, which becomes this one; raises before that where the model cannot read it.

        What was made when the answer ends, or is given up, is the assistant's message.
        """
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise UserError("chat: expected a user message to answer, got none; write a message")
        settings = replace(self.settings, seed=self.settings.seed + self._n_answers)  # another one at /retry
        chats = self.model.chats
        written = chats.spoken(messages)
        self.model.require_fits(written.text)
        ids = chats.encoded(written)
        job = self.model.job(ids, max_tokens=self.max_tokens, settings=settings, ignore_eos=False, adapter=self.adapter)
        self.messages, self._n_answers = messages, self._n_answers + 1
        return self._kept(replace(job, end_ids=job.end_ids | self._end_ids))

    def _kept(self, job: Job) -> Iterator[Token]:
        """Count and remember what an answer says."""
        text, finish, start = "", None, time.perf_counter()
        tokens = self._tokens(job)
        counted = self.counted
        assert counted is not None
        try:
            for token in tokens:
                text, finish = text + token.text, token.finish
                elapsed = time.perf_counter() - start
                counted.n_tokens += 1
                counted.first = counted.first or elapsed
                counted.rest = elapsed - counted.first
                yield token
        finally:
            if text or finish:
                self.messages = [*self.messages, {"role": "assistant", "content": text}]

    def _tokens(self, job: Job) -> Iterator[Token]:
        """Start to generate the answer, and its counts; only a NumPy model reuses the conversation's cache."""
        if not isinstance(self.model, Model):
            self.counted = Counted(len(job.ids), 0)
            how = {"max_tokens": job.max_tokens, "settings": job.settings, "adapter": job.adapter}
            if self.model.chats.has_template:
                return self.model.generate(messages=self.messages, **how)
            return self.model.generate(job.ids, **how)
        answer = Answer(self.model.tokenizer, end_ids=job.end_ids, max_tokens=job.max_tokens)
        return stream(self._sampled(self.model, job), answer)

    def _sampled(self, model: Model, job: Job) -> Iterator[tuple[int, float]]:
        """Sample as `Model.generate` does, but reuse the cache of the conversation so far."""
        cache, fed = self._remembered(model, job), list[int]()
        self.counted = Counted(len(job.ids), cache.length)
        self._memory = (cache, fed, job.adapter)

        def step(new: Sequence[int]) -> np.ndarray:
            fed.extend(new)
            logits = model.forward(fed[cache.length :], cache=cache, last_only=True, adapter=job.adapter)[-1]
            if not np.isfinite(logits).all():
                raise UserError(
                    f"{model.name}: logits are NaN or infinite; /save the chat; llorch run --history names the stage"
                )
            return logits

        return sample_ids(step, job.ids, job.settings, max_tokens=job.max_tokens)

    def _remembered(self, model: Model, job: Job) -> KVCache:
        """Return a cache of the beginning of a job, without its last token, which is still to be run."""
        if self._memory is not None and self._memory[2] == job.adapter:
            cache, ids, _ = self._memory
            both = list(zip(ids[: cache.length], job.ids[:-1], strict=False))
            same = next((at for at, (one, other) in enumerate(both) if one != other), len(both))
            if same == cache.length or model.config.delta_net is None:  # the state of a delta net cannot go back
                cache.length = same
                return cache
        return KVCache.of(model.weights)

    def use_adapter(self, path: Path | None) -> str:
        """Answer through an adapter, or none, from now on; what is known of its base."""
        known = "the base alone"
        if path is not None:
            name = f"adapter-{len(self.model.adapters) + 1}"
            known = self.model.add_adapter(name, path)
            self.adapter = name
        else:
            self.adapter = None
        return known

    def ids(self) -> list[int]:
        """Encode the conversation as the model reads it, without the opening of the next turn."""
        return self.model.chats.encoded(self.model.chats.spoken(self.messages, opened=False))

    def trace(self) -> dict[str, Any]:
        """Compute every stage for the tokens of the conversation."""
        arrays: dict[str, Any] = {}
        self.model.forward(self.ids(), trace=arrays, adapter=self.adapter)
        return arrays

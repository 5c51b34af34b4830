"""`/v1/chat/completions`: a conversation in, the assistant's turn out.

Fields about thinking before the answer become variables of the chat template, or are refused. Qwen's templates read
`enable_thinking`, others read `reasoning_effort`. Clients send `enable_thinking`, `think` (Ollama), `reasoning_effort`
or `reasoning.effort` (OpenAI).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve import replies
from llorch.apps.serve.api_errors import ApiError, wrong
from llorch.apps.serve.engine import MadeToken
from llorch.apps.serve.events import DONE, EventStream, event, tokens_as_events
from llorch.apps.serve.http import read_body, reply, run_beside_loop, service_of, unless_gone
from llorch.apps.serve.requests import ChatRequest, Templated
from llorch.apps.serve.response_stream import Answering
from llorch.apps.serve.service import Service, first_seed
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.files.tokenizer.conversation import Chats
from llorch.model.generate import Job


async def answer(request: Request) -> Response:
    """Answer a request of this route."""
    body, service = await read_body(request, ChatRequest), service_of(request)
    ignored = ignored_fields(body)
    jobs, unwritten = await run_beside_loop(
        service, lambda: _chat_jobs(service, body), n_answers=body.n or 1, renders=True
    )
    ignored += unwritten
    chat = _Chat(service, body, Answering(service.engine, service.model, jobs, body.stops, service.timeout))
    if body.stream:
        return EventStream(chat.events(), chat.answering.close, ignored)
    return await unless_gone(request, chat.whole(ignored))


def _chat_jobs(service: Service, body: ChatRequest) -> tuple[list[Job], list[str]]:
    """Prepare an answer each; also returned are the keys of messages that the model does not read."""
    adapter, messages = service.adapter(body.model), [message.plain() for message in body.messages]
    variables, seed = template_variables(body, service.model.chats), first_seed(body.seed)
    ids = service.chat_ids(messages, variables=variables)
    how = {"max_tokens": body.limit, "adapter": adapter, "n_top": body.top_logprobs or 0, "form": body.form}
    ends = service.chat_end_ids()
    jobs = [
        service.job(ids, body.settings(seed + i), param="messages", end_ids=ends, **how) for i in range(body.n or 1)
    ]
    return jobs, service.unwritten_keys(messages, variables=variables)


@dataclass
class _Chat:
    """One request that runs."""

    service: Service
    body: ChatRequest
    answering: Answering

    def __post_init__(self) -> None:
        self._common = self.service.reply_fields("chatcmpl", self.body.model)
        self._n_prompt = len(self.answering.works[0].job.ids)

    async def whole(self, ignored: Sequence[str]) -> Response:
        """Answer with the whole completion at once."""
        made = await self.answering.whole()
        choices = [self._choice(index, tokens) for index, tokens in enumerate(made)]
        counts = replies.counts(self.answering.works, n_prompt=self._n_prompt)
        completion = replies.ChatCompletion(object="chat.completion", choices=choices, **counts, **self._common)
        return reply(completion, ignored)

    def _choice(self, index: int, tokens: Sequence[MadeToken]) -> replies.ChatChoice:
        text = "".join(one.token.text for one in tokens)
        entries = [entry for one in tokens for entry in self._logprobs(one).content] if self.body.logprobs else None
        finish = replies.finish_reason(tokens[-1].token.finish)
        assert finish is not None
        return replies.ChatChoice(
            index=index,
            message=replies.ChatMessage(role="assistant", content=text, refusal=None),
            logprobs=None if entries is None else replies.ChatLogprobs(content=entries, refusal=None),
            finish_reason=finish,
        )

    def _logprobs(self, one: MadeToken) -> replies.ChatLogprobs:
        return replies.for_chat(self.service.model.tokenizer, one)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed completion as tokens come."""
        for index in range(len(self.answering.works)):
            yield event(self._chunk(index, replies.Delta(role="assistant", content="")))
        async for some in tokens_as_events(self.answering, self._token_events):
            yield some
        if self.body.wants_usage:
            yield event(self._make_chunk([], **replies.counts(self.answering.works, n_prompt=self._n_prompt)))
        yield DONE

    def _token_events(self, index: int, one: MadeToken) -> bytes:
        """Return the events of a token: its text, and the reason of the end after the last one."""
        token, found = one.token, b""
        if token.text or (self.body.logprobs and token.finish != "eos"):
            logprobs = self._logprobs(one) if self.body.logprobs else None
            found = event(self._chunk(index, replies.Delta(content=token.text), logprobs=logprobs))
        if token.finish is not None:
            found += event(self._chunk(index, replies.Delta(), finish=token.finish))
        return found

    def _chunk(
        self, index: int, delta: replies.Delta, logprobs: replies.ChatLogprobs | None = None, finish: str | None = None
    ) -> replies.ChatChunk:
        """Make the chunk of a stream that adds text, or the reason of its end, to one choice."""
        reason = replies.finish_reason(finish)
        choice = replies.ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return self._make_chunk([choice])

    def _make_chunk(self, choices: list[replies.ChunkChoice], **counts: Any) -> replies.ChatChunk:
        """Make a chunk of a stream with the id, model and time that all its chunks have."""
        return replies.ChatChunk(object="chat.completion.chunk", choices=choices, **counts, **self._common)


_SIGNS = ("think", "reasoning")  # in the source of a template whose model thinks


def template_variables(body: Templated, chats: Chats) -> Mapping[str, object]:
    """Return the variables of the chat template for one request.

    ApiError for a wish that the template has no variable for. A wish for no thoughts is met by a template that has
    none.
    """
    found: dict[str, object] = dict(body.chat_template_kwargs or {})
    for field, value in body.thinking.items():
        wanted = _variable(value, chats)
        if wanted is None:
            if value in (False, "none") and not any(map(chats.template_mentions, _SIGNS)):
                continue
            text = f"{field}: the chat template of this model has no variable for {value!r}; leave the field out"
            raise ApiError(400, text, param=field, code="unsupported")
        name, meant = wanted
        if found.setdefault(name, meant) != meant:
            raise wrong(field, f"{name} to be {found[name]!r} in every field that sets this variable", value)
    return found


def _variable(value: bool | str, chats: Chats) -> tuple[str, object] | None:
    """Find the variable of the template that switches thinking, and its value."""
    switches = isinstance(value, bool) or value == "none"
    if switches and chats.template_mentions("enable_thinking"):
        return "enable_thinking", value is True
    if isinstance(value, str) and chats.template_mentions("reasoning_effort"):
        return "reasoning_effort", value
    return None

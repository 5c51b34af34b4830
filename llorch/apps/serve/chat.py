"""`/v1/chat/completions`: the request has a conversation, the answer is the assistant's turn.

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
from llorch.apps.serve.engine import NewToken
from llorch.apps.serve.events import DONE, EventStream, event, stream_tokens
from llorch.apps.serve.http import get_service, read_body, reply, run_in_thread, wait_for_answer
from llorch.apps.serve.requests import ChatRequest, Templated
from llorch.apps.serve.response_stream import AnswerStream
from llorch.apps.serve.service import Service, first_seed
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.files.tokenizer.conversation import Chats
from llorch.model.generate import Job


async def answer(request: Request) -> Response:
    """Answer a POST to /v1/chat/completions."""
    body, service = await read_body(request, ChatRequest), get_service(request)
    ignored = ignored_fields(body)
    jobs, unrendered_keys = await run_in_thread(
        service, lambda: _chat_jobs(service, body), n_answers=body.n or 1, renders_template=True
    )
    ignored += unrendered_keys
    chat = _ChatAnswer(service, body, AnswerStream(service.engine, service.model, jobs, body.stops, service.timeout))
    if body.stream:
        return EventStream(chat.events(), chat.stream.close, ignored)
    return await wait_for_answer(request, chat.answer_at_once(ignored))


def _chat_jobs(service: Service, body: ChatRequest) -> tuple[list[Job], list[str]]:
    """Make a job for each answer; return also the message keys that the chat template does not read."""
    adapter, messages = service.adapter(body.model), [message.to_template() for message in body.messages]
    variables, seed = template_variables(body, service.model.chats), first_seed(body.seed)
    ids = service.chat_ids(messages, variables=variables)
    common = {"max_tokens": body.limit, "adapter": adapter, "n_top": body.top_logprobs or 0, "form": body.form}
    ends = service.chat_end_ids()
    jobs = [
        service.job(ids, body.settings(seed + i), param="messages", end_ids=ends, **common) for i in range(body.n or 1)
    ]
    return jobs, service.unrendered_keys(messages, variables=variables)


@dataclass
class _ChatAnswer:
    """Answer to one chat request, complete or as a stream."""

    service: Service
    body: ChatRequest
    stream: AnswerStream

    def __post_init__(self) -> None:
        self._common = self.service.reply_fields("chatcmpl", self.body.model)
        self._n_prompt = len(self.stream.works[0].job.ids)

    async def answer_at_once(self, ignored: Sequence[str]) -> Response:
        """Answer with the complete chat completion."""
        answers = await self.stream.collect()
        choices = [self._choice(index, tokens) for index, tokens in enumerate(answers)]
        counts = replies.counts(self.stream.works, n_prompt=self._n_prompt)
        completion = replies.ChatCompletion(object="chat.completion", choices=choices, **counts, **self._common)
        return reply(completion, ignored)

    def _choice(self, index: int, tokens: Sequence[NewToken]) -> replies.ChatChoice:
        text = "".join(token.token.text for token in tokens)
        entries = [entry for token in tokens for entry in self._logprobs(token).content] if self.body.logprobs else None
        finish = replies.finish_reason(tokens[-1].token.finish)
        assert finish is not None
        return replies.ChatChoice(
            index=index,
            message=replies.ChatMessage(role="assistant", content=text, refusal=None),
            logprobs=None if entries is None else replies.ChatLogprobs(content=entries, refusal=None),
            finish_reason=finish,
        )

    def _logprobs(self, token: NewToken) -> replies.ChatLogprobs:
        return replies.chat_logprobs(self.service.model.tokenizer, token)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed chat completion."""
        for index in range(len(self.stream.works)):
            yield event(self._chunk(index, replies.Delta(role="assistant", content="")))
        async for encoded in stream_tokens(self.stream, self._token_events):
            yield encoded
        if self.body.wants_usage:
            yield event(self._make_chunk([], **replies.counts(self.stream.works, n_prompt=self._n_prompt)))
        yield DONE

    def _token_events(self, index: int, new_token: NewToken) -> bytes:
        """Encode the events of a token: its text, and the finish reason after the last token."""
        token, events = new_token.token, b""
        if token.text or (self.body.logprobs and token.finish != "eos"):
            logprobs = self._logprobs(new_token) if self.body.logprobs else None
            events = event(self._chunk(index, replies.Delta(content=token.text), logprobs=logprobs))
        if token.finish is not None:
            events += event(self._chunk(index, replies.Delta(), finish=token.finish))
        return events

    def _chunk(
        self, index: int, delta: replies.Delta, logprobs: replies.ChatLogprobs | None = None, finish: str | None = None
    ) -> replies.ChatChunk:
        """Make the chunk that adds text, or the finish reason, to one choice."""
        reason = replies.finish_reason(finish)
        choice = replies.ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return self._make_chunk([choice])

    def _make_chunk(self, choices: list[replies.ChunkChoice], **counts: Any) -> replies.ChatChunk:
        """Make a chunk with the id, model and time that all chunks of a stream share."""
        return replies.ChatChunk(object="chat.completion.chunk", choices=choices, **counts, **self._common)


_THINKING_WORDS = ("think", "reasoning")  # a template with neither word belongs to a model without thinking


def template_variables(body: Templated, chats: Chats) -> Mapping[str, object]:
    """Return the chat template's variables for one request.

    Raises:
        ApiError: The template has no variable for a field about thinking, or two fields set one variable differently.
            A field that switches thinking off is ignored if the template has no thinking.
    """
    variables: dict[str, object] = dict(body.chat_template_kwargs or {})
    for field, value in body.thinking.items():
        variable = _find_variable(value, chats)
        if variable is None:
            if value in (False, "none") and not any(map(chats.template_mentions, _THINKING_WORDS)):
                continue
            text = f"{field}: the chat template of this model has no variable for {value!r}; leave the field out"
            raise ApiError(400, text, param=field, code="unsupported")
        name, setting = variable
        if variables.setdefault(name, setting) != setting:
            raise wrong(field, f"{name} to be {variables[name]!r} in every field that sets this variable", value)
    return variables


def _find_variable(value: bool | str, chats: Chats) -> tuple[str, object] | None:
    """Find the template variable for a field about thinking, and its value; None if there is none."""
    is_switch = isinstance(value, bool) or value == "none"
    if is_switch and chats.template_mentions("enable_thinking"):
        return "enable_thinking", value is True
    if isinstance(value, str) and chats.template_mentions("reasoning_effort"):
        return "reasoning_effort", value
    return None

"""`/v1/responses`: OpenAI's newer chat API, for text only; nothing is stored between requests."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve import replies
from llorch.apps.serve.api_errors import wrong
from llorch.apps.serve.chat import template_variables
from llorch.apps.serve.engine import NewToken
from llorch.apps.serve.events import EventStream, event, stream_tokens
from llorch.apps.serve.http import get_service, read_body, reply, run_in_thread, wait_for_answer
from llorch.apps.serve.requests import (
    AnswerForm,
    Count,
    Effort,
    Format,
    RefusalPart,
    Sampling,
    Strict,
    Templated,
    Text,
    Turn,
)
from llorch.apps.serve.response_stream import AnswerStream
from llorch.apps.serve.service import Service, first_seed
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.model.generate import Job
from llorch.runtime.errors import UserError

_ITEM_FIELDS = ("id", "status")  # of an earlier answer in the input; no chat template gets them


class InputText(Strict):
    """Text part of an input message."""

    type: Literal["input_text", "text"]
    text: Text


class OutputTextPart(Strict):
    """Text part of an earlier answer in the input, with the fields that llorch had added."""

    type: Literal["output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Turn):
    """Message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText | OutputTextPart | RefusalPart], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_refusals(self) -> "InputMessage":
        """Reject refusal parts outside of assistant messages."""
        has_refusal = isinstance(self.content, list) and any(isinstance(part, RefusalPart) for part in self.content)
        if has_refusal and self.role != "assistant":
            raise UserError(f"expected parts of type input_text from {self.role}")
        return self

    def to_template(self) -> dict[str, object]:
        """Return the message in the form that chat templates take."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        extra_fields = {name: value for name, value in (self.model_extra or {}).items() if name not in _ITEM_FIELDS}
        return {**extra_fields, "role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(Format):
    """Format of an answer, and the name of its schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    strict: bool | None = Field(None, description="Every answer fulfils the schema, also with false.")


class TextSettings(Strict):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the model has no setting for the length of an answer


class Reasoning(Strict):
    """Settings of thinking before an answer."""

    effort: Effort | None = None


class ResponsesRequest(Sampling, Templated):
    """Request body of /v1/responses; text only, and nothing is stored."""

    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ResponsesRequest":
        """Require log probabilities in `include` for `top_logprobs`."""
        if self.top_logprobs and not self.include:
            raise wrong("top_logprobs", "message.output_text.logprobs in include")
        return self

    @property
    def thinking(self) -> dict[str, bool | str]:
        """Fields about thinking, with their values."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return super().thinking | ({} if effort is None else {"reasoning.effort": effort})

    @property
    def messages(self) -> list[dict[str, object]]:
        """Messages of the conversation, instructions first."""
        first: list[dict[str, object]] = []
        if self.instructions is not None:
            first.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(message.to_template() for message in self.input)]

    @property
    def form(self) -> AnswerForm | None:
        """Format that the answer must have; None for free text."""
        text_format = None if self.text is None else self.text.format
        return None if text_format is None else text_format.answer_form("text.format")


async def answer(request: Request) -> Response:
    """Answer a POST to /v1/responses, an API without stop strings."""
    body, service = await read_body(request, ResponsesRequest), get_service(request)
    ignored = ignored_fields(body)
    job, unrendered_keys = await run_in_thread(service, lambda: _response_job(service, body), renders_template=True)
    ignored += unrendered_keys
    responder = _ResponseAnswer(service, body, AnswerStream(service.engine, service.model, [job], (), service.timeout))
    if body.stream:
        return EventStream(responder.events(), responder.stream.close, ignored)
    return await wait_for_answer(request, responder.answer_at_once(ignored))


def _response_job(service: Service, body: ResponsesRequest) -> tuple[Job, list[str]]:
    """Make the job of the answer; return also the message keys that the chat template does not read."""
    adapter, variables = service.adapter(body.model), template_variables(body, service.model.chats)
    ids = service.chat_ids(body.messages, param="input", variables=variables)
    settings, end_ids = body.settings(first_seed(body.seed)), service.chat_end_ids(param="input")
    common = {"max_tokens": body.max_output_tokens, "n_top": body.top_logprobs or 0, "form": body.form}
    job = service.job(ids, settings, param="input", adapter=adapter, end_ids=end_ids, **common)
    first = 0 if body.instructions is None else 1  # index of the client's first message
    return job, service.unrendered_keys(body.messages, param="input", first=first, variables=variables)


@dataclass
class _ResponseAnswer:
    """Answer to one request, complete or as a stream."""

    service: Service
    body: ResponsesRequest
    stream: AnswerStream
    _text: str = ""
    _logprobs: list[replies.TokenLogprob] = field(default_factory=list)
    _finish: str | None = None
    _n_events: int = 0
    _id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    _item_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _created: int = field(default_factory=lambda: int(time.time()))

    async def answer_at_once(self, ignored: Sequence[str]) -> Response:
        """Answer with the complete response."""
        for token in (await self.stream.collect())[0]:
            self._add_token(token)
        return reply(self._response(), ignored)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        location = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", part=_output_text("", []), **location)
        async for encoded in stream_tokens(self.stream, self._token_event):
            yield encoded
        yield self._event("response.output_text.done", text=self._text, logprobs=self._logprobs, **location)
        yield self._event("response.content_part.done", part=_output_text(self._text, self._logprobs), **location)
        yield self._event("response.output_item.done", output_index=0, item=self._output()[0])
        yield self._event(f"response.{self._status}", response=self._response())

    def _add_token(self, new_token: NewToken) -> list[replies.TokenLogprob]:
        """Add a token to the answer; return its log probabilities, empty unless the request includes them."""
        self._text += new_token.token.text
        self._finish = new_token.token.finish
        logprobs = replies.chat_logprobs(self.service.model.tokenizer, new_token).content if self.body.include else []
        self._logprobs += logprobs
        return logprobs

    def _token_event(self, index: int, new_token: NewToken) -> bytes:
        """Add a token, and encode its event; empty for a token without text and log probabilities."""
        logprobs = self._add_token(new_token)
        if not new_token.token.text and not logprobs:
            return b""
        location = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", delta=new_token.token.text, logprobs=logprobs, **location)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n_events += 1
        return event(replies.ResponseEvent(type=kind, sequence_number=self._n_events - 1, **fields), kind)

    @property
    def _status(self) -> replies.Status:
        return "in_progress" if self._finish is None else "incomplete" if self._finish == "length" else "completed"

    def _message(self, status: replies.Status, content: list[replies.OutputText]) -> replies.OutputMessage:
        """Make the assistant's message, an output item of a response."""
        return replies.OutputMessage(type="message", id=self._item_id, status=status, role="assistant", content=content)

    def _output(self) -> list[replies.OutputMessage]:
        return [self._message(self._status, [_output_text(self._text, self._logprobs)])]

    def _response(self) -> replies.Response:
        is_complete, work = self._finish is not None, self.stream.works[0]
        return replies.Response(
            id=self._id,
            object="response",
            created_at=self._created,
            status=self._status,
            error=None,
            incomplete_details=replies.Why(reason="max_output_tokens") if self._finish == "length" else None,
            instructions=self.body.instructions,
            max_output_tokens=self.body.max_output_tokens,
            model=self.body.model,
            output=self._output() if is_complete else [],
            parallel_tool_calls=False,
            temperature=work.job.settings.temperature,
            tool_choice="none",
            tools=[],
            top_p=work.job.settings.top_p,
            metadata={},
            usage=self._usage() if is_complete else None,
        )

    def _usage(self) -> replies.ResponseUsage:
        work = self.stream.works[0]
        n_prompt = len(work.job.ids)
        return replies.ResponseUsage(
            input_tokens=n_prompt,
            input_tokens_details=replies.InputDetails(cached_tokens=work.n_cached),
            output_tokens=work.n_generated,
            output_tokens_details=replies.OutputDetails(reasoning_tokens=0),
            total_tokens=n_prompt + work.n_generated,
        )


def _output_text(text: str, logprobs: list[replies.TokenLogprob]) -> replies.OutputText:
    return replies.OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)

"""`/v1/responses`: the newer form of a chat, for text alone; nothing is kept between requests."""

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
from llorch.apps.serve.engine import MadeToken
from llorch.apps.serve.events import EventStream, event, tokens_as_events
from llorch.apps.serve.http import read_body, reply, run_beside_loop, service_of, unless_gone
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
from llorch.apps.serve.response_stream import Answering
from llorch.apps.serve.service import Service, first_seed
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.model.generate import Job
from llorch.runtime.errors import UserError

_OF_ITEMS = ("id", "status")  # of an answer that comes back as input


class InputText(Strict):
    """A piece of an input."""

    type: Literal["input_text", "text"]
    text: Text


class OutputTextPart(Strict):
    """A piece of an answer that comes back as input, with what llorch told beside it."""

    type: Literal["output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Turn):
    """A turn of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText | OutputTextPart | RefusalPart], Field(min_length=1)]

    @model_validator(mode="after")
    def _together(self) -> "InputMessage":
        """Refuse refusals that are not said by the assistant."""
        refused = isinstance(self.content, list) and any(isinstance(one, RefusalPart) for one in self.content)
        if refused and self.role != "assistant":
            raise UserError(f"expected parts of type input_text from {self.role}")
        return self

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates take it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        more = {name: value for name, value in (self.model_extra or {}).items() if name not in _OF_ITEMS}
        return {**more, "role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(Format):
    """The form of an answer, and the name of its schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    strict: bool | None = Field(None, description="Every answer fulfils the schema, also with false.")


class TextSettings(Strict):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # nothing makes an answer shorter or longer


class Reasoning(Strict):
    """The settings of thinking before an answer."""

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
    def _together(self) -> "ResponsesRequest":
        """Require log probabilities in `include` for `top_logprobs`."""
        if self.top_logprobs and not self.include:
            raise wrong("top_logprobs", "message.output_text.logprobs in include")
        return self

    @property
    def thinking(self) -> dict[str, bool | str]:
        """List the fields that switch thinking, with their values."""
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
        return [*first, *(message.plain() for message in self.input)]

    @property
    def form(self) -> AnswerForm | None:
        """The form that the answer has to have."""
        wanted = None if self.text is None else self.text.format
        return None if wanted is None else wanted.answer_form("text.format")


async def answer(request: Request) -> Response:
    """Answer a request of this route."""
    body, service = await read_body(request, ResponsesRequest), service_of(request)
    ignored = ignored_fields(body)
    job, unwritten = await run_beside_loop(service, lambda: _job(service, body), renders=True)
    ignored += unwritten
    responding = _Responding(service, body, Answering(service.engine, service.model, [job], (), service.timeout))
    if body.stream:
        return EventStream(responding.events(), responding.answering.close, ignored)
    return await unless_gone(request, responding.whole(ignored))


def _job(service: Service, body: ResponsesRequest) -> tuple[Job, list[str]]:
    """Prepare the answer; also returned are the keys of messages that the model does not read."""
    adapter, variables = service.adapter(body.model), template_variables(body, service.model.chats)
    ids = service.chat_ids(body.messages, param="input", variables=variables)
    settings, ends = body.settings(first_seed(body.seed)), service.chat_end_ids(param="input")
    how = {"max_tokens": body.max_output_tokens, "n_top": body.top_logprobs or 0, "form": body.form}
    job = service.job(ids, settings, param="input", adapter=adapter, end_ids=ends, **how)
    first = 0 if body.instructions is None else 1
    return job, service.unwritten_keys(body.messages, param="input", first=first, variables=variables)


@dataclass
class _Responding:
    """One request that runs."""

    service: Service
    body: ResponsesRequest
    answering: Answering
    _text: str = ""
    _logprobs: list[replies.TokenLogprob] = field(default_factory=list)
    _finish: str | None = None
    _n_events: int = 0
    _id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    _item_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, ignored: Sequence[str]) -> Response:
        """Answer with the whole response at once."""
        for one in (await self.answering.whole())[0]:
            self._take(one)
        return reply(self._response(), ignored)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response as tokens come."""
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", part=_output_text("", []), **place)
        async for some in tokens_as_events(self.answering, self._delta):
            yield some
        yield self._event("response.output_text.done", text=self._text, logprobs=self._logprobs, **place)
        yield self._event("response.content_part.done", part=_output_text(self._text, self._logprobs), **place)
        yield self._event("response.output_item.done", output_index=0, item=self._output()[0])
        yield self._event(f"response.{self._status}", response=self._response())

    def _take(self, one: MadeToken) -> list[replies.TokenLogprob]:
        """Add a token; its log probabilities, where they are wanted."""
        self._text += one.token.text
        self._finish = one.token.finish
        said = replies.for_chat(self.service.model.tokenizer, one).content if self.body.include else []
        self._logprobs += said
        return said

    def _delta(self, index: int, one: MadeToken) -> bytes:
        """Add a token, and return its event, empty if it shows nothing."""
        logprobs = self._take(one)
        if not one.token.text and not logprobs:
            return b""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", delta=one.token.text, logprobs=logprobs, **place)

    def _event(self, kind: str, **what: Any) -> bytes:
        self._n_events += 1
        return event(replies.ResponseEvent(type=kind, sequence_number=self._n_events - 1, **what), kind)

    @property
    def _status(self) -> replies.Status:
        return "in_progress" if self._finish is None else "incomplete" if self._finish == "length" else "completed"

    def _message(self, status: replies.Status, content: list[replies.OutputText]) -> replies.OutputMessage:
        """Make the message of the assistant that a response holds."""
        return replies.OutputMessage(type="message", id=self._item_id, status=status, role="assistant", content=content)

    def _output(self) -> list[replies.OutputMessage]:
        return [self._message(self._status, [_output_text(self._text, self._logprobs)])]

    def _response(self) -> replies.Response:
        ended, work = self._finish is not None, self.answering.works[0]
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
            output=self._output() if ended else [],
            parallel_tool_calls=False,
            temperature=work.job.settings.temperature,
            tool_choice="none",
            tools=[],
            top_p=work.job.settings.top_p,
            metadata={},
            usage=self._usage() if ended else None,
        )

    def _usage(self) -> replies.ResponseUsage:
        work = self.answering.works[0]
        n_prompt = len(work.job.ids)
        return replies.ResponseUsage(
            input_tokens=n_prompt,
            input_tokens_details=replies.InputDetails(cached_tokens=work.n_cached),
            output_tokens=work.n_made,
            output_tokens_details=replies.OutputDetails(reasoning_tokens=0),
            total_tokens=n_prompt + work.n_made,
        )


def _output_text(text: str, logprobs: list[replies.TokenLogprob]) -> replies.OutputText:
    return replies.OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)

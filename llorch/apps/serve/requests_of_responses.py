"""What `/v1/responses` may be asked for: text in, text out, and nothing that is kept between requests."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llorch.apps.serve.api_errors import wrong
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
    """Of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # nothing makes an answer shorter or longer


class Reasoning(Strict):
    """The settings of thinking before an answer."""

    effort: Effort | None = None


class ResponsesRequest(Sampling, Templated):
    """Of /v1/responses: text alone, and nothing is kept."""

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

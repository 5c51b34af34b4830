"""Bodies of requests as pydantic models, which validate them and describe them in OpenAPI.

Types are strict: a string is no number, and no number is NaN. Undeclared fields, also of nested objects, are ignored
and listed in a header of the answer. A field that would change the answer is refused: see `unsupported_fields`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from llorch.apps.serve.api_errors import wrong
from llorch.files.tokenizer.chat import RESERVED
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError

MAX_ANSWERS = 32  # per request


def _check_temperature(temperature: float) -> float:
    """Reject temperatures between 0 and 1e-6, which overflow."""
    if 0 < temperature < 1e-6:
        raise UserError("0 or at least 1e-6")
    return temperature


def _normalise_top_k(top_k: int) -> int:
    """Convert -1 (off in vLLM and llama.cpp) to 0, the sampler's value for off."""
    return max(top_k, 0)


def _normalise_seed(seed: int) -> int | None:
    """Convert -1 (any seed in llama.cpp and Ollama) to None."""
    return None if seed == -1 else seed


Text = str  # `service` limits its length
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
NoLimit = Literal[-1]  # in llama.cpp, Ollama and LM Studio: no limit but the context
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
UNLIMITED_TOKENS = 1 << 31  # more than any context
_PARSE_SPECIAL = "False: the text of a control token in a prompt stays text."
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict", "max_new_tokens")  # of one answer
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]
_PROMPTS = Field(min_length=1, max_length=16)  # number of prompts per request


class Strict(BaseModel):
    """Model with strict types that stores undeclared fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Body(Strict):
    """Body of a request."""

    model: Annotated[str, Field(description="Of /v1/models.")]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class TextPart(Strict):
    """Text part of a message."""

    type: Literal["text"]
    text: Text


class RefusalPart(Strict):
    """Refusal part of an earlier answer, as the client sends it back."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


class CalledFunction(Strict):
    """Function that a model called; `tokenizer.messages` checks its arguments."""

    name: str
    arguments: Any = None


class ToolCall(Strict):
    """Tool call in an assistant message: a function, or its name and arguments directly."""

    id: Any = None
    type: Any = None
    function: CalledFunction | None = None
    name: Any = None
    arguments: Any = None


class Turn(Strict):
    """Message whose undeclared fields go to the chat template: see `Service.unrendered_keys`."""


class Message(Turn):
    """Message of a conversation; control tokens in its text are not parsed."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    refusal: Text | None = Field(None, description="Text of an assistant message without content.")
    content: Text | Annotated[list[TextPart | RefusalPart], Field(min_length=1)] | None = Field(
        None, validate_default=True
    )

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: object, info: ValidationInfo) -> object:
        """Require content, except in an assistant message with a tool call or a refusal."""
        replacements = [info.data.get(name) for name in ("tool_calls", "function_call", "refusal")]
        is_assistant = info.data.get("role", "assistant") == "assistant"  # a missing role is reported first
        if content is None and not (is_assistant and any(replacements)) and "role" in info.data:
            raise PydanticCustomError("missing", "expected a text or text parts, got none")
        if isinstance(content, list) and not is_assistant and any(isinstance(part, RefusalPart) for part in content):
            raise PydanticCustomError("type", "expected parts of type text from {role}", {"role": info.data["role"]})
        return content

    def to_template(self) -> dict[str, object]:
        """Return the message in the form that chat templates take."""
        content = self.refusal if self.content is None else self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        role = "system" if self.role == "developer" else self.role
        fields: dict[str, object] = {} if self.content is None or self.refusal is None else {"refusal": self.refusal}
        if self.tool_calls is not None:
            fields["tool_calls"] = [call.model_dump(exclude_unset=True) for call in self.tool_calls]
        if self.function_call is not None:
            fields["function_call"] = self.function_call.model_dump(include={"name", "arguments"}, exclude_unset=True)
        return {**(self.model_extra or {}), **fields, "role": role, "content": text}


@dataclass(frozen=True)
class AnswerForm:
    """Format that an answer must have, and the request field that sets it."""

    schema: Mapping[str, object] | None  # None: any JSON object
    param: str


class Format(Strict):
    """Format of an answer; json_object may have a schema too, as in llama.cpp's server."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """JSON schema that the answer must match."""
        return self.schema_

    @model_validator(mode="after")
    def _check_schema(self) -> "Format":
        """Require a schema for the type json_schema, and none for the type text."""
        if self.type == "json_schema" and self.answer_schema is None:
            raise UserError("expected a schema, because type is json_schema")
        if self.type == "text" and self.answer_schema is not None:
            raise UserError("expected the type json_schema or json_object, because there is a schema")
        return self

    def answer_form(self, param: str) -> AnswerForm | None:
        """Return the format that the field `param` requires; None for free text."""
        if self.type == "text":
            return None
        # an empty schema allows every value, but json_object only an object, as in llama.cpp
        return AnswerForm(self.answer_schema if self.type == "json_schema" else self.answer_schema or None, param)


class JsonSchema(Strict):
    """JSON schema with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = Field(None, description="Every answer fulfils the schema, also with false.")


class ResponseFormat(Format):
    """Format of an answer; the schema is in json_schema, or next to it as llama.cpp's clients send it."""

    json_schema: JsonSchema | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """JSON schema that the answer must match."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def _check_single_schema(self) -> "ResponseFormat":
        """Reject json_schema with another type, and two different schemas."""
        if self.json_schema is not None and self.type != "json_schema":
            raise UserError("expected the type json_schema, because there is json_schema")
        if self.schema_ not in (None, self.answer_schema):
            raise UserError("expected one schema, in json_schema or beside it")
        return self


class Sampling(Body):
    """Sampling settings of a request."""

    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_check_temperature)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), AfterValidator(_normalise_top_k)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63), AfterValidator(_normalise_seed)] | None = None

    def settings(self, seed: int) -> SamplingSettings:
        """Make the sampling settings of an answer with a seed; the default temperature is 1, as in OpenAI's API."""
        keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: value for name in keys if (value := getattr(self, name)) is not None}
        return SamplingSettings(**{"temperature": 1.0, **values, "seed": seed})


class Answers(Sampling):
    """Fields that chats and completions share."""

    n: Annotated[int, Field(ge=1, le=8)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: NoLimit | Count | None = None
    n_predict: NoLimit | Count | None = Field(None, description="Name of max_tokens in llama.cpp.")
    num_predict: NoLimit | Count | None = Field(None, description="Name of max_tokens in Ollama.")
    max_new_tokens: NoLimit | Count | None = Field(None, description="Name of max_tokens in TGI.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> "Answers":
        """Require one value if several names of the token limit are set."""
        limits = [(name, value) for name in _LIMITS if (value := getattr(self, name, None)) is not None]
        for name, value in limits[1:]:
            if value != limits[0][1]:
                raise wrong(name, f"the number of {limits[0][0]}, {limits[0][1]}", value)
        return self

    @property
    def limit(self) -> int | None:
        """Maximum number of generated tokens; None if the request sets none."""
        limits = (value for name in _LIMITS if (value := getattr(self, name, None)) is not None)
        first_limit = next(limits, None)
        return UNLIMITED_TOKENS if first_limit == -1 else first_limit

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True if the stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Templated(Body):
    """Fields of requests whose prompt a chat template makes."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(max_length=64, description="Variables of the chat template.")
    ] = None
    enable_thinking: Annotated[bool | None, Field(description="A variable of the chat template.")] = None
    think: bool | Effort | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _check_reserved(self) -> "Templated":
        for name in RESERVED:
            if name in (self.chat_template_kwargs or {}):
                raise wrong(f"chat_template_kwargs.{name}", "a variable other than those that llorch sets", name)
        return self

    @property
    def thinking(self) -> dict[str, bool | str]:
        """Fields about thinking, with their values."""
        fields = {name: getattr(self, name) for name in ("enable_thinking", "think", "reasoning_effort")}
        return {name: value for name, value in fields.items() if value is not None}


class ChatRequest(Answers, Templated):
    """Request body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: NoLimit | Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        """Require `logprobs` for `top_logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "logprobs to be true in the same request")
        return self

    @property
    def form(self) -> AnswerForm | None:
        """Format that the answer must have; None for free text."""
        return None if self.response_format is None else self.response_format.answer_form("response_format")


class CompletionRequest(Answers):
    """Request body of /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text], _PROMPTS] | Annotated[list[Ids], _PROMPTS]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parse_special: bool | None = Field(None, description=_PARSE_SPECIAL)
    add_special_tokens: bool | None = Field(None, description="False: the tokenizer adds no token to a text.")

    @model_validator(mode="after")
    def _check_n_answers(self) -> "CompletionRequest":
        """Reject a request with more than MAX_ANSWERS answers for all prompts."""
        if (n_answers := len(self.prompts) * (self.n or 1)) > MAX_ANSWERS:
            raise wrong("n", f"at most {MAX_ANSWERS} answers for all prompts together", n_answers)
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request, each as text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item] (one text, or the token ids of one text)
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeRequest(Strict):
    """Request body of /tokenize."""

    content: Text
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Request body of /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


class TraceRequest(Body):
    """Request body of /v1/trace: one of prompt, messages and tokens."""

    prompt: Text | None = None
    parse_special: bool | None = Field(None, description=_PARSE_SPECIAL)
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tokens: Ids | None = None
    arrays: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> "TraceRequest":
        """Require exactly one kind of input."""
        n_inputs = sum(source is not None for source in (self.prompt, self.messages, self.tokens))
        if n_inputs != 1:
            raise wrong("prompt", "exactly one of prompt, messages and tokens", n_inputs)
        if self.parse_special and self.prompt is None:
            raise wrong("parse_special", "prompt in the same request")
        return self

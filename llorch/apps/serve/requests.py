"""What may be asked for: the bodies of requests, as pydantic models, which check them and describe them to others.

Values are taken as they are: no number comes from a text, none is NaN. Further fields, also those of nested objects,
are ignored and named in a header of the answer, unless they would change its meaning: see `unsupported_fields`.
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

MAX_ANSWERS = 32  # of one request


def _finite_draws(temperature: float) -> float:
    """Refuse temperatures between 0 and 1e-6."""
    if 0 < temperature < 1e-6:
        raise UserError("0 or at least 1e-6")
    return temperature


def _all_tokens_where_off(top_k: int) -> int:
    """Take -1 as vLLM and llama.cpp do; the sampler has 0 for it."""
    return max(top_k, 0)


def _any_where_off(seed: int) -> int | None:
    """Take -1 as llama.cpp and Ollama do: any seed."""
    return None if seed == -1 else seed


Text = str  # how long it may be is said with the context: see `service`
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
NoLimit = Literal[-1]  # as llama.cpp, Ollama and LM Studio say that only the context ends an answer
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MOST_TOKENS = 1 << 31  # which no context has
_PARSE_SPECIAL = "False: the text of a control token in a prompt stays text."
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict", "max_new_tokens")
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]
_PROMPTS = Field(min_length=1, max_length=16)  # how many of one request


class Strict(BaseModel):
    """Values as they are; remembers fields that it does not know."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Body(Strict):
    """The body of a request."""

    model: Annotated[str, Field(description="Of /v1/models.")]


class StreamOptions(Strict):
    """Of `stream`."""

    include_usage: bool | None = None


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class RefusalPart(Strict):
    """A piece of an answer that refused, as its client sends it back."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


class CalledFunction(Strict):
    """A function that a model called; `tokenizer.messages` checks its arguments."""

    name: str
    arguments: Any = None


class ToolCall(Strict):
    """A call in a message of the assistant: a function, or its name and arguments directly."""

    id: Any = None
    type: Any = None
    function: CalledFunction | None = None
    name: Any = None
    arguments: Any = None


class Turn(Strict):
    """A message, whose further fields go to the chat template: see `Service.unwritten_keys`."""


class Message(Turn):
    """A turn of a conversation; what is in it stays text, be it that of a control token."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    refusal: Text | None = Field(None, description="Text of an assistant message without content.")
    content: Text | Annotated[list[TextPart | RefusalPart], Field(min_length=1)] | None = Field(
        None, validate_default=True
    )

    @field_validator("content")
    @classmethod
    def _said(cls, content: object, info: ValidationInfo) -> object:
        """Let only an assistant be without words, which called a tool or refused."""
        instead = [info.data.get(name) for name in ("tool_calls", "function_call", "refusal")]
        is_assistant = info.data.get("role", "assistant") == "assistant"  # without a role that is what is wrong
        if content is None and not (is_assistant and any(instead)) and "role" in info.data:
            raise PydanticCustomError("missing", "expected a text or text parts, got none")
        if isinstance(content, list) and not is_assistant and any(isinstance(one, RefusalPart) for one in content):
            raise PydanticCustomError("type", "expected parts of type text from {role}", {"role": info.data["role"]})
        return content

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates take it."""
        content = self.refusal if self.content is None else self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        role = "system" if self.role == "developer" else self.role
        given: dict[str, object] = {} if self.content is None or self.refusal is None else {"refusal": self.refusal}
        if self.tool_calls is not None:
            given["tool_calls"] = [call.model_dump(exclude_unset=True) for call in self.tool_calls]
        if self.function_call is not None:
            given["function_call"] = self.function_call.model_dump(include={"name", "arguments"}, exclude_unset=True)
        return {**(self.model_extra or {}), **given, "role": role, "content": text}


@dataclass(frozen=True)
class AnswerForm:
    """The form that an answer has to have, and the field that says so."""

    schema: Mapping[str, object] | None  # None: any JSON object
    param: str


class Format(Strict):
    """The form of an answer; json_object takes a schema too, as in llama.cpp's server."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Schema that the answer has to fulfil."""
        return self.schema_

    @model_validator(mode="after")
    def _together(self) -> "Format":
        """Require a schema for the type json_schema, and none for the type text."""
        if self.type == "json_schema" and self.answer_schema is None:
            raise UserError("expected a schema, because type is json_schema")
        if self.type == "text" and self.answer_schema is not None:
            raise UserError("expected the type json_schema or json_object, because there is a schema")
        return self

    def answer_form(self, param: str) -> AnswerForm | None:
        """Return the form that this field `param` asks for; None for free text."""
        if self.type == "text":
            return None
        # an empty schema allows every value, but json_object an object alone, as in llama.cpp
        return AnswerForm(self.answer_schema if self.type == "json_schema" else self.answer_schema or None, param)


class JsonSchema(Strict):
    """A schema with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = Field(None, description="Every answer fulfils the schema, also with false.")


class ResponseFormat(Format):
    """The form of an answer; the schema stands in json_schema, or beside it as llama.cpp's clients have it."""

    json_schema: JsonSchema | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Schema that the answer has to fulfil."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def _one_schema(self) -> "ResponseFormat":
        """Refuse json_schema with another type, and two schemas that differ."""
        if self.json_schema is not None and self.type != "json_schema":
            raise UserError("expected the type json_schema, because there is json_schema")
        if self.schema_ not in (None, self.answer_schema):
            raise UserError("expected one schema, in json_schema or beside it")
        return self


class Sampling(Body):
    """How to draw tokens, and how many."""

    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_finite_draws)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), AfterValidator(_all_tokens_where_off)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63), AfterValidator(_any_where_off)] | None = None

    def settings(self, seed: int) -> SamplingSettings:
        """Make the sampling settings of an answer with a seed; the default temperature is 1, as OpenAI has it."""
        own = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        return SamplingSettings(**{"temperature": 1.0, **given, "seed": seed})


class Answers(Sampling):
    """What chats and completions have in common."""

    n: Annotated[int, Field(ge=1, le=8)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: NoLimit | Count | None = None
    n_predict: NoLimit | Count | None = Field(None, description="Name of max_tokens in llama.cpp.")
    num_predict: NoLimit | Count | None = Field(None, description="Name of max_tokens in Ollama.")
    max_new_tokens: NoLimit | Count | None = Field(None, description="Name of max_tokens in TGI.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "Answers":
        """Require that all given names of the token limit have one value."""
        given = [(name, value) for name in _LIMITS if (value := getattr(self, name, None)) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise wrong(name, f"the number of {given[0][0]}, {given[0][1]}", value)
        return self

    @property
    def limit(self) -> int | None:
        """Tokens that an answer may have; None where nobody says."""
        given = (value for name in _LIMITS if (value := getattr(self, name, None)) is not None)
        found = next(given, None)
        return MOST_TOKENS if found == -1 else found

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True if the stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Templated(Body):
    """Requests whose prompt a chat template writes."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(max_length=64, description="Variables of the chat template.")
    ] = None
    enable_thinking: Annotated[bool | None, Field(description="A variable of the chat template.")] = None
    think: bool | Effort | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _not_reserved(self) -> "Templated":
        for name in RESERVED:
            if name in (self.chat_template_kwargs or {}):
                raise wrong(f"chat_template_kwargs.{name}", "a variable other than those that llorch sets", name)
        return self

    @property
    def thinking(self) -> dict[str, bool | str]:
        """List the fields that switch thinking, with their values."""
        asked = {name: getattr(self, name) for name in ("enable_thinking", "think", "reasoning_effort")}
        return {name: value for name, value in asked.items() if value is not None}


class ChatRequest(Answers, Templated):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: NoLimit | Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _together(self) -> "ChatRequest":
        """Require `logprobs` for `top_logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "logprobs to be true in the same request")
        return self

    @property
    def form(self) -> AnswerForm | None:
        """The form that the answer has to have."""
        return None if self.response_format is None else self.response_format.answer_form("response_format")


class CompletionRequest(Answers):
    """Of /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text], _PROMPTS] | Annotated[list[Ids], _PROMPTS]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parse_special: bool | None = Field(None, description=_PARSE_SPECIAL)
    add_special_tokens: bool | None = Field(None, description="False: the tokenizer adds no token to a text.")

    @model_validator(mode="after")
    def _together(self) -> "CompletionRequest":
        """Refuse more answers in sum than a request may have."""
        if (n_answers := len(self.prompts) * (self.n or 1)) > MAX_ANSWERS:
            raise wrong("n", f"at most {MAX_ANSWERS} answers for all prompts together", n_answers)
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request, each as text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item] (one text, or the ids of one)
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeRequest(Strict):
    """Of /tokenize."""

    content: Text
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Of /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


class TraceRequest(Body):
    """Of /v1/trace: one of prompt, messages and tokens."""

    prompt: Text | None = None
    parse_special: bool | None = Field(None, description=_PARSE_SPECIAL)
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tokens: Ids | None = None
    arrays: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _together(self) -> "TraceRequest":
        """Require exactly one kind of input."""
        n_given = sum(given is not None for given in (self.prompt, self.messages, self.tokens))
        if n_given != 1:
            raise wrong("prompt", "exactly one of prompt, messages and tokens", n_given)
        if self.parse_special and self.prompt is None:
            raise wrong("parse_special", "prompt in the same request")
        return self

"""The JSON of `/v1/responses`, as pydantic models; names are OpenAI's."""

from typing import Literal

from llorch.apps.serve.replies import Reply, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """An answer."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class Why(Reply):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Reply):
    """Of the prompt."""

    cached_tokens: int


class OutputDetails(Reply):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Reply):
    """Of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: Why | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Literal["none"]
    tools: list[str]
    top_p: float
    metadata: dict[str, str]
    usage: ResponseUsage | None


class ResponseEvent(Reply):
    """An event of its stream; which fields there are follows from the type."""

    type: str
    sequence_number: int
    response: Response | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None

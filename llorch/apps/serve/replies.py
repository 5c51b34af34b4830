"""What is answered: the JSON of replies, as pydantic models, which describe it to others; names are OpenAI's.

Fields without a value are left out where OpenAI leaves them out; what has to be there as null is given as None.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class Reply(BaseModel):
    """Made here, so nothing is checked twice."""

    model_config = ConfigDict(extra="forbid")

    def json_bytes(self) -> bytes:
        """Encode the reply as the bytes to send."""
        return self.model_dump_json(exclude_unset=True).encode()


class Error(Reply):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every answer whose status is not 200."""

    error: Error


class Health(Reply):
    """Of /health, while all is well."""

    status: Literal["ok"]


class ModelCard(Reply):
    """One model, or it with an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int  # tokens of prompt and answer
    chat: Literal["template", "plain"]  # plain: the file has no chat template, contents are joined by blank lines


class ModelList(Reply):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class CachedTokens(Reply):
    """Of a prompt."""

    cached_tokens: int


class Usage(Reply):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(Reply):
    """How long it took, in the words of llama-server: first the prompts, then what was made."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class TopLogprob(Reply):
    """A token that could have come."""

    token: str
    bytes: list[int]
    logprob: float  # natural, before any filter; -9999 at least


class TokenLogprob(TopLogprob):
    """The one that came, an end token apart."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Reply):
    """An answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    """One of `n`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Reply):
    """Of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class Delta(Reply):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Reply):
    """What is new of one of `n`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Reply):
    """An event of a stream; the last one has no choices, but the counts."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class CompletionLogprobs(Reply):
    """Of an answer, an entry a token."""

    tokens: list[str]  # texts; `bytes:` or `token_id:` where these are none or the same, as in top_logprobs
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters of the answer's text before the token's


class CompletionChoice(Reply):
    """One answer: `n` of the first prompt, then those of the next."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Reply):
    """Of /v1/completions, and an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class Piece(Reply):
    """A token: its text, or its bytes where these are none."""

    id: int
    piece: str | list[int]


class Tokenized(Reply):
    """Of /tokenize."""

    tokens: list[int] | list[Piece]


class Detokenized(Reply):
    """Of /detokenize."""

    content: str


class Stage(Reply):
    """A stage of a pass: figures of its finite values, null where there are none."""

    name: str
    shape: list[int]
    n_not_finite: int  # scores of later tokens are masked with -inf
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None


class Trace(Reply):
    """Of /v1/trace: every stage in the order of the pass, and arrays as .npy files in base64."""

    model: str
    tokens: list[int]
    stages: list[Stage]
    arrays: dict[str, str]

"""JSON bodies of replies as pydantic models, which describe them in OpenAPI; the names are OpenAI's.

A field that is not set is omitted; a field that OpenAI sends as null is set to None. The functions at the end count
tokens and times, and format log probabilities with each token as text and as bytes.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llorch.apps.serve.engine import NewToken, Work
from llorch.files.tokenizer import Tokenizer

Finish = Literal["stop", "length"]


class Reply(BaseModel):
    """JSON body that llorch makes."""

    model_config = ConfigDict(extra="forbid")

    def json_bytes(self) -> bytes:
        """Encode the reply as the bytes to send."""
        return self.model_dump_json(exclude_unset=True).encode()


class Error(Reply):
    """Error of a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Reply with a status other than 200."""

    error: Error


class Health(Reply):
    """Reply of /health while the server works."""

    status: Literal["ok"]


class ModelCard(Reply):
    """The model, without or with an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int  # tokens of prompt and answer
    chat: Literal["template", "plain"]  # plain: the file has no chat template, contents are joined by blank lines
    numerics: str  # arithmetic of the products, as `exact`, or `ggml by ggml's kernels`


class ModelList(Reply):
    """Reply of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class CachedTokens(Reply):
    """Prompt tokens from the prefix cache."""

    cached_tokens: int


class Usage(Reply):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(Reply):
    """Times of prefill (prompt) and decoding (predicted), with llama-server's field names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class TopLogprob(Reply):
    """Log probability of a candidate token."""

    token: str
    bytes: list[int]
    logprob: float  # natural logarithm, before any filter; at least -9999


class TokenLogprob(TopLogprob):
    """Log probability of a generated token, except an end token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log probabilities of a chat answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Reply):
    """Message of the assistant."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Reply):
    """Reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class Delta(Reply):
    """New part of a streamed message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Reply):
    """New part of one of the `n` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Reply):
    """Event of a chat stream; the last event has no choices but the token counts, if the request asks for them."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class CompletionLogprobs(Reply):
    """Log probabilities of a completion, one entry per token."""

    tokens: list[str]  # texts; see `_distinct_keys` for a token without a valid or distinct text
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters of the answer's text before the token's


class CompletionChoice(Reply):
    """One answer; the `n` answers of the first prompt come first, then those of the next prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Reply):
    """Reply of /v1/completions, and event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class Piece(Reply):
    """Token with its text, or its bytes if they are no valid text."""

    id: int
    piece: str | list[int]


class Tokenized(Reply):
    """Reply of /tokenize."""

    tokens: list[int] | list[Piece]


class Detokenized(Reply):
    """Reply of /detokenize."""

    content: str


class Stage(Reply):
    """Summary of the finite values of one stage; null if there are none."""

    name: str
    shape: list[int]
    n_not_finite: int  # scores of later tokens are masked with -inf
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None


class Trace(Reply):
    """Reply of /v1/trace: every stage in the order of the pass, and arrays as .npy files in base64."""

    model: str
    tokens: list[int]
    stages: list[Stage]
    arrays: dict[str, str]


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """Message of the assistant in a response."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class Why(Reply):
    """Reason why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Reply):
    """Details of the prompt's tokens."""

    cached_tokens: int


class OutputDetails(Reply):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Reply):
    """Reply of /v1/responses."""

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
    """Event of a /v1/responses stream; its type decides which fields it has."""

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


def usage(works: Sequence[Work], *, n_prompt: int) -> Usage:
    """Count the tokens of all answers to a request; `n_prompt` counts each prompt once, also if it has many answers."""
    n_generated, n_cached = sum(work.n_generated for work in works), max((work.n_cached for work in works), default=0)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=CachedTokens(cached_tokens=min(n_cached, n_prompt)),
    )


def counts(works: Sequence[Work], *, n_prompt: int) -> dict[str, Any]:
    """Return the fields `usage` and `timings` of a reply, for all answers to a request."""
    return {"usage": usage(works, n_prompt=n_prompt), "timings": timings(works)}


def timings(works: Sequence[Work]) -> Timings:
    """Measure prefill, from the first start of an answer until each has a token, and decoding, from then to the end."""
    start = min(work.joined or work.submitted for work in works)
    first = max(work.first or start for work in works)
    last = max(work.last or first for work in works)
    n_prompt = sum(len(work.job.ids) - work.n_cached for work in works)
    n_tokens = sum(work.n_generated for work in works)
    return Timings(
        cache_n=sum(work.n_cached for work in works),
        prompt_n=n_prompt,
        prompt_ms=1e3 * (first - start),
        prompt_per_second=_rate(n_prompt, first - start),
        predicted_n=n_tokens,
        predicted_ms=1e3 * (last - first),
        predicted_per_second=_rate(n_tokens - len(works), last - first),  # prefill yields each first token
    )


def finish_reason(finish: str | None) -> Finish | None:
    """Translate a finish reason to OpenAI's: `length`, or `stop` for an end token or a stop string."""
    return "length" if finish == "length" else None if finish is None else "stop"


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n > 0 and seconds > 0 else 0.0


FLOOR = -9999.0  # replaces minus infinity, which JSON lacks


def piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token; for a control token, the bytes of its text."""
    if token_id in tokenizer.control_ids:
        return tokenizer.decode([token_id], skip_special=False).encode()
    return tokenizer.token_bytes(token_id)


def chat_logprobs(tokenizer: Tokenizer, new_token: NewToken) -> ChatLogprobs:
    """Make the log probabilities of one token of a chat; none for an end token, which has no text."""
    token = new_token.token
    if token.finish == "eos":
        return ChatLogprobs(content=[], refusal=None)
    top = [TopLogprob(**_logprob_record(tokenizer, *candidate)) for candidate in new_token.top]
    entry = TokenLogprob(**_logprob_record(tokenizer, token.id, token.logprob), top_logprobs=top)
    return ChatLogprobs(content=[entry], refusal=None)


def _logprob_record(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = piece(tokenizer, token_id)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": max(logprob, FLOOR)}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[NewToken], *, start: int) -> CompletionLogprobs:
    """Make the log probabilities of a completion's tokens, without end tokens; `start` is the first text offset."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for new in tokens:
        if new.token.finish != "eos":
            keys = _distinct_keys(tokenizer, [new.token.id, *(token_id for token_id, _ in new.top)])
            lists["tokens"].append(keys[new.token.id])
            lists["token_logprobs"].append(max(new.token.logprob, FLOOR))
            lists["top_logprobs"].append({keys[token_id]: max(logprob, FLOOR) for token_id, logprob in new.top[::-1]})
            lists["text_offset"].append(start)
        start += len(new.token.text)
    return CompletionLogprobs(**lists)


def _distinct_keys(tokenizer: Tokenizer, token_ids: Sequence[int]) -> dict[int, str]:
    r"""Name each token by its text, or `bytes:\xf0\x9f` for a part of a character, as in OpenAI's completions API.

    A second token with the same text is `token_id:5`, as in vLLM.
    """
    names: dict[str, int] = {}
    for token_id in dict.fromkeys(token_ids):
        raw = piece(tokenizer, token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        names[text if text not in names else f"token_id:{token_id}"] = token_id
    return {token_id: name for name, token_id in names.items()}

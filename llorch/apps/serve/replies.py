"""What is answered: the JSON of replies, as pydantic models, which describe it to others; names are OpenAI's.

Fields without a value are left out where OpenAI leaves them out; what has to be there as null is given as None.
The functions below count tokens and times and write log probabilities, each token as text and as bytes.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llorch.apps.serve.engine import MadeToken, Work
from llorch.files.tokenizer import Tokenizer

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
    """Details of the prompt's tokens."""

    cached_tokens: int


class OutputDetails(Reply):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Tokens of a request."""

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


def usage(works: Sequence[Work], *, n_prompt: int) -> Usage:
    """Count the tokens of all answers to a request; each prompt of `n_prompt` tokens is counted once."""
    made, cached = sum(work.n_made for work in works), max((work.n_cached for work in works), default=0)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=made,
        total_tokens=n_prompt + made,
        prompt_tokens_details=CachedTokens(cached_tokens=min(cached, n_prompt)),
    )


def counts(works: Sequence[Work], *, n_prompt: int) -> dict[str, Any]:
    """Return the usage and the timings of all answers to a request, by their names in a reply."""
    return {"usage": usage(works, n_prompt=n_prompt), "timings": timings(works)}


def timings(works: Sequence[Work]) -> Timings:
    """Measure from the first answer that began to the last that ended."""
    began = min(work.joined or work.submitted for work in works)
    first = max(work.first or began for work in works)
    last = max(work.last or first for work in works)
    n_read, n_made = sum(len(work.job.ids) - work.n_cached for work in works), sum(work.n_made for work in works)
    return Timings(
        cache_n=sum(work.n_cached for work in works),
        prompt_n=n_read,
        prompt_ms=1e3 * (first - began),
        prompt_per_second=_rate(n_read, first - began),
        predicted_n=n_made,
        predicted_ms=1e3 * (last - first),
        predicted_per_second=_rate(n_made - len(works), last - first),
    )


def finish_reason(finish: str | None) -> Finish | None:
    """Translate the end of an answer to OpenAI's words: an end token is a stop."""
    return "length" if finish == "length" else None if finish is None else "stop"


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n > 0 and seconds > 0 else 0.0


LEAST = -9999.0  # JSON has no infinity


def piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token; of a control token, those of its text."""
    if token_id in tokenizer.control_ids:
        return tokenizer.decode([token_id], skip_special=False).encode()
    return tokenizer.token_bytes(token_id)


def for_chat(tokenizer: Tokenizer, made: MadeToken) -> ChatLogprobs:
    """Make the log probabilities of one token for a chat; none for an end token, which is no part of the answer."""
    token = made.token
    if token.finish == "eos":
        return ChatLogprobs(content=[], refusal=None)
    top = [TopLogprob(**_logprob_record(tokenizer, *one)) for one in made.top]
    entry = TokenLogprob(**_logprob_record(tokenizer, token.id, token.logprob), top_logprobs=top)
    return ChatLogprobs(content=[entry], refusal=None)


def _logprob_record(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = piece(tokenizer, token_id)
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": max(logprob, LEAST)}


def for_completion(tokenizer: Tokenizer, tokens: Sequence[MadeToken], *, start: int) -> CompletionLogprobs:
    """Make the log probabilities of some tokens in the older form, without end tokens."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for made in tokens:
        if made.token.finish != "eos":
            keys = _distinct_keys(tokenizer, [made.token.id, *(token_id for token_id, _ in made.top)])
            found["tokens"].append(keys[made.token.id])
            found["token_logprobs"].append(max(made.token.logprob, LEAST))
            found["top_logprobs"].append({keys[token_id]: max(logprob, LEAST) for token_id, logprob in made.top[::-1]})
            found["text_offset"].append(start)
        start += len(made.token.text)
    return CompletionLogprobs(**found)


def _distinct_keys(tokenizer: Tokenizer, token_ids: Sequence[int]) -> dict[int, str]:
    r"""Name each token by its text, by `bytes:\xf0\x9f` for a part of a character, as OpenAI's older API does.

    The second token with the same text is `token_id:5`, as in vLLM.
    """
    names: dict[str, int] = {}
    for token_id in dict.fromkeys(token_ids):
        data = piece(tokenizer, token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        names[text if text not in names else f"token_id:{token_id}"] = token_id
    return {token_id: name for name, token_id in names.items()}

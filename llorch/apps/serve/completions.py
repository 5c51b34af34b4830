"""`/v1/completions`: continue prompts given as text or token ids; `/tokenize` and `/detokenize`."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve import replies
from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import NewToken
from llorch.apps.serve.events import DONE, EventStream, event, stream_tokens
from llorch.apps.serve.http import get_service, read_body, reply, run_in_thread, wait_for_answer
from llorch.apps.serve.requests import CompletionRequest, DetokenizeRequest, TokenizeRequest
from llorch.apps.serve.response_stream import AnswerStream
from llorch.apps.serve.service import Service, first_seed, require_short
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.model.generate import Job

MAX_TOKENS = 16  # OpenAI's default


async def answer(request: Request) -> Response:
    """Answer a POST to /v1/completions."""
    body, service = await read_body(request, CompletionRequest), get_service(request)
    ignored = ignored_fields(body)
    jobs = await run_in_thread(
        service, lambda: _completion_jobs(service, body), n_answers=len(body.prompts) * (body.n or 1)
    )
    stream = AnswerStream(service.engine, service.model, jobs, body.stops, service.timeout)
    completion = _CompletionAnswer(service, body, stream)
    if body.stream:
        return EventStream(completion.events(), stream.close, ignored)
    return await wait_for_answer(request, completion.answer_at_once(ignored))


def _completion_jobs(service: Service, body: CompletionRequest) -> list[Job]:
    """Make `n` jobs for each prompt, with consecutive seeds."""
    adapter, seed, n = service.adapter(body.model), first_seed(body.seed), body.n or 1
    special = {"parse_special": body.parse_special, "add_special": body.add_special_tokens}
    prompts = [service.text_ids(prompt, **special) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    opts = {"param": "prompt", "max_tokens": body.limit or MAX_TOKENS, "adapter": adapter}
    return [
        service.job(ids, body.settings(seed + i), n_top=body.logprobs or 0, **opts) for ids in prompts for i in range(n)
    ]


@dataclass
class _CompletionAnswer:
    """Answer to one completion request, complete or as a stream."""

    service: Service
    body: CompletionRequest
    stream: AnswerStream

    def __post_init__(self) -> None:
        works = self.stream.works
        self._n_prompt = sum(len(work.job.ids) for work in works[:: self.body.n or 1])  # each prompt once
        self._lengths = [0] * len(works)  # characters of each answer so far
        self._common = self.service.reply_fields("cmpl", self.body.model)

    async def answer_at_once(self, ignored: Sequence[str]) -> Response:
        """Answer with the complete completions."""
        answers = await self.stream.collect()
        choices = [self._choice(index, tokens) for index, tokens in enumerate(answers)]
        counts = replies.counts(self.stream.works, n_prompt=self._n_prompt)
        return reply(self._make_reply(choices, **counts), ignored)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed completion."""
        async for encoded in stream_tokens(self.stream, self._token_event):
            yield encoded
        if self.body.wants_usage:
            yield event(self._make_reply([], **replies.counts(self.stream.works, n_prompt=self._n_prompt)))
        yield DONE

    def _token_event(self, index: int, new_token: NewToken) -> bytes:
        """Encode the event of a token, empty if the token is invisible."""
        token = new_token.token
        is_visible = token.text or token.finish is not None or self.body.logprobs is not None
        return event(self._make_reply([self._choice(index, [new_token])])) if is_visible else b""

    def _choice(self, index: int, tokens: Sequence[NewToken]) -> replies.CompletionChoice:
        """Make the choice that adds these tokens, and count their characters for later offsets."""
        logprobs: replies.CompletionLogprobs | None = None
        if self.body.logprobs is not None:
            logprobs = replies.completion_logprobs(self.service.model.tokenizer, tokens, start=self._lengths[index])
        text = "".join(token.token.text for token in tokens)
        self._lengths[index] += len(text)
        finish = replies.finish_reason(tokens[-1].token.finish)
        return replies.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _make_reply(self, choices: list[replies.CompletionChoice], **counts: Any) -> replies.Completion:
        """Make a reply with the id, model and time that all chunks of a stream share."""
        return replies.Completion(object="text_completion", choices=choices, **self._common, **counts)


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text."""
    body, service = await read_body(request, TokenizeRequest), get_service(request)
    ignored = ignored_fields(body)
    return reply(await run_in_thread(service, lambda: _tokenize_body(service, body)), ignored)


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids; control tokens become their text."""
    body, service = await read_body(request, DetokenizeRequest), get_service(request)
    ignored = ignored_fields(body)
    return reply(await run_in_thread(service, lambda: _detokenize_body(service, body)), ignored)


def _tokenize_body(service: Service, body: TokenizeRequest) -> replies.Tokenized:
    require_short(body.content, param="content")
    tokenizer = service.model.tokenizer
    ids = tokenizer.encode(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return replies.Tokenized(tokens=ids)
    pieces = [replies.Piece(id=token_id, piece=_decode_piece(replies.piece(tokenizer, token_id))) for token_id in ids]
    return replies.Tokenized(tokens=pieces)


def _detokenize_body(service: Service, body: DetokenizeRequest) -> replies.Detokenized:
    try:
        return replies.Detokenized(content=service.model.tokenizer.decode(body.tokens, skip_special=False))
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None


def _decode_piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

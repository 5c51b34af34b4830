"""`/v1/completions`: texts or ids in, what goes on from there out; `/tokenize` and `/detokenize`."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve import replies
from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import MadeToken
from llorch.apps.serve.events import DONE, EventStream, event, tokens_as_events
from llorch.apps.serve.http import read_body, reply, run_beside_loop, service_of, unless_gone
from llorch.apps.serve.requests import CompletionRequest, DetokenizeRequest, TokenizeRequest
from llorch.apps.serve.response_stream import Answering
from llorch.apps.serve.service import Service, first_seed, require_short
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.model.generate import Job

MAX_TOKENS = 16  # where nobody says, as OpenAI has it


async def answer(request: Request) -> Response:
    """Answer a request of this route."""
    body, service = await read_body(request, CompletionRequest), service_of(request)
    ignored = ignored_fields(body)
    jobs = await run_beside_loop(
        service, lambda: _completion_jobs(service, body), n_answers=len(body.prompts) * (body.n or 1)
    )
    answering = Answering(service.engine, service.model, jobs, body.stops, service.timeout)
    completion = _Completion(service, body, answering)
    if body.stream:
        return EventStream(completion.events(), answering.close, ignored)
    return await unless_gone(request, completion.whole(ignored))


def _completion_jobs(service: Service, body: CompletionRequest) -> list[Job]:
    """Return `n` jobs for each prompt, with consecutive seeds."""
    adapter, seed, n = service.adapter(body.model), first_seed(body.seed), body.n or 1
    special = {"parse_special": body.parse_special, "add_special": body.add_special_tokens}
    prompts = [service.text_ids(one, **special) if isinstance(one, str) else one for one in body.prompts]
    how = {"param": "prompt", "max_tokens": body.limit or MAX_TOKENS, "adapter": adapter}
    return [
        service.job(ids, body.settings(seed + i), n_top=body.logprobs or 0, **how) for ids in prompts for i in range(n)
    ]


@dataclass
class _Completion:
    """One request that runs."""

    service: Service
    body: CompletionRequest
    answering: Answering

    def __post_init__(self) -> None:
        works = self.answering.works
        self._n_prompt = sum(len(work.job.ids) for work in works[:: self.body.n or 1])
        self._lengths = [0] * len(works)  # characters of each answer so far
        self._common = self.service.reply_fields("cmpl", self.body.model)

    async def whole(self, ignored: Sequence[str]) -> Response:
        """Answer with the whole completion at once."""
        made = await self.answering.whole()
        choices = [self._choice(index, tokens) for index, tokens in enumerate(made)]
        counts = replies.counts(self.answering.works, n_prompt=self._n_prompt)
        return reply(self._make_reply(choices, **counts), ignored)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed completion as tokens come."""
        async for some in tokens_as_events(self.answering, self._token_event):
            yield some
        if self.body.wants_usage:
            yield event(self._make_reply([], **replies.counts(self.answering.works, n_prompt=self._n_prompt)))
        yield DONE

    def _token_event(self, index: int, one: MadeToken) -> bytes:
        """Return the event of a token, empty if it shows nothing."""
        token = one.token
        shown = token.text or token.finish is not None or self.body.logprobs is not None
        return event(self._make_reply([self._choice(index, [one])])) if shown else b""

    def _choice(self, index: int, tokens: Sequence[MadeToken]) -> replies.CompletionChoice:
        """Build the choice that adds these tokens, and count their characters for later offsets."""
        logprobs: replies.CompletionLogprobs | None = None
        if self.body.logprobs is not None:
            logprobs = replies.for_completion(self.service.model.tokenizer, tokens, start=self._lengths[index])
        text = "".join(one.token.text for one in tokens)
        self._lengths[index] += len(text)
        finish = replies.finish_reason(tokens[-1].token.finish)
        return replies.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _make_reply(self, choices: list[replies.CompletionChoice], **counts: Any) -> replies.Completion:
        """Make a reply with the id, model and time that all chunks of a stream have."""
        return replies.Completion(object="text_completion", choices=choices, **self._common, **counts)


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text."""
    body, service = await read_body(request, TokenizeRequest), service_of(request)
    ignored = ignored_fields(body)
    return reply(await run_beside_loop(service, lambda: _tokenized(service, body)), ignored)


async def detokenize(request: Request) -> Response:
    """Convert ids to text; control tokens become their text."""
    body, service = await read_body(request, DetokenizeRequest), service_of(request)
    ignored = ignored_fields(body)
    return reply(await run_beside_loop(service, lambda: _detokenized(service, body)), ignored)


def _tokenized(service: Service, body: TokenizeRequest) -> replies.Tokenized:
    require_short(body.content, param="content")
    tokenizer = service.model.tokenizer
    ids = tokenizer.encode(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return replies.Tokenized(tokens=ids)
    pieces = [replies.Piece(id=token_id, piece=_readable(replies.piece(tokenizer, token_id))) for token_id in ids]
    return replies.Tokenized(tokens=pieces)


def _detokenized(service: Service, body: DetokenizeRequest) -> replies.Detokenized:
    try:
        return replies.Detokenized(content=service.model.tokenizer.decode(body.tokens, skip_special=False))
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None


def _readable(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)

"""`/tokenize` and `/detokenize`, as llama-server has them; text stays text unless `parse_special` says otherwise."""

from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.http import read_body, reply, run_beside_loop, service_of
from llorch.apps.serve.logprobs import piece
from llorch.apps.serve.replies import Detokenized, Piece, Tokenized
from llorch.apps.serve.requests import DetokenizeRequest, TokenizeRequest
from llorch.apps.serve.service import Service, require_short
from llorch.apps.serve.unsupported_fields import ignored_fields


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


def _tokenized(service: Service, body: TokenizeRequest) -> Tokenized:
    require_short(body.content, param="content")
    tokenizer = service.model.tokenizer
    ids = tokenizer.encode(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return Tokenized(tokens=ids)
    return Tokenized(tokens=[Piece(id=one, piece=_readable(piece(tokenizer, one))) for one in ids])


def _detokenized(service: Service, body: DetokenizeRequest) -> Detokenized:
    try:
        return Detokenized(content=service.model.tokenizer.decode(body.tokens, skip_special=False))
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None


def _readable(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)

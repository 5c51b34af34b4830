"""Log probabilities as OpenAI writes them: each token as text, as bytes, and with what could have come instead."""

from collections.abc import Sequence
from typing import Any

from llorch.serve.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from llorch.serve.work import MadeToken
from llorch.tokenizer import Tokenizer

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
            said = _logprob_record(tokenizer, made.token.id, made.token.logprob)
            top = [_logprob_record(tokenizer, *one) for one in made.top]
            found["tokens"].append(said["token"])
            found["token_logprobs"].append(said["logprob"])
            found["top_logprobs"].append({one["token"]: one["logprob"] for one in reversed(top)})
            found["text_offset"].append(start)
        start += len(made.token.text)
    return CompletionLogprobs(**found)

"""Log probabilities as OpenAI writes them: each token as text, as bytes, and with what could have come instead."""

from collections.abc import Sequence
from typing import Any

from llorch.apps.serve.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from llorch.apps.serve.work import MadeToken
from llorch.files.tokenizer import Tokenizer

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

"""Thoughts before an answer: what a request asks of them becomes variables of the chat template, or is refused.

Qwen's templates read `enable_thinking`, others `reasoning_effort`. Clients say the same in fields of their own:
`enable_thinking`, `think` (Ollama), `reasoning_effort` and `reasoning.effort` (OpenAI).
"""

from collections.abc import Mapping

from llorch.apps.serve.api_errors import ApiError, wrong
from llorch.apps.serve.requests import Templated
from llorch.files.tokenizer.conversation import Chats

_SIGNS = ("think", "reasoning")  # in the source of a template whose model thinks


def template_variables(body: Templated, chats: Chats) -> Mapping[str, object]:
    """Return the variables of the chat template for one request.

    ApiError for a wish that the template has no variable for. A wish for no thoughts is met by a template that has
    none.
    """
    found: dict[str, object] = dict(body.chat_template_kwargs or {})
    for field, value in body.thinking.items():
        wanted = _variable(value, chats)
        if wanted is None:
            if value in (False, "none") and not any(map(chats.template_mentions, _SIGNS)):
                continue
            text = f"{field}: the chat template of this model has no variable for {value!r}; leave the field out"
            raise ApiError(400, text, param=field, code="unsupported")
        name, meant = wanted
        if found.setdefault(name, meant) != meant:
            raise wrong(field, f"{name} to be {found[name]!r} in every field that sets this variable", value)
    return found


def _variable(value: bool | str, chats: Chats) -> tuple[str, object] | None:
    """Find the variable of the template that switches thinking, and its value."""
    switches = isinstance(value, bool) or value == "none"
    if switches and chats.template_mentions("enable_thinking"):
        return "enable_thinking", value is True
    if isinstance(value, str) and chats.template_mentions("reasoning_effort"):
        return "reasoning_effort", value
    return None

"""Rendering a conversation with the chat template of a model.

The template is a program that came with a file: it runs in jinja's sandbox, sees plain data only, and cannot read the
clock, so that equal conversations give equal texts (templates then write the date that they hold, if any). It runs in
a process of its own (template_process.py), so that one that never ends, or takes all memory, is an error in a second.

Source: transformers utils/chat_template_utils.py, `_cached_compile_jinja_template` (variables).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llorch.errors import ErrorCode, FormatError
from llorch.tokenizer.template_process import RESIDENT
from llorch.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, object]
_REMEDIES: Mapping[ErrorCode, str] = {
    "TemplateError": "correct the template or the conversation",
    "TemplateBudget": "it was stopped; shorten the conversation, or use another chat_template.jinja",
}


class ChatTemplate:
    """A template that can be read."""

    def __init__(self, source: str, *, variables: Mapping[str, str], path: str | Path | None = None) -> None:
        """Check a template, which may use these `variables`: TemplateError, or TemplateBudget if that is too long."""
        self._path = path
        self._variables = variables
        self._source = source
        self._ask({"source": source})

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[object] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Write a conversation as the text that the model reads; keys without a value are left out.

        FormatError: TemplateError when the template refuses it or fails on it, TemplateBudget beyond 1 s, 512 MiB or
        4 Mi characters.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        known = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._ask({"source": self._source, "variables": {**self._variables, **known}})

    def _ask(self, request: Mapping[str, object]) -> str:
        try:
            answer = RESIDENT.ask(request)
        except (TypeError, ValueError, RecursionError) as error:
            answer = {"code": "TemplateError", "message": f"refuses this: it is no JSON: {error}"}
        if "text" in answer:
            return answer["text"]
        code: ErrorCode = "TemplateBudget" if answer["code"] == "TemplateBudget" else "TemplateError"
        of = f" of {self._path}" if self._path is not None else ""  # in the text: data names its own file and line
        raise FormatError(code, f"the chat template{of} {answer['message']}; {_REMEDIES[code]}")


def compiled(templates: Mapping[str, str], tokenizer: Tokenizer, *, path: str | Path) -> dict[str, ChatTemplate]:
    """Check the chat templates of a model; the tokenizer knows what begins and ends a text, which templates write."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    variables = {name: tokenizer.decode([one], skip_special=False) for name, one in ids.items() if one is not None}
    return {name: ChatTemplate(text, variables=variables, path=path) for name, text in templates.items()}

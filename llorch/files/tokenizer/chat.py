"""Chat templates: reading from files, and rendering of a conversation.

Files have templates by name, the unnamed one is `default`. A template is an untrusted program: it runs in jinja's
sandbox with access to plain data only. Many templates write today's date by `strftime_now`, as in transformers; with a
date from the caller, equal conversations give equal texts. A template runs in a child process (template_process.py), so
that an endless loop or too much memory becomes an error within a second.

Source: transformers utils/chat_template_utils.py, `_cached_compile_jinja_template` (variables, `strftime_now`), and
tokenization_utils_base.py (chat_template.jinja before tokenizer_config.json); gguf-py `add_chat_template` (keys).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llorch.files.folder import require_inside
from llorch.files.mapped import read_regular
from llorch.files.strict_json import read_settings
from llorch.files.tokenizer.template_process import RESIDENT
from llorch.files.tokenizer.tokenizer import Tokenizer
from llorch.runtime.errors import ErrorCode, FormatError, UserError
from llorch.runtime.fields import Fields

Message = Mapping[str, object]
_REMEDIES: Mapping[ErrorCode, str] = {
    "TemplateError": "correct the template or the conversation",
    "TemplateBudget": "llorch stopped the template; shorten the conversation, or use another chat_template.jinja",
}

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")  # variables that llorch sets


@dataclass(frozen=True)
class TemplateSettings:
    """Variables and time for a template, in addition to the conversation."""

    variables: Mapping[str, object] | None = None  # JSON values, such as {"enable_thinking": False}
    time: datetime | None = None  # for templates that write today's date; None: the time of each rendering

    def __post_init__(self) -> None:
        """Raise UserError for variables that llorch sets."""
        for name in self.variables or ():
            if name in RESERVED:
                raise UserError(f"chat_template_kwargs: expected other names than {', '.join(RESERVED)}, got {name!r}")


class ChatTemplate:
    """Valid chat template."""

    def __init__(self, source: str, *, variables: Mapping[str, str], path: str | Path | None = None) -> None:
        """Compile a template, which may use `variables`; TemplateError, or TemplateBudget at a limit."""
        self._path = path
        self._variables = variables
        self._source = source
        self._ask({"source": source})

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = False,
        settings: TemplateSettings = TemplateSettings(),
    ) -> str:
        """Render a conversation, without message keys that are None.

        FormatError: TemplateError if the template raises an error; TemplateBudget beyond `TemplateLimits`.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        fixed = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables = {**self._variables, **(settings.variables or {}), **fixed}
        return self._ask(
            {"source": self._source, "variables": variables, "time": (settings.time or datetime.now()).isoformat()}
        )

    def _ask(self, request: Mapping[str, object]) -> str:
        """Compile or render in the child process; return the text, which is empty for a compilation."""
        try:
            answer = RESIDENT.ask(request)
        except (TypeError, ValueError, RecursionError) as error:
            answer = {"code": "TemplateError", "message": f"cannot be rendered: expected JSON values, got: {error}"}
        if "text" in answer:
            return answer["text"]
        code: ErrorCode = "TemplateBudget" if answer["code"] == "TemplateBudget" else "TemplateError"
        of_file = f" of {self._path}" if self._path is not None else ""  # path= would hide the data's own file and line
        raise FormatError(code, f"the chat template{of_file} {answer['message']}; {_REMEDIES[code]}")


def compiled(templates: Mapping[str, str], tokenizer: Tokenizer, *, path: str | Path) -> dict[str, ChatTemplate]:
    """Compile the chat templates of a model; the tokenizer has the texts of BOS and EOS for them."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    variables = {
        name: tokenizer.decode([token], skip_special=False) for name, token in ids.items() if token is not None
    }
    return {name: ChatTemplate(text, variables=variables, path=path) for name, text in templates.items()}


MORE_TEMPLATES = "additional_chat_templates"  # subfolder of a model folder
_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"  # GGUF keys: the default template, names of others
_MAX_TEMPLATE = 1 << 20  # bytes


def template_files(folder: Path) -> dict[str, Path]:
    """Return the files of chat templates in a Hugging Face folder, by name; Unsafe for a link out of the folder."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: require_inside(file, folder) for name, file in files.items() if file.is_file()}


def read_templates(folder: Path) -> dict[str, str]:
    """Read the chat templates of a Hugging Face folder, of 1 MiB at most, from files or the configuration."""
    templates = {name: _read_text(file) for name, file in template_files(folder).items()}
    return templates or _from_config(folder / "tokenizer_config.json")


def templates_metadata(templates: Mapping[str, str]) -> dict[str, object]:
    """Return GGUF metadata with the templates."""
    metadata: dict[str, object] = {
        _KEY if name == "default" else f"{_KEY}.{name}": text for name, text in templates.items()
    }
    other_names = [name for name in templates if name != "default"]
    return metadata | ({_NAMES: other_names} if other_names else {})


def templates_of_metadata(metadata: Mapping[str, object], path: Path) -> dict[str, str]:
    """Return the chat templates of a GGUF file, by name; Malformed if they are not strings."""
    fields = Fields(metadata, path)
    keys = {"default": _KEY} | {key.removeprefix(_KEY + "."): key for key in metadata if key.startswith(_KEY + ".")}
    return {name: fields.text(key) for name, key in keys.items() if fields.has(key)}


def _read_text(file: Path) -> str:
    try:
        return read_regular(file, limit=_MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise FormatError("Malformed", f"the chat template is not UTF-8: {error.reason}", path=file) from None


def _from_config(path: Path) -> dict[str, str]:
    match read_settings(path).get("chat_template"):
        case None:
            return {}
        case str(value):
            return {"default": value}
        case [*entries]:
            entry_pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
            templates = {name: text for name, text in entry_pairs if isinstance(name, str) and isinstance(text, str)}
            if len(templates) == len(entries):
                return templates
    raise FormatError("Malformed", "chat_template: expected a text, or a list of names and templates", path=path)

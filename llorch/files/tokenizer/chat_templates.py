"""Chat templates as files keep them: by name, the unnamed one being `default`. Nothing is rendered here.

Source: transformers tokenization_utils_base.py (chat_template.jinja before tokenizer_config.json); gguf-py
`add_chat_template` (keys).
"""

from collections.abc import Mapping
from pathlib import Path

from llorch.files.folder import require_inside
from llorch.files.mapped import read_regular
from llorch.files.strict_json import read_settings
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

MORE_TEMPLATES = "additional_chat_templates"  # a folder in that of a model
_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
_MAX_TEMPLATE = 1 << 20  # bytes


def template_files(folder: Path) -> dict[str, Path]:
    """Return the files of chat templates in a Hugging Face folder, by name; Unsafe for a link that leads out of it."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: require_inside(file, folder) for name, file in files.items() if file.is_file()}


def read_templates(folder: Path) -> dict[str, str]:
    """Read the chat templates of a Hugging Face folder, of 1 MiB at most, from files or the configuration."""
    templates = {name: _read_text(file) for name, file in template_files(folder).items()}
    return templates or _from_config(folder / "tokenizer_config.json")


def templates_metadata(templates: Mapping[str, str]) -> dict[str, object]:
    """Name templates as GGUF files do."""
    metadata: dict[str, object] = {
        _KEY if name == "default" else f"{_KEY}.{name}": text for name, text in templates.items()
    }
    named = [name for name in templates if name != "default"]
    return metadata | ({_NAMES: named} if named else {})


def templates_of_metadata(metadata: Mapping[str, object], path: Path) -> dict[str, str]:
    """Return the chat templates of a GGUF file, by name; Malformed when they are no texts."""
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
            named = [(one.get("name"), one.get("template")) for one in entries if isinstance(one, dict)]
            templates = {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
            if len(templates) == len(entries):
                return templates
    raise FormatError("Malformed", "chat_template: expected a text, or a list of names and templates", path=path)

"""The conversation that the options of a command make: a system text, what was said so far, what the user says."""

from pathlib import Path

import click

from llorch.cli.inputs import prompt_text


def conversation(chat: str | None, system: str | None, history: Path | None) -> list[dict[str, object]] | None:
    """Put a conversation together; `chat` is what the user says, `-` reads stdin. None when none is wanted."""
    if chat is None and history is None:
        if system is not None:
            raise click.UsageError("--system goes with --chat or --history")
        return None
    before = [] if history is None else read_history(history)
    if system is not None and before and before[0]["role"] == "system":
        raise click.UsageError(f"--system: {history} begins with a system message already")
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    messages += before
    return messages if chat is None else [*messages, {"role": "user", "content": prompt_text(chat)}]


def read_history(path: Path) -> list[dict[str, object]]:
    """Messages of a file: a JSON list of them, or one on each line."""
    from llorch.fields import Fields
    from llorch.files.strict_json import parse_json
    from llorch.tokenizer.messages import checked_messages

    data = path.read_bytes()
    if data.lstrip().startswith(b"["):
        value = parse_json(data, what="the history", path=path)
    else:
        lines = enumerate(data.splitlines(), start=1)
        value = [parse_json(line, what="the line", path=f"{path}:{n}") for n, line in lines if line.strip()]
    return checked_messages(Fields({}, path), "history", value)

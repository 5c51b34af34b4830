"""`llorch chat`: a conversation on the terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.model_options import ModelOptions, adapter_options, model_options, sampling_options, template_options
from llorch.cli.options import FILE, MODEL, TEXT, WholeNumber, group, page_option, verb
from llorch.cli.outcome import error_line
from llorch.cli.output import say
from llorch.cli.run import load_adapter
from llorch.cli.threads import threads_option, use_threads

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.cli.chat_session import ChatSession

CONTEXT = 8192  # tokens to keep memory for


@verb(
    "Talk to a model on the terminal.",
    "llorch chat",
    'llorch chat model.gguf --system "Answer in a sentence." -t 0.8',
    "llorch chat model.gguf --adapter path/to/adapter --history yesterday.json",
    page="run.md",
)
@click.argument("model", type=MODEL, default="story")
@group(
    "Input",
    page_option("--system", type=TEXT, help="System message."),
    page_option("--history", type=FILE, help="Earlier messages, as /save writes them."),
)
@group(
    "Output",
    page_option(
        "-n", "--max-tokens", type=WholeNumber(min=1), default=1024, show_default=True, help="Most tokens an answer."
    ),
)
@sampling_options
@template_options
@group("Model", *adapter_options)
@model_options
@threads_option
def command(
    *, model: str, system: str | None, history: Path | None, max_tokens: int, adapter: Path | None, any_base: bool,
    template_date: "datetime | None", chat_template_kwargs: "dict | None", **values: Any,
) -> None:  # fmt: skip
    """Talk to MODEL (default: story) on the terminal.

    Type /help for the commands: change a message, try again, save, trace every stage, and more. Ctrl-C stops an
    answer, Ctrl-D ends the conversation.
    """
    from llorch.cli.chat_session import ChatSession
    from llorch.cli.inputs import earlier_messages, model_path
    from llorch.files.tokenizer.chat import TemplateSettings
    from llorch.ops.sampling import SamplingSettings

    options = ModelOptions.taken_from(values)
    arithmetic = options.arithmetic()
    if any_base and adapter is None:
        raise click.UsageError("--any-base goes with --adapter")
    settings, path = SamplingSettings(**values), model_path(model)
    before = earlier_messages(system, history)
    loaded = options.open(path, arithmetic, n_tokens=CONTEXT)
    loaded.chats.settings = TemplateSettings(chat_template_kwargs, template_date)
    talk = ChatSession(loaded, before, settings, max_tokens=max_tokens)
    threads, n_most = use_threads(loaded.config), loaded.config.max_position_embeddings
    talk.adapter = load_adapter(loaded, adapter, any_base=any_base)
    live = sys.stdin.isatty()
    plain = "" if loaded.chats.has_template else " (no chat template: messages are joined by blank lines)"
    say(f"{loaded.name}{plain}: {n_most} tokens of context, {threads}; /help, Ctrl-D ends")
    with _remembered_lines() if live else nullcontext():
        _converse(talk, live=live)


def _converse(talk: "ChatSession", *, live: bool) -> None:
    """Answer line by line; a mistake on a terminal prints one line, and the conversation goes on."""
    from llorch.cli.inputs import stdin_lines
    from llorch.cli.slash_commands import Quit, obey

    piped = None if live else stdin_lines()
    while True:
        try:
            line = _read_turn(piped)
            if line.startswith("/") and not line.startswith("//"):
                _show(obey(talk, line))
            elif line.strip():
                _show(talk.say(line.removeprefix("/") if line.startswith("//") else line))
        except (EOFError, Quit):
            return
        except KeyboardInterrupt:
            say("")  # where a line was being written, it is given up
        except (ValueError, OSError) as error:
            if not live or isinstance(error, BrokenPipeError):
                raise
            say(error_line(error))


def _read_turn(piped: Iterator[str] | None) -> str:
    """Read what the user says next, without the line end, from a terminal or from lines; EOFError at the end."""
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        if lines:
            lines[-1] = lines[-1][:-1]
        if piped is None:
            lines.append(input("... " if lines else "> "))
        elif (line := next(piped, None)) is not None:
            lines.append(line)
        else:
            raise EOFError
    return "\n".join(lines)


def _show(outcome: Any) -> None:
    """Print a line, or an answer while it is made; Ctrl-C stops it."""
    if isinstance(outcome, str):
        click.echo(outcome)
        return
    finish = None
    with closing(outcome) as tokens:
        try:
            for token in tokens:
                sys.stdout.write(_harmless(token.text))
                sys.stdout.flush()
                finish = token.finish
        except KeyboardInterrupt:
            finish = "stopped"
    sys.stdout.write("\n")
    sys.stdout.flush()
    if finish in ("length", "stopped"):
        limit = "note: the answer stops at --max-tokens or at the end of the context"
        say(limit if finish == "length" else finish)


def _harmless(text: str) -> str:
    """Remove from the text of a model the characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@contextmanager
def _remembered_lines() -> Iterator[None]:
    """Offer line editing and the lines of earlier conversations, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(os.environ.get("LLORCH_STATE") or Path(home) / "llorch") / "chat_history"
    with suppress(OSError):  # there is none yet, or it cannot be read
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
        except OSError as error:
            say(f"note: the lines of this conversation are not kept: {file}: {error.strerror}; set LLORCH_STATE")

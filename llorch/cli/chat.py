"""`llorch chat`: hold a conversation on the terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.implementation import implementation_option, use_implementation
from llorch.cli.model_options import ModelOptions, adapter_options, model_options, sampling_options, template_options
from llorch.cli.options import FILE, MODEL, TEXT, WholeNumber, group, page_option, verb
from llorch.cli.outcome import explain
from llorch.cli.output import say
from llorch.cli.run import load_adapter
from llorch.cli.threads import threads_option, use_threads
from llorch.runtime.errors import LearnerFault

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.cli.chat_session import ChatSession

CONTEXT = 8192  # tokens to reserve memory for


@verb(
    "Talk to a model on the terminal.",
    "llorch chat",
    'llorch chat model.gguf --system "Answer in a sentence." -t 0.8',
    "llorch chat model.gguf --impl my_llama",
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
@implementation_option()
@model_options
@threads_option
def command(
    *, model: str, system: str | None, history: Path | None, max_tokens: int, adapter: Path | None, any_base: bool,
    impl: str | None, template_date: "datetime | None", chat_template_kwargs: "dict | None", **values: Any,
) -> None:  # fmt: skip
    """Talk to MODEL (default: story) on the terminal.

    Type /help for the commands: change a message, try again, save, trace every stage, and more. Ctrl-C stops an
    answer, Ctrl-D ends the conversation.
    """
    from llorch.cli.chat_session import ChatSession
    from llorch.cli.inputs import earlier_messages, model_path
    from llorch.files.tokenizer.chat import TemplateSettings
    from llorch.ops.sampling import SamplingSettings

    options = ModelOptions.from_values(values)
    arithmetic = options.arithmetic()
    if any_base and adapter is None:
        raise click.UsageError("--any-base goes with --adapter")
    settings, path = SamplingSettings(**values), model_path(model)
    messages = earlier_messages(system, history)
    options, is_exact = use_implementation(impl, path, options, arithmetic, has_adapter=adapter is not None)
    loaded = options.open(path, arithmetic, n_tokens=CONTEXT, is_exact=is_exact)
    loaded.chats.settings = TemplateSettings(chat_template_kwargs, template_date)
    session = ChatSession(loaded, messages, settings, max_tokens=max_tokens)
    threads, n_context = use_threads(loaded.config), loaded.config.max_position_embeddings
    session.adapter = load_adapter(loaded, adapter, any_base=any_base)
    is_terminal = sys.stdin.isatty()
    template_note = "" if loaded.chats.has_template else " (no chat template: messages are joined by blank lines)"
    say(f"{loaded.name}{template_note}: {n_context} tokens of context, {threads}; /help, Ctrl-D ends")
    with _line_history() if is_terminal else nullcontext():
        _converse(session, is_terminal=is_terminal)


def _converse(session: "ChatSession", *, is_terminal: bool) -> None:
    """Answer line by line; `/` begins a command, `//` a message with `/`. On a terminal an error does not end it."""
    from llorch.cli.inputs import stdin_lines
    from llorch.cli.slash_commands import Quit, obey

    piped_lines = None if is_terminal else stdin_lines()
    while True:
        try:
            line = _read_turn(piped_lines)
            if line.startswith("/") and not line.startswith("//"):
                _show(obey(session, line))
            elif line.strip():
                _show(session.say(line.removeprefix("/") if line.startswith("//") else line))
        except (EOFError, Quit):
            return
        except KeyboardInterrupt:
            say("")  # discards the line that was being typed
        except (ValueError, OSError, LearnerFault) as error:
            if not is_terminal or isinstance(error, BrokenPipeError):
                raise
            explain(error)


def _read_turn(piped_lines: Iterator[str] | None) -> str:
    """Read the user's next message, from a terminal or from lines, joined after a backslash; EOFError at the end."""
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        if lines:
            lines[-1] = lines[-1][:-1]
        if piped_lines is None:
            lines.append(input("... " if lines else "> "))
        elif (line := next(piped_lines, None)) is not None:
            lines.append(line)
        else:
            raise EOFError
    return "\n".join(lines)


def _show(outcome: Any) -> None:
    """Print a line, or an answer as it is generated; Ctrl-C stops the answer."""
    if isinstance(outcome, str):
        click.echo(outcome)
        return
    finish = None
    with closing(outcome) as tokens:
        try:
            for token in tokens:
                sys.stdout.write(_escape_controls(token.text))
                sys.stdout.flush()
                finish = token.finish
        except KeyboardInterrupt:
            finish = "stopped"
    sys.stdout.write("\n")
    sys.stdout.flush()
    if finish in ("length", "stopped"):
        length_note = "note: the answer stops at --max-tokens or at the end of the context"
        say(length_note if finish == "length" else finish)


def _escape_controls(text: str) -> str:
    """Escape the characters in a model's text that would control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


@contextmanager
def _line_history() -> Iterator[None]:
    """Offer line editing and the lines of earlier conversations, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(os.environ.get("LLORCH_STATE") or Path(home) / "llorch") / "chat_history"
    with suppress(OSError):  # the file may not exist yet, or may be unreadable
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

"""Output of `llorch lora train` on stderr: a bar on a terminal, else lines; and a command that tries the adapter."""

import shlex
import sys
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llorch.cli.inputs import has_vocabulary
from llorch.cli.output import say
from llorch.files import open_weights
from llorch.files.hub import find
from llorch.model.model import OpenModel
from llorch.runtime.builtin import find_data
from llorch.training.data import formats
from llorch.training.data.read import find_splits, read_records

if TYPE_CHECKING:
    from llorch.pytorch.train.run import AnyTraining
    from llorch.pytorch.train.trainer import StepReport

LINES = 20  # about this many step lines, if stderr is no terminal


class TrainingProgress:
    """Progress display of a training run."""

    def __init__(self) -> None:
        """Show nothing before the run begins."""
        self._bar: Any = None
        self._task: Any = None
        self._total = 0

    def __enter__(self) -> "TrainingProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begins(self, training: "AnyTraining") -> None:
        """Print the description of the run, and start the bar."""
        for line in description(training):
            say(line)
        self._total = training.total_steps
        if sys.stderr.isatty():
            self._start_bar(training.step)

    def made(self, report: "StepReport") -> None:
        """Show a finished step."""
        line = f"loss {report.loss:.4f}, norm {report.norm:.3g}, rate {report.learning_rate:.2e}"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, line=line)
        elif report.step == self._total or report.step % max(1, self._total // LINES) == 0:
            say(f"step {report.step} of {self._total}: {line}")

    def validated(self, step: int, loss: float) -> None:
        """Print a validation loss."""
        self.note(f"step {step}: validation loss {loss:.4f}")

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            say(line)

    def _start_bar(self, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[line]}")
        self._bar = Bar(*columns, console=Console(stderr=True, soft_wrap=True))
        self._task = self._bar.add_task("", total=self._total, completed=step, line="")
        self._bar.start()


def description(training: "AnyTraining") -> list[str]:
    """Describe a run before it starts, defaults included."""
    settings, data, size = training.settings, training.data, training.size
    rows = settings.batch_size * settings.accumulation
    device = f"{training.device_name}, threads {training.plan.identity()['environment']['threads']}"
    return [
        f"model: {settings.model}, {settings.dtype} on {device}, weights {size.n_bytes / 1e6:.1f} MB; "
        f"training {size.n_trained:,} parameters, {size.n_frozen:,} frozen (r {settings.r}, alpha {settings.alpha:g}, "
        f"{len(training.plan.initial.targets)} matrices)",
        f"data: {settings.data}, {data.train.n_tokens:,} tokens, {data.train.n_trained:,} of them in the loss, at most "
        f"{data.settings.max_length} in one row",
        f"steps: {training.total_steps} of {rows} rows ({settings.batch_size} x {settings.accumulation}), rate "
        f"{settings.lr:.2e} {settings.schedule}, {settings.warmup_for(training.total_steps)} of them warm-up",
        *_memory(training),
        *training.plan.notes,
    ]


def _memory(training: "AnyTraining") -> list[str]:
    """Describe the memory of the largest step, with the parts that options change."""
    need = training.memory
    if need is None:
        return []
    parts = f"{need.now / 1e9:.2f} now, {need.activations / 1e9:.2f} activations, {need.logits / 1e9:.2f} logits"
    return [f"memory: about {need.peak / 1e9:.2f} GB at the peak of a step of {need.n_tokens:,} tokens ({parts})"]


_ROWS, _CHARACTERS = 50, 400  # number of rows that are searched; most characters of a question
_BEGINNING = 4  # words or tokens of a text to use as a prompt


def try_it(model: str, data: str, adapter: Path) -> str:
    """Write a command, quoted for a shell, that runs an adapter on the first short question of its data.

    A model without a tokenizer cannot be asked a question; the command then evaluates the adapter on the data.
    """
    opened = OpenModel(open_weights(find(model)))
    if not has_vocabulary(opened.weights.source):
        return shlex.join(["llorch", "lora", "eval", model, str(adapter), "--data", data])
    records = islice(read_records(find_splits(find_data(data))["train"]), _ROWS)
    questions = (_find_question(formats.parse(record, formats.format_of(record)), opened) for record in records)
    question = next(filter(None, questions), ["Once upon a time"])
    return shlex.join(["llorch", "run", model, *question, "--adapter", str(adapter)])


def _find_question(row: formats.Parsed, model: OpenModel) -> list[str]:
    """Return the question of a row as arguments; empty if it is no short text."""
    match row:
        case formats.Instruction():
            return _find_question(row.chat if model.chat_templates or row.plain is None else row.plain, model)
        case formats.Chat():
            first, second = [*row.messages, {}][:2]
            system, user = (first, second) if first["role"] == "system" else ({}, first)
            options = {"--chat": user, "--system": system} if user.get("role") == "user" else {}
            texts = {option: str(message["content"]) for option, message in options.items() if message}
            return [f"{option}={text}" for option, text in texts.items()] if all(map(_is_short, texts.values())) else []
        case formats.PromptCompletion():
            text = row.prompt or _beginning(row.completion)
        case formats.Text():
            text = _beginning(row.text)
        case formats.LearnedTokens():
            text = model.tokenizer.decode(row.ids[:_BEGINNING])
    return [text] if _is_short(text) and not text.startswith("-") else []


def _beginning(text: str) -> str:
    return " ".join(text.split()[:_BEGINNING])


def _is_short(text: str) -> bool:
    return 0 < len(text) <= _CHARACTERS and text.replace("\n", " ").isprintable()

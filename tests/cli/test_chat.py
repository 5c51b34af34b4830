"""`llorch chat` as a script and on a terminal."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders.chat_models import LLAMA_3, chat_folder
from helpers.command_line import REPOSITORY, invoke
from helpers.interrupts import heed_interrupts
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.cli.chat import _harmless, _remembered_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models") / "story", "story", LLAMA_3)


SILENCE = 300.0  # seconds after which a text that a test waits for is missing


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, process: subprocess.Popen, end: int) -> None:
        self.process, self._end, self.seen = process, end, ""

    def type(self, text: str, prompt: str = "> ") -> None:
        self.until(prompt)
        os.write(self._end, text.encode())

    def until(self, text: str) -> str:
        """Return the output before a text; the test fails if nothing new comes for `SILENCE` seconds."""
        while text not in self.seen:
            assert select.select([self._end], [], [], SILENCE)[0], f"no {text!r} in {self.seen!r}"
            try:
                data = os.read(self._end, 4096)
            except OSError:  # Linux, when the process has ended
                data = b""
            assert data, self.seen
            self.seen += data.decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before


@contextmanager
def terminal(state: Path, *args: str) -> Iterator[Terminal]:
    """Run `llorch chat` as somebody does."""
    pty = pytest.importorskip("pty", reason="NOT RUN: no pseudo-terminals here")
    ours, theirs = pty.openpty()
    environment = os.environ | {"LLORCH_STATE": str(state), "TERM": "dumb"}
    words = [sys.executable, "-m", "llorch", "chat", *args]
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY, env=environment, start_new_session=True,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_on_a_terminal_an_answer_can_be_stopped_and_mistakes_are_survived(folder: Path, tmp_path: Path):
    with terminal(tmp_path / "state", str(folder), "-n", "480", "-t", "1") as screen:
        screen.type("/nonsense\n")
        screen.until("llorch: ")
        assert "/nonsense" in screen.until("\r\n")
        screen.type("Once upon\\\n")
        screen.type("a time\n", prompt="... ")
        screen.until("\r\n")
        while not screen.seen.strip():  # the answer begins
            screen.seen += os.read(screen._end, 64).decode("utf-8", "replace")
        screen.process.send_signal(signal.SIGINT)
        screen.until("stopped")
        screen.type("/history\n")
        screen.until("1 user: Once upon\\na time")
        screen.until("2 assistant: ")
        screen.type("\x04")
        assert screen.process.wait(timeout=60) == 0
    lines = (tmp_path / "state/chat_history").read_text()
    assert "a time" in lines
    assert (tmp_path / "state/chat_history").stat().st_mode & 0o777 == 0o600


def test_lines_of_earlier_conversations_come_back(folder: Path, tmp_path: Path):
    for first in ("/set temperature 0.5\n", "\x1b[A\n"):  # the arrow up
        with terminal(tmp_path, str(folder)) as screen:
            screen.type(first)
            assert "temperature=0.5" in screen.until("top_k")
            screen.type("\x04")
            assert screen.process.wait(timeout=60) == 0


def test_lines_that_cannot_be_kept_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("readline", reason="NOT RUN: Python has no readline")
    (tmp_path / "home").touch()
    monkeypatch.setenv("LLORCH_STATE", str(tmp_path / "home" / "state"))
    with _remembered_lines():
        pass
    out, note = capsys.readouterr()
    assert out == ""
    assert_tells(note, tmp_path / "home", "chat_history", "LLORCH_STATE")


def test_a_line_that_ends_with_a_backslash_goes_on_and_two_slashes_are_said(folder: Path):
    done = invoke("chat", str(folder), "-n", "2", stdin="one\\\n\\\nthree\n\n//help\n/history\n")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "1 user: one\\n\\nthree" in lines
    assert "3 user: /help" in lines


def test_the_answer_is_that_of_run(folder: Path):
    said = invoke("run", str(folder), "--chat", "Hello <|eot_id|>", "--system", "Be brief.", "-n", "9").stdout
    done = invoke("chat", str(folder), "--system", "Be brief.", "-n", "9", stdin="Hello <|eot_id|>\n")
    assert (done.stdout, done.exit_code) == (said, 0)
    assert done.stderr.startswith("story: 512 tokens of context, ")
    on_torch = ("-n", "9", "--backend", "torch")
    torch = invoke("chat", str(folder), "--system", "Be brief.", *on_torch, stdin="Hello <|eot_id|>\n")
    assert (torch.stdout, torch.exit_code) == (said, 0)


@pytest.mark.parametrize("model", [(), ("story",)], ids=["default", "named"])
def test_the_built_in_model_has_no_chat_template_which_is_said_and_goes_on_with_the_text(model: tuple[str, ...]):
    done = invoke("chat", *model, "-n", "9", stdin="Once upon\n")
    assert (done.stdout, done.exit_code) == (invoke("run", "story", "Once upon", "-n", "9").stdout, 0)
    assert done.stderr.startswith("story (no chat template: ")
    assert_tells(done.stderr, 512)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--any-base"], ("--any-base", "--adapter")),
        (["--dtype", "float32", "--numerics", "ggml"], ("--numerics ggml", "--backend numpy")),
        (["-t", "-1"], ("temperature", "-1.0")),
    ],
)
def test_options_that_mean_nothing_are_refused(folder: Path, options: list[str], problem: tuple[str, ...]):
    assert_cli_refuses(invoke("chat", str(folder), *options), 2, *problem)


def test_what_would_steer_the_terminal_is_shown_as_text():
    assert _harmless("a\x1b[2Jb\n\tc\u202e\x07é") == "a\\x1b[2Jb\n\tc\\u202e\\x07é"

"""`llorch chat` as a script and on a terminal."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_models import CHATML, LLAMA_3, chat_folder, chat_model
from builders.random_adapters import random_adapter
from helpers.command_line import REPOSITORY, invoke
from helpers.interrupts import heed_interrupts
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

from llorch import load_torch
from llorch.cli.chat import _escape_controls, _line_history
from llorch.cli.chat_session import ChatSession
from llorch.cli.slash_commands import COMMANDS
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.generate import Token
from llorch.model.model import Model, load
from llorch.ops.sampling import SamplingSettings


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
    with _line_history():
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


def test_control_characters_are_shown_as_text():
    assert _escape_controls("a\x1b[2Jb\n\tc\u202e\x07é") == "a\\x1b[2Jb\n\tc\\u202e\\x07é"


def typed(folder: Path, *lines: object, options: tuple[str, ...] = ()) -> tuple[list[str], str, int]:
    """Lines of stdout, stderr and the exit code."""
    done = invoke("chat", str(folder), "-n", "8", *options, stdin="".join(f"{line}\n" for line in lines))
    return done.stdout.splitlines(), done.stderr, done.exit_code


def test_save_and_load_keep_the_messages(folder: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    (answer, said), _, code = typed(folder, "Hello <|eot_id|>", f"/save {file}")
    assert (said, code) == (f"wrote 2 messages to {file}", 0)
    messages = [{"role": "user", "content": "Hello <|eot_id|>"}, {"role": "assistant", "content": answer}]
    assert json.loads(file.read_text()) == messages
    out, _, _ = typed(folder, f"/load {file}", "/history")
    assert out == ["2 messages", "1 user: Hello <|eot_id|>", f"2 assistant: {answer}"]
    file.write_text(json.dumps(messages[:1]))
    assert typed(folder, f"/load {file}")[0] == [answer]  # the user has the last word: it is answered
    assert typed(folder, "/retry", options=("--history", str(file)))[0] == [answer]


def test_an_earlier_message_is_written_anew_and_what_came_after_is_gone(folder: Path):
    (_, _, third, *rest), _, _ = typed(folder, "Once upon", "The fox", "/edit 1 The dog", "/history")
    assert rest == ["1 user: The dog", f"2 assistant: {third}"]
    assert typed(folder, "The dog")[0] == [third]
    out, _, _ = typed(folder, "Once upon", "/edit 2 Yes.", "/history", "The fox")
    assert out[1:4] == ["2 messages", "1 user: Once upon", "2 assistant: Yes."]


def test_undo_takes_the_last_turn_and_retry_the_last_answer(folder: Path):
    out, _, _ = typed(folder, "Once upon", "The fox", "/undo", "/history")
    assert out[2:] == ["2 messages", "1 user: Once upon", f"2 assistant: {out[0]}"]
    same, other = (typed(folder, "Once upon", "/retry", options=how)[0] for how in ((), ("-t", "1.5")))
    assert same[0] == same[1]
    assert other[0] != other[1]


def test_the_system_message_comes_first_and_can_go(folder: Path):
    out = typed(folder, "Hi", "/system Be brief.", "/history", "/system Be kind.", "/history", "/system", "/history")[0]
    assert out[2] == "1 system: Be brief."
    assert out[3] == "2 user: Hi"
    assert [line for line in out if "system:" in line] == ["1 system: Be brief.", "1 system: Be kind."]
    with_option, _, _ = typed(folder, "/history", options=("--system", "Be brief."))
    assert with_option == ["1 system: Be brief."]


def test_settings_are_shown_and_changed(folder: Path):
    out, _, _ = typed(folder, "/set", "/set temperature 0.8", "/set top_k 5", "/set max_tokens 3", "Once")
    assert "temperature=0.0 top_k=0" in out[0]
    assert "temperature=0.8 top_k=5" in out[3]
    assert out[3].endswith("max_tokens=3")
    assert load(folder).tokenizer.encode(out[4]) != []


def test_stats_tell_rates_and_the_context(folder: Path):
    out, _, _ = typed(folder, "/stats", "Once upon", "/stats", "The fox", "/stats")
    assert_tells(out[0], "0 of 512")
    assert_tells(out[2], "(0 of", "wrote 8, 7")
    words = out[4].replace("(", "").split()
    assert 0 < int(words[3]) < int(words[1])


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_a_trace_has_every_stage_of_the_conversation(folder: Path, tmp_path: Path, ending: str):
    file = tmp_path / f"talk{ending}"
    out, _, _ = typed(folder, "Once upon", f"/trace {file}")
    assert out[1].startswith("wrote 98 stages of ")
    assert file.is_file()
    if ending == ".npz":
        model, arrays = load(folder), np.load(file)
        messages = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": out[0]}]
        text, _ = model.chats.conversation(messages).text(2)
        expected = model.forward(model.tokenizer.encode(text, add_special=False, parse_special=True))
        np.testing.assert_array_equal(arrays["logits"], expected)


def test_an_adapter_can_be_put_on_and_off(folder: Path, tmp_path: Path):
    model = load(folder)
    write_peft(random_adapter(model.config, lora_alpha=1.0), tmp_path / "peft", base=identity_of(model.weights))
    out, _, _ = typed(folder, "Once", f"/adapter {tmp_path / 'peft'}", "/retry", "/adapter none", "/retry")
    assert out[1].startswith(f"{tmp_path / 'peft'}: base: the same ")
    assert out[3].startswith("none: ")
    assert out[0] == out[4] != out[2]
    assert typed(folder, "Once", options=("--adapter", str(tmp_path / "peft")))[0] == [out[2]]


def test_help_names_every_command(folder: Path):
    out, _, _ = typed(folder, "/help")
    assert [line.split()[0] for line in out] == [f"/{name}" for name in COMMANDS]


def test_quit_ends(folder: Path):
    assert typed(folder, "/quit", "/nonsense") == ([], typed(folder)[1], 0)


MISTAKES: dict[str, tuple[object, ...]] = {
    "/sav x": ("/sav;", "'save'", "/help"), "/": ("/;", "/help"),
    "/save": ("file", "none"), "/save nowhere/x": ("nowhere/x",), "/load nowhere.json": ("nowhere.json",),
    "/trace x.txt": (".npz", ".safetensors", "'x.txt'"), "/trace x.npz": ("trace", "message"),
    "/edit 1 x": ("chat", "message"), "/edit": ("chat", "message"),
    "/undo": ("message", "none"), "/retry": ("message", "none"),
    "/set temperat 1": ("'temperat'", "'temperature'"),
    "/set temperature hot": ("temperature", "number", "'hot'"), "/set top_p 2": ("sampling: top_p", "2.0"),
    "/set max_tokens 0": ("max_tokens", 1, 0), "/set top_k 1.5": ("top_k", "integer", "'1.5'"),
    "/adapter nowhere": ("nowhere: ", "adapter"), "/adapter": ("file", "none"),
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_the_end_of_a_script(folder: Path, line: str):
    out, err, code = typed(folder, line, "/help")
    assert (out, code in (2, 3)) == ([], True)
    _, mistake = err.splitlines()  # behind what the model is
    assert_tells(mistake, *MISTAKES[line])


TURNS = ("Hello <|eot_id|> there", "And then the fox", "Why?")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Attention alone, and with delta nets."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "attention": chat_model(folder / "story", "story", LLAMA_3),
        "delta": chat_model(folder / "next", "micro-qwen3-next", CHATML),
    }


def talk(model: Model, **settings: float) -> ChatSession:
    return ChatSession(model, [], SamplingSettings(**settings), max_tokens=12)  # type: ignore[arg-type]


def text(tokens: Iterator[Token]) -> str:
    return "".join(token.text for token in tokens)


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_every_answer_is_that_of_a_model_that_remembers_nothing(models: dict[str, Model], kind: str):
    one = talk(models[kind])
    for turn in TURNS:
        said = text(one.say(turn))
        assert said == text(models[kind].generate(messages=one.messages[:-1], max_tokens=12))
    changed: list[dict[str, object]] = [{"role": "user", "content": "Hello and goodbye"}]  # begins as the first one did
    actual = [token.logprob for token in one.answer(changed)]
    expected = [token.logprob for token in models[kind].generate(messages=changed, max_tokens=12)]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_common_prefix_of_turns_is_computed_once(models: dict[str, Model]):
    one = talk(models["attention"])
    cached = []
    for turn in TURNS:
        before = len(one.ids()) if one.messages else 0
        text(one.say(turn))
        assert one.counted is not None
        cached.append(before - one.counted.n_cached)
    assert cached[0] == 0
    assert all(0 < rest < 5 for rest in cached[1:])  # the end of the turn, and a token that was written otherwise
    text(one.answer(one.messages[:1]))
    assert one.counted is not None
    assert one.counted.n_cached == one.counted.n_prompt - 1  # the last token is run


def test_an_adapter_remembers_nothing_of_the_base(models: dict[str, Model], tmp_path: Path):
    model = models["attention"]
    write_peft(random_adapter(model.config, lora_alpha=1.0), tmp_path / "peft", base=identity_of(model.weights))
    one = talk(model)
    text(one.say(TURNS[0]))
    assert "base: the same" in one.use_adapter(tmp_path / "peft")
    actual = text(one.answer(one.messages[:1]))
    assert one.counted is not None
    assert one.counted.n_cached == 0
    assert actual == text(model.generate(messages=one.messages[:1], max_tokens=12, adapter=one.adapter))
    assert actual != text(model.generate(messages=one.messages[:1], max_tokens=12))
    assert one.use_adapter(None) == "the base alone"
    assert text(one.answer(one.messages[:1])) == text(model.generate(messages=one.messages[:1], max_tokens=12))


def test_an_answer_that_is_given_up_counts_as_far_as_it_went(models: dict[str, Model]):
    one = talk(models["attention"])
    tokens = one.say("Once upon a time")
    heard = next(tokens).text + next(tokens).text + next(tokens).text
    tokens.close()  # type: ignore[attr-defined]
    assert one.messages[1:] == [{"role": "assistant", "content": heard}]
    said = text(one.say("go on"))
    assert said == text(models["attention"].generate(messages=one.messages[:-1], max_tokens=12))


def test_another_try_has_other_draws_and_a_conversation_can_be_repeated(models: dict[str, Model]):
    one, again = (talk(models["attention"], temperature=1.5, seed=3) for _ in range(2))
    first = text(one.say("Hello"))
    second = text(one.answer(one.messages[:1]))
    assert first != second
    assert (text(again.say("Hello")), text(again.answer(again.messages[:1]))) == (first, second)


def test_chat_session_refused_message_keeps_the_conversation(models: dict[str, Model]):
    one = talk(models["attention"])
    text(one.say("Hello"))
    before = list(one.messages)
    with refuses(ValueError, "context", 512):
        one.say("fox " * 600)
    with refuses(ValueError, expected="user"):
        one.answer(one.messages)
    assert one.messages == before


@pytest.mark.parametrize("open_model", [load, load_torch])
def test_without_a_chat_template_the_messages_are_joined_by_blank_lines(open_model: Callable[[str], Any]):
    model = open_model("story")
    one = talk(model)
    first = text(one.say("Once <|eot_id|> upon"))
    assert first == text(model.generate("Once <|eot_id|> upon", max_tokens=12))
    joined = f"Once <|eot_id|> upon\n\n{first}\n\nThe fox"
    assert text(one.say("The fox")) == text(model.generate(joined, max_tokens=12))
    assert model.tokenizer.decode(one.ids()) == f"{joined}\n\n{one.messages[-1]['content']}"


def test_a_chat_template_that_is_none_is_refused_at_once(tmp_path: Path):
    with refuses("TemplateError", tmp_path / "story"):
        talk(chat_model(tmp_path / "story", "story", "{% if %}"))

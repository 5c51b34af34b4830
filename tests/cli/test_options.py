"""Numbers on the command line: no option of any verb takes a value that a library cannot hold."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from builders.chat_models import chat_folder
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

from llorch.cli.lora.settings_options import Pair
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import EVERY
from llorch.training.settings import TrainSettings
from tests.cli.test_help import ALL

NUMBERS = click.types.IntParamType, click.types.FloatParamType
OF_SAMPLING = {"temperature", "top_p", "min_p", "repetition_penalty"}  # ranges that Python users share
FOUND = {  # each number that a command or one of its verbs takes
    f"{path.removeprefix('llorch ')} {param.opts[-1]}": param
    for path, context in ALL.items()
    for param in context.command.params
    if isinstance(param.type, NUMBERS)
}


def test_the_numbers_of_all_verbs_are_found():
    for name in ("run --threads", "run --rank-timeout", "lora train --lr", "quality --context", "learn check --seconds",
                 "serve --timeout", "bench --rounds", "learn museum open number"):  # fmt: skip
        assert name in FOUND
    assert len(FOUND) > 60


@pytest.mark.parametrize("name", FOUND)
def test_an_option_refuses_what_no_library_can_hold(name: str):
    param = FOUND[name]
    for text in ("nan", "inf", "-inf", str(2**64), str(-(2**64))):
        is_float = isinstance(param.type, click.types.FloatParamType)
        if param.name in OF_SAMPLING:
            if text in ("nan", "inf", "-inf"):
                settings: dict[str, Any] = {param.name: float(text)}
                with refuses(ValueError, param.name):
                    SamplingSettings(**settings)
        elif is_float and text.lstrip("-").isdecimal() and getattr(param.type, "max", 0) is None:
            continue  # a float64 holds it
        elif text.startswith("-") and getattr(param.type, "min", 0) is None and not is_float:
            continue  # what computes refuses a negative number, with the range that it has
        else:
            with pytest.raises(click.BadParameter):
                param.type.convert(text, param, None)


@pytest.mark.parametrize(
    "words",
    ["run story x --threads 0", "run story x --threads 18446744073709551616", "run story x --threads 1025",
     "run story x --mesh tp=2 --rank-timeout nan", "run story x --mesh tp=2 --rank-timeout inf",
     "run story x --mesh tp=2 --rank-timeout 1e300", "run story x --mesh tp=2 --rank-timeout 0",
     "serve story --timeout nan", "quality story --text README.md --context -1", "learn check --seconds inf",
     "lora train story --data pirate -o new --alpha nan", "lora train story --data pirate -o new --alpha-pattern q=nan",
     "lora train story --data pirate -o new --rank-pattern q=18446744073709551616", "run story x --seed -1",
     "run story x --top-k -1", "bench --rounds 18446744073709551616"],
)  # fmt: skip
def test_a_command_with_such_a_number_ends_with_exit_code_2(words: str):
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, "Traceback" in result.stderr) == (2, "", False), result.stderr


@pytest.mark.parametrize("name", ["r", "steps", "batch_size", "max_length", "epochs", "keep", "save_every"])
def test_a_settings_file_refuses_such_a_count(name: str):
    counts: dict[str, Any] = {name: 2**64}
    with refuses(ValueError, name, 2**31 - 1, got=2**64):
        TrainSettings(model="story", data="pirate", **counts)


def test_a_number_of_a_pattern_is_one_of_its_kind():
    assert Pair(click.INT).convert("q_proj=8", None, None) == ("q_proj", 8)
    assert_cli_refuses(
        invoke("lora", "train", "story", "--data", "pirate", "-o", "new", "--rank-pattern", "q=1.5"), 2, "'q=1.5'"
    )


TAB = """
source <(llorch completion bash) || exit 9
compopt() { echo "the shell: $1 $2"; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$(complete -p llorch | sed 's/.*-F \\([^ ]*\\).*/\\1/') llorch
printf '%s\\n' "${COMPREPLY[@]}"
"""
LOADED = """
import json, sys
from llorch.cli import main
try:
    main(prog_name="llorch")
finally:
    print([name for name in ("numpy", "torch", "rich", "jinja2", "tokenizers") if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare a working folder with a model, in which the shell finds `llorch`."""
    program = tmp_path / "bin/llorch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llorch "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    home = tmp_path / "home"
    (home / "mine").mkdir(parents=True)
    (home / "mine/config.json").touch()
    for name in ("my.gguf", "notes.txt"):
        (home / name).touch()
    return home


def tab(folder: Path, *words: str) -> list[str]:
    """Return the completions that bash offers for the last word."""
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", "llorch", *words], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow_cases(but=["words7-offered7", "words10-offered10", "words13-offered13"])
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("insp",), ["inspect"]),
        (("lora", "ver"), ["verify-resume"]),
        (("learn", "ch"), ["check"]),
        (("run", "--temper"), ["--temperature"]),
        (("lora", "train", "--dor"), ["--dora"]),  # which --help leaves out
        (("run", "sto"), ["story"]),
        (("lora", "merge", "micro-llama"), ["micro-llama", "micro-llama3", "micro-llama4"]),
        (("diagnose", "dump", "--model", "micro-m"), ["micro-ministral3", "micro-mistral"]),
        (("verify", "story", "m"), [*(name for name in EVERY if name.startswith("m")), "mine", "my.gguf"]),
        (("run", "--backend", "t"), ["torch"]),
        (("run", "notes"), ["the shell: -o default", ""]),
        (("run", "story", "--adapter", "x"), ["the shell: -o default", ""]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("tokenize", ""), [*EVERY, "mine", "my.gguf"]),  # before anything is typed
    ],
)
def test_a_word_is_completed(words: tuple[str, ...], offered: list[str], folder: Path):
    assert tab(folder, *words) == offered


@pytest.mark.parametrize("line", ["llorch ", "llorch run ", "llorch verify --", "llorch learn "])
def test_nothing_heavy_is_loaded_for_it(line: str):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - line.endswith("--"))}
    env = os.environ | words | {"_LLORCH_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, env=env)
    assert done.stderr == "[]\n"
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef llorch"), ("fish", "function _llorch_completion;")])
def test_other_shells_have_scripts_of_their_own(shell: str, line: str):
    done = invoke("completion", shell)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, line)
    assert f"_LLORCH_COMPLETE={shell}_complete" in done.stdout


def test_another_shell_is_a_usage_error():
    assert invoke("completion", "cmd").exit_code == 2


# The date, a word if the variable asks for it, and the messages.
DATED = (
    "{{ strftime_now('%d %b %Y') }}{% if loud is defined and loud %} LOUD{% endif %}\n"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
)
ARGUMENTS = ("--template-date", "2024-02-29", "--chat-template-kwargs", '{"loud": true}')


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "model", "micro-qwen3", DATED)


@pytest.fixture
def data(tmp_path: Path) -> str:
    chats = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}] * 4
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    return str(tmp_path / "train.jsonl")


def test_data_show_writes_the_date_and_the_variable(dated: Path, data: str):
    shown = invoke("data", "show", str(dated), data, "-n", "1", *ARGUMENTS).stdout
    assert "29 Feb 2024 LOUD<|im_start|>Hi<|im_end|>" in shown
    assert "29 Feb 2024" not in invoke("data", "show", str(dated), data, "-n", "1").stdout


def test_run_answers_what_the_template_makes_of_date_and_variable(dated: Path):
    def run_chat(*options: str) -> str:
        result = invoke("run", str(dated), "--chat", "Hi", "-n", "12", "--json", *options)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert run_chat(*ARGUMENTS) == run_chat(*ARGUMENTS)
    assert run_chat(*ARGUMENTS) != run_chat("--template-date", "2024-02-29")
    assert run_chat(*ARGUMENTS) != run_chat("--template-date", "1999-12-31", *ARGUMENTS[2:])


def test_chat_takes_both_options(dated: Path):
    result = invoke("chat", str(dated), "-n", "4", *ARGUMENTS, stdin="Hi\n")
    assert result.exit_code == 0, result.stderr


def test_a_training_run_keeps_its_date_and_goes_on_with_it(dated: Path, data: str, tmp_path: Path):
    small = ("--r", "2", "--batch-size", "2", "--save-every", "1", "--max-length", "32")
    first = invoke("lora", "train", str(dated), "--data", data, "-o", str(tmp_path / "run"), *small, "--steps", "1",
                   *ARGUMENTS)  # fmt: skip
    assert first.exit_code == 0, first.stderr
    kept = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert (kept["template_date"], kept["chat_template_kwargs"]) == ("2024-02-29", {"loud": True})
    again = ("lora", "train", "-o", str(tmp_path / "run"), "--resume")
    more = invoke(*again, "--steps", "2")
    assert more.exit_code == 0, more.stderr
    other = invoke(*again, "--steps", "3", "--template-date", "2024-03-01")
    assert_tells(other.stderr, "settings.template_date", "2024-02-29", "2024-03-01")
    assert other.exit_code != 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--template-date", "29.02.2024"), ("--template-date", "2023-02-29"), ("--chat-template-kwargs", "[1]"),
        ("--chat-template-kwargs", "{"), ("--chat-template-kwargs", '{"messages": []}'),
    ],
)  # fmt: skip
def test_values_without_meaning_are_refused(dated: Path, option: str, value: str):
    result = invoke("run", str(dated), "--chat", "Hi", option, value)
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert_tells(result.stderr, "messages" if "messages" in value else value)

"""Completion, asked for by a real bash as it asks when somebody types TAB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY, invoke

from llorch.runtime.builtin import EVERY

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
    """Where the shell is, with a model of one's own, and with `llorch` among its programs."""
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
    """What bash offers for the last word."""
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
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=REPOSITORY,
        env=os.environ | words | {"_LLORCH_COMPLETE": "bash_complete"},
    )  # fmt: skip
    assert done.stderr == "[]\n"
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef llorch"), ("fish", "function _llorch_completion;")])
def test_other_shells_have_scripts_of_their_own(shell: str, line: str):
    done = invoke("completion", shell)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, line)
    assert f"_LLORCH_COMPLETE={shell}_complete" in done.stdout


def test_another_shell_is_a_usage_error():
    assert invoke("completion", "cmd").exit_code == 2

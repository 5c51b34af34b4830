"""The golden table of messages: each command line of `messages.toml` ends with exactly the line beside it.

How to update the table after a change of wording stands in its header.
"""

import shlex
import tomllib
from pathlib import Path

import pytest
from helpers.command_line import invoke

from llorch.runtime.builtin import EVERY, builtin_path

TABLE = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))["message"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(builtin_path("micro-llama").read_bytes()[:3000])
    (tmp_path / "text.gguf").write_text("this is no model")
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "text.txt").write_text("Once upon a time")
    for name in ("empty.gguf", "empty.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("message", TABLE, ids=lambda message: message["command"])
def test_command_that_cannot_be_done_ends_with_the_line_of_the_table(message: dict, folder: Path):
    files = sorted(folder.iterdir())
    result = invoke(*shlex.split(message["command"].format(folder=folder, models="")))
    assert (result.exit_code, result.stdout) == (message["exit_code"], ""), result.exception
    line = message["line"].format(folder=folder, models=", ".join(EVERY))
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stderr
    assert sorted(folder.iterdir()) == files


def test_no_command_stands_twice_in_the_table():
    commands = [message["command"] for message in TABLE]
    assert len(commands) == len({*commands})

"""What training prints last: a command that works, and shows what was learned."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from chat_models import CHATML, chat_folder
from command_line import invoke

from llorch.cli.lora.hint import try_it

CHAT = [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "me"}]
SYSTEM = {"role": "system", "content": "Be brief."}
LONG = {"role": "user", "content": "x" * 500}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "a model", "micro-qwen2", CHATML)


def written(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([{"text": "One two three four five."}], ["One two three four"]),
        ([{"prompt": "Ask:\n", "completion": "x"}], ["Ask:\n"]),
        ([{"prompt": "", "completion": "one two"}], ["one two"]),
        ([{"messages": CHAT}], ["--chat=Who's there?"]),
        ([{"messages": [SYSTEM, *CHAT]}], ["--chat=Who's there?", "--system=Be brief."]),
        ([{"messages": [LONG, CHAT[1]]}, {"messages": CHAT}], ["--chat=Who's there?"]),
        ([{"instruction": "Say", "output": "it"}], ["--chat=Say"]),
        ([{"text": "\u001b[2J"}, {"text": "-n 5 six"}], ["Once upon a time"]),
    ],
)
def test_the_first_short_question_of_the_data_is_asked(rows: list[dict], want: list[str], folder: Path, tmp_path: Path):
    words = shlex.split(try_it(str(folder), written(tmp_path / "rows.jsonl", *rows), tmp_path / "my adapter"))
    assert words == ["llorch", "run", str(folder), *want, "--adapter", str(tmp_path / "my adapter")]


def test_token_ids_and_models_without_a_template_are_asked_in_plain_text(tmp_path: Path):
    ids = [998, 302, 401, 500]
    (asked,) = shlex.split(try_it("story", written(tmp_path / "a", {"input_ids": ids}), tmp_path))[3:-2]
    assert asked
    assert not asked.startswith("-")
    asked = shlex.split(try_it("story", written(tmp_path / "b", {"instruction": "Say", "output": "it"}), tmp_path))[3]
    assert "### Instruction:\nSay" in asked


def test_the_command_that_training_on_chats_prints_says_what_was_learned(folder: Path, tmp_path: Path):
    data = written(tmp_path / "chats.jsonl", {"messages": [SYSTEM, *CHAT]})
    how = ("--steps", "40", "--lr", "0.02", "--r", "4", "--schedule", "constant")
    made = invoke("lora", "train", str(folder), "--data", data, "-o", str(tmp_path / "mine"), *how)
    assert made.exit_code == 0, made.stderr
    command = shlex.split(made.stdout.rpartition("try it with: ")[2])
    answer = invoke(*command[1:], "--json")
    tokens = [json.loads(line) for line in answer.stdout.splitlines()]
    assert ("".join(token["text"] for token in tokens), tokens[-1]["finish"]) == ("me", "eos")

"""`--template-date` and `--chat-template-kwargs` of every verb that renders a chat template."""

import json
from pathlib import Path

import pytest
from builders.chat_models import chat_folder
from helpers.command_line import invoke
from helpers.refusals import assert_tells

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
    def said(*options: str) -> str:
        result = invoke("run", str(dated), "--chat", "Hi", "-n", "12", "--json", *options)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert said(*ARGUMENTS) == said(*ARGUMENTS)
    assert said(*ARGUMENTS) != said("--template-date", "2024-02-29")
    assert said(*ARGUMENTS) != said("--template-date", "1999-12-31", *ARGUMENTS[2:])


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

"""`llorch data show`."""

import json
from pathlib import Path

import pytest
from builders.chat_models import CHATML, chat_folder
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

MESSAGES = [
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "Hello\u001b[31m!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "So."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": "The fox", "completion": f" ran {n}."}) + "\n" for n in range(5))
    )
    (tmp_path / "valid.jsonl").write_text('{"text": "It rained."}\n')
    return tmp_path


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "model", "micro-qwen3", CHATML)


def test_the_built_in_data_can_be_shown():
    result = invoke("data", "show", "story", "pirate", "-n", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("train.jsonl:1: ")


def test_tokens_in_the_loss_stand_in_brackets(folder: Path):
    result = invoke("data", "show", "story", str(folder), "-n", "2")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "train.jsonl:1: 8 tokens, 5 learned\n<|begin_of_text|>The fox[[ ran 0.<|end_of_text|>]]\n\n"
        "train.jsonl:2: 8 tokens, 5 learned\n<|begin_of_text|>The fox[[ ran 1.<|end_of_text|>]]\n\n"
        "train: 5 examples, 40 tokens, 25 learned (62.5%)\n"
    )
    assert "longest: 8 tokens (train.jsonl:1); mean 8.0\n" in result.stdout
    train, valid = result.stderr.splitlines()
    assert_tells(train, "train.jsonl: 5", "prompt", "completion", "5 examples")
    assert_tells(valid, "valid.jsonl: 1", "text", "1 examples")
    asked = invoke("data", "show", "story", str(folder), "--max-length", "1024")
    assert_tells(asked.stderr.splitlines()[0], "max_length", 512)


def test_turns_of_a_conversation_show_and_odd_characters_do_no_harm(chatting: Path, tmp_path: Path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    out = invoke("data", "show", str(chatting), str(tmp_path / "c.jsonl")).stdout
    assert "[[Hello\\x1b[31m!<|im_end|>]]\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[[So.<|im_e" in out
    out = invoke("data", "show", str(chatting), str(tmp_path / "c.jsonl"), "--train-on", "last").stdout
    assert "[[So.<|im_end|>]]" in out
    assert "[[Hello" not in out


def test_json_has_ids_labels_and_pieces(chatting: Path, tmp_path: Path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    found = json.loads(invoke("data", "show", str(chatting), str(tmp_path / "c.jsonl"), "--json").stdout)
    (shown,) = found["shown"]
    assert len(shown["ids"]) == len(shown["labels"]) == shown["tokens"] == found["tokens"]
    assert sum(label != -100 for label in shown["labels"]) == shown["learned"] == found["learned"]
    assert found["longest"] == {"tokens": shown["tokens"], "source": "c.jsonl:1"}
    assert found["packed"] == {"room": 1024, "rows": 1, "fill": shown["tokens"] / 1024}
    learned = [piece["text"] for piece in shown["pieces"] if piece["learned"] and not piece["control"]]
    assert learned == ["Hello\x1b[31m!", "So."]
    # The user's <|im_end|> is text, the template's are not.
    controls = [piece["text"] for piece in shown["pieces"] if piece["control"]]
    assert controls == ["<|im_start|>", "<|im_end|>"] * 4
    assert "".join(piece["text"] for piece in shown["pieces"]).count("<|im_end|>") == 5


def test_a_terminal_gets_colours_unless_it_does_not_want_any(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = invoke("data", "show", "story", str(folder), "-n", "1").stdout
    assert "\x1b[1;32m ran 0.\x1b[0m" in out
    assert "[[" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "fox[[ ran 0.<|end_of_text|>]]" in invoke("data", "show", "story", str(folder), "-n", "1").stdout


def test_first_token_is_never_in_the_loss(tmp_path: Path):
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [33, 34, 35]}\n')
    found = json.loads(invoke("data", "show", "story", str(tmp_path / "ids.jsonl"), "--json").stdout)
    assert found["shown"][0]["labels"] == [-100, 34, 35]
    assert [piece["learned"] for piece in found["shown"][0]["pieces"]] == [False, True]


def test_a_split_can_be_chosen(folder: Path):
    out = invoke("data", "show", "story", str(folder), "--split", "valid").stdout
    assert "valid.jsonl:1: 6 tokens, 5 learned\n<|begin_of_text|>[[It rained.<|end_of_text|>]]" in out
    result = invoke("data", "show", "story", str(folder), "--split", "test")
    assert_cli_refuses(result, 3, folder, "test.jsonl")


def test_examples_may_be_left_out(folder: Path):
    out = invoke("data", "show", "story", str(folder), "-n", "0", "--max-length", "6").stdout
    assert out.splitlines()[0] == "train: 5 examples, 30 tokens, 15 learned (50.0%)"


def test_a_bad_row_is_one_line_on_stderr(folder: Path):
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": }\n')
    result = invoke("data", "show", "story", str(folder))
    assert_cli_refuses(result, 2, f"llorch: {folder}/train.jsonl:2: Malformed: ", "JSON", "(column 10)")
    assert result.stderr.count("\n") == 1


def test_help_needs_no_model_and_says_the_formats():
    page = invoke("data", "show", "--help").stdout
    assert "llorch data show story path/to/train.jsonl" in page
    for word in ("prompt and completion", "messages", "ShareGPT", "Alpaca", "input_ids"):
        assert word in page.replace("\n  ", " ")


def test_a_template_that_never_ends_is_a_line_with_both_files(tmp_path: Path):
    model = chat_folder(tmp_path / "model", "micro-qwen3", "{{ 9 ** (9 ** 9) }}")
    rows = tmp_path / "c.jsonl"
    rows.write_text(json.dumps({"messages": MESSAGES}))
    result = invoke("data", "show", str(model), str(rows))
    assert_cli_refuses(result, 2, f"llorch: {rows}:1: TemplateBudget: ", model, "1 s", "chat_template.jinja")

"""The text part of a model that sees: tokens that stand for an image are no text, and are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.chat_models import CHATML, chat_folder
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

import llorch

ASKED = [{"role": "user", "content": "Where is the fox?"}]
OF_IMAGE = "<|endoftext|>"  # the vocabulary has none of its own for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL whose template shows an image to a conversation with a system message."""
    template = "{% if messages[0].role == 'system' %}" + OF_IMAGE + "{% endif %}" + CHATML
    folder = chat_folder(tmp_path_factory.mktemp("seeing") / "model", "micro-qwen3", template)
    config = json.loads((folder / "config.json").read_text())
    (token_id,) = llorch.load(folder).tokenizer.encode(OF_IMAGE, add_special=False, parse_special=True)
    whole = {
        "model_type": "qwen3_vl",
        "text_config": config | {"model_type": "qwen3_vl_text"},
        "image_token_id": token_id,
        "video_token_id": 10**6,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture(params=["numpy", "torch"])
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    return llorch.load(folder) if request.param == "numpy" else llorch.load_torch(folder)


def test_ids_of_an_image_are_refused_with_their_place_and_all_others_run(model: Any):
    assert model.config.family == "qwen3_vl"
    (token_id,) = model.tokenizer.encode(OF_IMAGE, add_special=False, parse_special=True)
    with refuses(ValueError, token_id, "index 2", "image_token_id", "config.json", where="generate"):
        model.generate([5, 6, token_id], max_tokens=1)
    assert len(list(model.generate([5, 6, token_id - 1], max_tokens=2, ignore_eos=True))) == 2
    assert model.forward([5, 6, token_id]).shape[0] == 3  # the numbers of the text part are those of any token


def test_its_name_in_a_text_is_text(model: Any):
    assert len(list(model.generate(f"The {OF_IMAGE} fox", max_tokens=2, ignore_eos=True))) == 2


def test_the_command_says_so_in_one_line(folder: Path, tmp_path: Path):
    asked = invoke("run", str(folder), "--chat", "Where is it?", "-n", "2")
    shown = invoke("run", str(folder), "--chat", "Where is it?", "--system", "Look.", "-n", "2")
    assert (asked.exit_code, shown.exit_code, shown.stdout) == (0, 2, "")
    assert_tells(shown.stderr, "llorch: generate:", "image_token_id")
    assert shown.stderr.count("\n") == 1
    parts = [{"role": "user", "content": [{"type": "image", "image": "fox.png"}, {"type": "text", "text": "Where?"}]}]
    (tmp_path / "history.json").write_text(json.dumps(parts))
    result = invoke("run", str(folder), "--history", str(tmp_path / "history.json"))
    assert_cli_refuses(result, 2, where="history[0].content[0].type", got="'image'")
    assert result.stderr.count("\n") == 1

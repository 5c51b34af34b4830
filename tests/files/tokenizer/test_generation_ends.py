"""The tokens at which `generate` of transformers stops, read from a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.chat_models import CHATML, NO_END, chat_folder

from llorch.files.tokenizer.generation_ends import GENERATION, chat_ends, unnamed_ends, with_ends

END, TURN = 370, 372  # <|endoftext|> and <|im_end|> of `micro-qwen3`


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return chat_folder(tmp_path / "model", "micro-qwen3", CHATML)


def name_ends(folder: Path, **values: Any) -> None:
    """Write what the two files of a folder name; None removes a file's or a value's name."""
    for name, ends in values.items():
        path = folder / f"{name}.json"
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
        path.write_text(json.dumps(kept if ends is None else kept | {"eos_token_id": ends}))


@pytest.mark.parametrize(
    ("generation_config", "config", "missing"),
    [(END, [END, TURN], [TURN]), ([END, TURN], END, []), (None, [END, TURN], [END, TURN]), ([TURN], None, [END])],
)
def test_generation_config_goes_before_config(folder: Path, generation_config: Any, config: Any, missing: list[int]):
    name_ends(folder, generation_config=generation_config, config=config)
    assert unnamed_ends({TURN, END}, folder) == missing


def test_config_counts_where_there_is_no_generation_config(folder: Path):
    (folder / GENERATION).unlink()
    name_ends(folder, config=END)
    assert unnamed_ends([TURN], folder) == [TURN]
    assert with_ends(folder, [TURN]) == {"bos_token_id": END, "eos_token_id": [END, TURN]}


def test_more_ends_stand_behind_those_that_are_named_and_other_values_stay(folder: Path):
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": END, "temperature": 0.7}))
    assert with_ends(folder, [TURN]) == {"eos_token_id": [END, TURN], "temperature": 0.7}


def test_the_end_of_a_turn_is_what_the_template_writes(folder: Path, tmp_path: Path):
    assert chat_ends(folder) == {TURN}
    (folder / "chat_template.jinja").write_text(NO_END)
    assert chat_ends(folder) == frozenset()
    (folder / "chat_template.jinja").write_text("{% if")
    assert chat_ends(folder) == frozenset()
    assert chat_ends(tmp_path) == frozenset()


def test_a_gguf_file_names_its_ends_by_text(tmp_path: Path):
    (tmp_path / "m.gguf").touch()
    assert unnamed_ends([TURN], tmp_path / "m.gguf") == []

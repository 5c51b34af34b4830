"""The example data: made by its script, nothing held out was seen, and `story` can spell it."""

import importlib
import json
from pathlib import Path

import pytest
from helpers.refusals import refuses

from llorch.runtime.builtin import DATA, find_data

SPLITS = ("train", "valid", "test")


def texts(split: str) -> list[str]:
    lines = (find_data("pirate") / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_script_makes_the_files_that_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reference_outputs"))
    importlib.import_module("make_examples").write_examples(tmp_path)
    for split in SPLITS:
        made, shipped = (folder / f"{split}.jsonl" for folder in (tmp_path / "pirate", find_data("pirate")))
        assert made.read_bytes() == shipped.read_bytes()


def test_no_tale_is_told_twice():
    every = [text for split in SPLITS for text in texts(split)]
    assert len(set(every)) == len(every) == 280


def test_every_choice_and_slot_of_the_templates_was_filled():
    assert not {character for split in SPLITS for text in texts(split) for character in text} & set("[]{}|_")


@pytest.mark.slow
def test_tales_fit_the_context_of_story_and_use_tokens_that_it_was_trained_on(monkeypatch: pytest.MonkeyPatch):
    from llorch.model.model import load

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reference_outputs"))
    stories = importlib.import_module("small_models.corpus").stories(5)
    model = load("story")
    ids = [model.tokenizer.encode(text) for split in SPLITS for text in texts(split)]
    known = {token for _ in range(2000) for token in model.tokenizer.encode(next(stories))}
    assert max(map(len, ids)) < model.config.max_position_embeddings / 2
    assert {token for row in ids for token in row} <= known


def test_a_name_is_found_and_goes_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert DATA == ("pirate",)
    monkeypatch.chdir(tmp_path)
    assert find_data("pirate").is_absolute()
    (tmp_path / "pirate").mkdir()
    assert find_data("pirate").is_absolute()
    assert find_data("./pirate") == Path("pirate")


@pytest.mark.parametrize("name", ["pirates", "", "../examples/pirate"])
def test_another_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with refuses(FileNotFoundError, repr(name), "(pirate)"):
        find_data(name)

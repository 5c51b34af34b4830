"""The row that changed since a run began is named."""

import json
from pathlib import Path

import pytest
from helpers.refusals import assert_tells, refuses

from llorch.model.model import Model, load
from llorch.training.data import DataSettings, TrainingData, read_data
from llorch.training.data.changed import ROWS, first_change, write_rows
from llorch.training.resume import require_same

TEXTS = ["The fox ran.", "A bird sang.", "It rained."]


@pytest.fixture(scope="module")
def model() -> Model:
    return load("story")


def data_of(folder: Path, model: Model, *texts: str, **settings: object) -> TrainingData:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return read_data(path, model, DataSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([*TEXTS[:1], "A cat sang.", *TEXTS[2:]], ("train.jsonl:2", "3 examples")),
        ([*TEXTS[:2]], ("train.jsonl:3", "2 now")),
        ([*TEXTS, "New."], ("train.jsonl:4", "4 now")),
        ([TEXTS[1], TEXTS[0], TEXTS[2]], ("train.jsonl:1", "3 now")),
    ],
)
def test_the_first_row_that_differs_is_named(tmp_path: Path, model: Model, texts: list[str], told: tuple[str, ...]):
    write_rows(data_of(tmp_path, model, *TEXTS), tmp_path)
    assert_tells(first_change(data_of(tmp_path, model, *texts), tmp_path), *told)


def test_a_row_that_moves_to_another_split_has_changed(tmp_path: Path, model: Model):
    write_rows(data_of(tmp_path, model, *TEXTS), tmp_path)
    assert "train.jsonl:" in first_change(data_of(tmp_path, model, *TEXTS, valid=0.4), tmp_path)


def test_other_settings_are_no_change_of_a_row(tmp_path: Path, model: Model):
    write_rows(data_of(tmp_path, model, *TEXTS), tmp_path)
    told = first_change(data_of(tmp_path, model, *TEXTS, max_length=500), tmp_path)
    assert "train.jsonl" not in told
    assert_tells(told, "settings")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_run_without_the_record_names_no_row(tmp_path: Path, model: Model, content: bytes | None):
    if content is not None:
        (tmp_path / ROWS).write_bytes(content)
    assert first_change(data_of(tmp_path, model, *TEXTS), tmp_path) == ""


def test_a_refusal_to_resume_tells_the_row(tmp_path: Path):
    saved, now = {"data": "a", "base": "x"}, {"data": "b", "base": "x"}
    with refuses("Inconsistent", "train.jsonl:2", "data", where=tmp_path):
        require_same(saved, now, allow_change=False, path=tmp_path, data_change=lambda: "train.jsonl:2")
    (line,) = require_same(saved, now, allow_change=True, path=tmp_path, data_change=lambda: "train.jsonl:2")
    assert_tells(line, "train.jsonl:2")
    assert require_same(saved, saved, allow_change=False, path=tmp_path, data_change=lambda: pytest.fail("asked")) == []

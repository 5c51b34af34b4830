"""A data set as a whole: splits, notes, digest, faults over several rows, and the row that changed."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from helpers.refusals import assert_tells, refuses

from llorch.model.model import Model, load
from llorch.training.data import DataSettings, TrainingData, TrainingOrder, read_data
from llorch.training.data.dataset import ROWS, first_change, write_rows
from llorch.training.resume import require_same
from llorch.training.settings import TrainOn

EXAMPLES = [{"text": "The fox ran home."}, {"text": "It rained."}, {"text": "A stone lay there."}]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model() -> Model:
    return load("story")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", *EXAMPLES)


def read(path: Path, model: Model, **settings: object) -> TrainingData:
    return read_data(path, model, DataSettings(**({"max_length": 64} | settings)))  # type: ignore[arg-type]


def test_a_file_is_training_data_and_a_folder_may_have_more(file: Path, model: Model):
    alone = read(file, model)
    assert [example.source for example in alone.train] == [f"train.jsonl:{line}" for line in (1, 2, 3)]
    assert (len(alone.valid), len(alone.test)) == (0, 0)
    write(file.parent / "valid.jsonl", {"prompt": "A", "completion": " fox"})
    write(file.parent / "test.jsonl", EXAMPLES[0])
    whole = read(file.parent, model)
    assert list(whole.train) == list(alone.train)
    assert [example.source for example in whole.valid] == ["valid.jsonl:1"]
    assert whole.test[0].ids == alone.train[0].ids


def test_the_digest_is_of_what_is_trained_on(file: Path, model: Model):
    first = read(file, model).digest
    assert re.fullmatch("[0-9a-f]{64}", first)
    write(file, *({"extra": 1} | row for row in EXAMPLES))
    assert read(file, model).digest == first
    assert read(file.parent, model).digest == first
    changed = {first}
    for rows in (
        EXAMPLES[::-1],
        EXAMPLES[:2],
        [*EXAMPLES, EXAMPLES[0]],
        [{"text": "The fox ran home!"}, *EXAMPLES[1:]],
    ):
        changed.add(read(write(file, *rows), model).digest)
    write(file, *EXAMPLES)
    changed |= {read(file, model, packing=True).digest, read(file, model, max_length=63).digest}
    changed.add(read_data(file, load("micro-llama"), DataSettings(max_length=64)).digest)
    write(file.parent / "valid.jsonl", EXAMPLES[0])
    changed.add(read(file.parent, model).digest)
    assert len(changed) == 9


def test_a_share_of_the_rows_is_held_out_whatever_their_order(tmp_path: Path, model: Model):
    rows = [{"text": f"The fox found {n} stones."} for n in range(18)] + [{"text": "It rained."}] * 2
    parts = []
    for order in (rows, rows[::-1]):
        data = read(write(tmp_path / "all.jsonl", *order), model, valid=0.25)
        parts.append([sorted(example.ids for example in split) for split in (data.train, data.valid)])
    assert parts[0] == parts[1]
    whole = read(tmp_path / "all.jsonl", model)
    assert sorted(parts[0][0] + parts[0][1]) == sorted(example.ids for example in whole.train)
    assert len(parts[0][1]) in (5, 6)  # equal rows stay together
    assert not {*parts[0][0]} & {*parts[0][1]}
    assert_tells(data.notes[-1], f"{len(data.valid)} of 20", "valid 0.25", where="all.jsonl")
    assert data.digest != whole.digest


def test_rows_are_held_out_where_there_are_enough_and_no_validation_set(file: Path, model: Model):
    one = write(file.parent / "one.jsonl", EXAMPLES[0])
    with refuses("Missing", "none of 1", "valid is 0.1", where=one):
        read(one, model, valid=0.1)
    write(file.parent / "valid.jsonl", EXAMPLES[0])
    with refuses("Inconsistent", "validation", where=file.parent / "valid.jsonl"):
        read(file.parent, model, valid=0.1)


def test_rows_are_packed_when_asked_for(file: Path, model: Model):
    plain, packed = read(file, model), read(file, model, packing=True)
    assert list(plain.train) == list(packed.train)
    assert [len(row) for row in plain.rows(plain.train)] == [1, 1, 1]
    assert [len(row) for row in packed.rows(packed.train)] == [3]
    plan = TrainingOrder(packed.rows(packed.train), batch_size=1, accumulation=1, seed=0)
    assert plan.step(0)[0].n_trained == plain.train.n_trained == packed.train.n_trained


def test_no_example_is_longer_than_the_context_of_the_model(file: Path, model: Model):
    found = read(file, model, max_length=4096)
    assert found.settings.max_length == 512
    assert_tells(found.notes[0], "max_length is 512", "context")
    assert read(file, model, max_length=512).digest == found.digest


def test_notes_say_what_was_read_and_what_was_done_to_it(file: Path, model: Model):
    write(file, *({"text": "one two three four <|eot_id|>", "id": 3, "a": None, "meta": {}} for _ in range(2)))
    said, controls, cut = read(file, model, max_length=5).notes
    assert_tells(said, "2 rows", "text", "2 examples", "id, meta", where="train.jsonl")
    assert_tells(controls, "parse_special", ": 2", where="train.jsonl")
    assert_tells(cut, "5 tokens", ": 2", where="train.jsonl")


def test_a_file_holds_one_format(file: Path, model: Model):
    write(file, EXAMPLES[0], {"prompt": "a", "completion": "b"})
    with refuses("Inconsistent", expected="text", got="prompt", where=f"{file}:2: "):
        read(file, model)


def test_a_fault_in_any_split_is_found_before_training(file: Path, model: Model):
    (file.parent / "test.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    with refuses("Malformed", "text", got=1, where=f"{file.parent / 'test.jsonl'}:2: "):
        read(file.parent, model)


def test_a_file_of_which_nothing_is_left_is_refused(file: Path, model: Model):
    write(file, {"prompt": "a long prompt of many words", "completion": "b"})
    with refuses("Missing", "none of 1", "max_length", where=f"{file}: "):
        read(file, model, max_length=4)


def test_progress_is_told(file: Path, model: Model):
    lines: list[str] = []
    write(file, *EXAMPLES * 400)
    read_data(file, model, DataSettings(), progress=lines.append)
    assert lines == ["train.jsonl: 500 rows", "train.jsonl: 1000 rows"]


def test_token_ids_need_no_vocabulary(file: Path, tmp_path: Path):
    from builders.tiny_models import random_tensors, write_folder

    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder, random_tensors("qwen3"), "qwen3")
    bare = load(folder)
    write(file, {"input_ids": [1, 2, 3]})
    assert read(file, bare, max_length=4).train[0].ids == (1, 2, 3)
    write(file, EXAMPLES[0])
    with refuses("Missing", "tokenizer", where=f"{file}:1: "):
        read(file, bare, max_length=4)


@pytest.mark.parametrize(
    ("name", "value", "expected"), [("max_length", 1, ("2 tokens",)), ("train_on", "user", get_args(TrainOn))]
)
def test_settings_without_meaning_are_refused(name: str, value: object, expected: tuple[str, ...]):
    settings = DataSettings()
    object.__setattr__(settings, name, value)  # past the type checker of the tests
    with refuses(ValueError, where=name, expected=expected, got=repr(value)):
        settings.__post_init__()


TEXTS = ["The fox ran.", "A bird sang.", "It rained."]


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

"""JSON lines, and a data set as a whole: splits, notes, digest, faults over several rows, and the row that changed."""

import json
import os
import re
from pathlib import Path
from typing import get_args

import pytest
from helpers.refusals import assert_tells, refuses

from llorch.model.model import Model, load
from llorch.training.data import DataSettings, TrainingData, TrainingOrder, read_data
from llorch.training.data.dataset import ROWS, first_change, write_rows
from llorch.training.data.read import find_splits, read_records
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
    ("texts", "message_parts"),
    [
        ([*TEXTS[:1], "A cat sang.", *TEXTS[2:]], ("train.jsonl:2", "3 examples")),
        ([*TEXTS[:2]], ("train.jsonl:3", "2 now")),
        ([*TEXTS, "New."], ("train.jsonl:4", "4 now")),
        ([TEXTS[1], TEXTS[0], TEXTS[2]], ("train.jsonl:1", "3 now")),
    ],
)
def test_the_first_row_that_differs_is_named(
    tmp_path: Path, model: Model, texts: list[str], message_parts: tuple[str, ...]
):
    write_rows(data_of(tmp_path, model, *TEXTS), tmp_path)
    assert_tells(first_change(data_of(tmp_path, model, *texts), tmp_path), *message_parts)


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


def values(path: Path, content: bytes) -> list[dict[str, object]]:
    path.write_bytes(content)
    return [record.values for record in read_records(path)]


def test_every_line_is_an_object_and_knows_where_it_stands(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n\n  \t\r\n{"text": "b"}')
    records = list(read_records(path))
    assert [record.values for record in records] == [{"text": "a"}, {"text": "b"}]
    assert [record.source for record in records] == ["train.jsonl:1", "train.jsonl:4"]
    assert records[1].where == f"{path}:4"


@pytest.mark.parametrize("content", [b'\xef\xbb\xbf{"a": 1}', b'{"a": 1}\r\n', b' {"a": 1} \n\n'])
def test_byte_order_mark_and_white_space_do_not_matter(tmp_path: Path, content: bytes):
    assert values(tmp_path / "d.jsonl", content) == [{"a": 1}]


BAD: dict[str, tuple[bytes, tuple[object, ...]]] = {  # content, facts; all are Malformed
    "no JSON": (b'{"text": oops}', ("JSON", "column 10")),
    "cut": (b'{"text": "a', ("JSON", "Unterminated", "column 10")),
    "two objects": (b'{"a": 1} {"b": 2}', ("JSON", "Extra", "column 10")),
    "not UTF-8": (b'{"text": "caf\xe9"}', ("UTF-8", "column 14")),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), ("expected UTF-8", "got UTF-16")),
    "NaN": (b'{"x": NaN}', ("NaN", "JSON")),
    "infinity": (b'{"x": 1e999}', ("1e999", "float64")),
    "equal keys": (b'{"a": 1, "a": 2}', ("'a'", "twice")),
    "half a pair": (rb'{"a": "\ud800"}', ("surrogate",)),
    "deep": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", ("deeper", 32)),
    "list": (b'[{"a": 1}]', ("object", "got list", ".json")),
    "text": (b'"a"', ("object", "got str")),
    "list over lines": (b'[\n{"a": 1}\n]', ("object", "one line", ".json")),
    "NUL": (b'{"a": "\x00"}', ("JSON", "control", "column 8")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, name: str):
    content, facts = BAD[name]
    path = tmp_path / "train.jsonl"
    first = b"" if name == "UTF-16" else b'{"text": "good"}\n'
    with refuses("Malformed", *facts, where=f"{path}:{1 + bool(first)}: "):
        values(path, first + content)


@pytest.mark.parametrize("content", [b'[{"a": 1},\n {"a": 2}]', b'\xef\xbb\xbf \n[\n{"a": 1}, {"a": 2}\n]\n'])
def test_a_json_file_may_be_a_list_of_rows(tmp_path: Path, content: bytes):
    path = tmp_path / "train.json"
    assert values(path, content) == [{"a": 1}, {"a": 2}]
    records = list(read_records(path))
    assert (records[1].where, records[1].source) == (f"{path} row 2", "train.json row 2")
    assert values(path, b'{"a": 1}\n{"a": 2}') == [{"a": 1}, {"a": 2}]  # JSON lines by another name
    assert find_splits(tmp_path) == {"train": path}


GIANT_LINE = b'{"text": "a"}\n{"text": "' + b"a" * (17 << 20) + b'"}'
REFUSED = {  # name of the file, content, code, facts
    "list of int": ("train.json", b'[{"a": 1}, 2]', "Malformed", "train.json row 2: ", "object", "got int"),
    "list cut": ("train.json", b'[{"a": 1}', "Malformed", "train.json: ", "list", "JSON"),
    "list empty": ("train.json", b"[]", "Missing", "train.json: ", "JSON"),
    "empty": ("d.jsonl", b"", "Missing", "d.jsonl", "expected JSON", "got an empty"),
    "white space": ("d.jsonl", b"\n \n", "Missing", "d.jsonl", "expected JSON", "got an empty"),
    "mark alone": ("d.jsonl", b"\xef\xbb\xbf", "Missing", "d.jsonl", "expected JSON", "got an empty"),
    "giant line": ("d.jsonl", GIANT_LINE, "TooLarge", "d.jsonl:2: ", 16777216),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_records_refuses(tmp_path: Path, name: str):
    file, content, code, *facts = REFUSED[name]
    with refuses(code, *facts):
        values(tmp_path / file, content)


def test_a_giant_list_is_refused(tmp_path: Path):
    path = tmp_path / "train.json"
    path.write_bytes(b"[")
    os.truncate(path, (128 << 20) + 1)  # takes no room on the disk
    with refuses("TooLarge", 134217728, where=path):
        list(read_records(path))


def test_many_token_ids_fit_a_line(tmp_path: Path):
    ids = list(range(300_000))
    assert values(tmp_path / "d.jsonl", json.dumps({"input_ids": ids}).encode())[0]["input_ids"] == ids


def test_a_file_is_all_training_data_and_a_folder_has_splits(tmp_path: Path):
    for name in ("train", "test", "other"):
        (tmp_path / f"{name}.jsonl").touch()
    assert find_splits(tmp_path / "other.jsonl") == {"train": tmp_path / "other.jsonl"}
    assert find_splits(tmp_path) == {split: tmp_path / f"{split}.jsonl" for split in ("train", "test")}


def test_a_missing_path_or_training_file_is_named(tmp_path: Path):
    with refuses(FileNotFoundError, "data", where=tmp_path / "nothing"):
        find_splits(tmp_path / "nothing")
    with refuses(FileNotFoundError, "train.jsonl", where=tmp_path):
        find_splits(tmp_path)

"""JSON lines: what is read, and how a bad line is named."""

import json
import os
from pathlib import Path

import pytest
from helpers.refusals import refuses

from llorch.training.data.read import find_splits, read_records


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

"""What the doctor reads from the record of a run: whether the end of a text was ever trained, and on which data."""

import json
from pathlib import Path

import pytest

from llorch.builtin import builtin_path
from llorch.files import open_weights
from llorch.model import Opened
from llorch.train.data import DataSettings, read_data
from llorch.verify.doctor.run import check_run

END = 999  # of `story`; see the first test


def run_folder(folder: Path, rows: list[dict], *, digest: str | None = None) -> Path:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = Opened(open_weights(builtin_path("story")))
    known = read_data(data, model, DataSettings(max_length=512)).digest
    record = {"settings": {"model": "story", "data": str(data)}, "identity": {"data": digest or known}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def verdicts(folder: Path) -> dict[str, tuple[str, str]]:
    return {
        found.check: (found.verdict, found.text) for found in check_run(folder, open_weights(builtin_path("story")))
    }


def test_the_end_token_of_these_tests_is_that_of_the_model():
    assert END in Opened(open_weights(builtin_path("story"))).tokenizer.eos_token_ids


def test_data_that_ends_is_fine(tmp_path):
    found = verdicts(run_folder(tmp_path, [{"prompt": "a", "completion": " b"}]))
    assert found["end token"] == ("ok", "1 of 1 examples train a token that ends a text")
    assert found["training data"][0] == "ok"


@pytest.mark.parametrize("labels", [None, [-100, 9, 8, -100]])
def test_a_model_that_never_saw_an_end_is_told(tmp_path, labels):
    row = {"input_ids": [7, 9, 8, END if labels else 10]} | ({"labels": labels} if labels else {})
    verdict, text = verdicts(run_folder(tmp_path, [row]))["end token"]
    assert verdict == "WRONG"
    assert "never learned to stop" in text


def test_data_that_changed_since_is_told(tmp_path):
    folder = run_folder(tmp_path, [{"text": "Once upon a time."}], digest="0" * 64)
    assert verdicts(folder)["training data"][0] == "warning"


def test_data_that_is_gone_and_folders_without_a_run_are_not_run(tmp_path):
    assert verdicts(tmp_path)["end token"][0] == "NOT RUN"
    folder = run_folder(tmp_path, [{"text": "Once upon a time."}])
    (folder / "data.jsonl").unlink()
    verdict, text = verdicts(folder)["end token"]
    assert verdict == "NOT RUN"
    assert "data.jsonl" in text
    (folder / "run.json").write_text("{")
    assert verdicts(folder)["end token"][0] == "NOT RUN"

"""One line for each example of a run, so that a later run can name the row that changed."""

import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from llorch.files.new_file import new_file
from llorch.training.batch import Example
from llorch.training.data.dataset import TrainingData

ROWS = "rows.txt"
_DIGITS = 16  # of a SHA-256 in hexadecimal: enough to notice a change


def write_rows(data: TrainingData, folder: Path) -> None:
    """Write a digest and a source for each example into the folder of a run."""
    with new_file(folder / ROWS) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in _digest_lines(data))


def first_change(data: TrainingData, folder: Path) -> str:
    """Name the first example that is not as a run recorded it; empty where the run has no such record."""
    try:
        saved = (folder / ROWS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    counts = f"{len(saved)} examples then, {len(data.train) + len(data.valid) + len(data.test)} now"
    for old, new in zip_longest(saved, _digest_lines(data)):
        if old is None:
            return f"{_source(new)} is new ({counts})"
        if new is None:
            return f"{_source(old)} is gone ({counts})"
        if old[:_DIGITS] != new[:_DIGITS]:
            return f"{_source(new)} is the first example that differs ({counts})"
    return f"no example changed ({counts}), so the settings of the data differ"


def _digest_lines(data: TrainingData) -> Iterator[str]:
    for split in ("train", "valid", "test"):
        for example in getattr(data, split):
            yield f"{_digest_of_example(example, split)} {split} {example.source}"


def _digest_of_example(example: Example, split: str) -> str:
    content = np.array([example.ids, example.labels], "<i8").tobytes()
    return hashlib.sha256(split.encode() + content).hexdigest()[:_DIGITS]


def _source(line: str) -> str:
    return line.split(" ", 2)[-1]

"""The picture of README.md shows the tables of a run, and loads nothing."""

import re

from checkpoints.terminal import MODEL, PICTURE, picture, tables
from llorch.stages import CHECKPOINTS

PRINTED = [
    "some-model", "a note about an engine", "checkpoint   rows error limit verdict", "06  swiglu   3  1e-7 5e-7 PASS  ",
    "18 parameters: a note", "", "1 model, 3 comparisons: 3 passed, 0 failed; a note",
]  # fmt: skip


def test_tables_keeps_rows_with_a_verdict_and_the_counts():
    kept = [PRINTED[2], PRINTED[3].rstrip(), "", "1 model, 3 comparisons: 3 passed, 0 failed"]
    assert [*tables(PRINTED)] == kept


def test_picture_of_equal_lines_is_equal_and_loads_no_font():
    drawn = picture(["$ command", *tables(PRINTED)])
    assert drawn == picture(["$ command", *tables(PRINTED)])
    assert "url(http" not in drawn
    assert drawn.count("PASS") == 1


def test_stored_picture_shows_a_pass_for_each_dense_checkpoint_and_no_failure():
    texts = [text.replace("&#160;", " ") for text in re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text())]
    words = " ".join(texts).split()
    assert f"llorch verify {MODEL}" in " ".join(words)
    without = {"05b", "06b", "13", "14"}  # delta nets, experts, quantised files, torch
    assert {*CHECKPOINTS.values()} - {CHECKPOINTS[number] for number in without} <= {*words}
    assert words.count("PASS") == len(CHECKPOINTS) - len(without)
    assert not {"FAIL", "TIE"} & {*words}

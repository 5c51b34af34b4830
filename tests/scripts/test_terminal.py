"""The picture of README.md shows a run of `llorch verify`, and loads nothing."""

import re

from checkpoints.terminal import PICTURE, picture
from llorch.runtime.builtin import EVERY

PRINTED = ["$ command", "some-model   PASS   3 of 3   llama.cpp   0.1 s", "1 model, 3 of 3 comparisons PASS"]


def test_picture_of_equal_lines_is_equal_and_loads_no_font():
    drawn = picture(PRINTED)
    assert drawn == picture(PRINTED)
    assert "url(http" not in drawn
    assert drawn.count("PASS") == 2


def test_stored_picture_shows_the_command_and_a_pass_for_each_model_and_no_failure():
    texts = [text.replace("&#160;", " ") for text in re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text())]
    words = " ".join(texts).split()
    assert "$ llorch verify " in " ".join(words)
    assert {*EVERY, "quantised"} <= {*words}
    assert words.count("PASS") == len(EVERY) + 2  # one in the last line
    assert not {"FAIL", "TIE"} & {*words}

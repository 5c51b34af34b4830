"""`pytest -k checkpoint_06`, `-k teeth`: the files that may have such tests are read, and no others."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("keyword", "left_out"),
    [
        ("checkpoint_06", True),
        ("checkpoint", True),
        ("checkpoint_06_swiglu", True),
        ("q_rope and teeth", True),
        ("checkpoint_01 and not checkpoint_01b", True),
        ("", False),
        ("checkpoint_06 or q_rope", False),
        ("not teeth", False),
        ("rope", False),
    ],
)
def test_only_files_that_no_keyword_can_ask_for_are_left_out(hooks: Any, keyword: str, left_out: bool, tmp_path: Path):
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword, impl=None))
    (tmp_path / "silent.py").write_text("def test_q_rope(): ...")
    (tmp_path / "speaking.py").write_text("def test_q_rope_has_teeth(id=f'checkpoint_{number}'): ...")
    assert bool(hooks.pytest_ignore_collect(tmp_path / "silent.py", config)) == left_out
    assert not hooks.pytest_ignore_collect(tmp_path / "speaking.py", config)
    assert not hooks.pytest_ignore_collect(tmp_path, config)


@pytest.mark.parametrize(
    ("text", "word", "may"),
    [
        ("# of checkpoint_06", "checkpoint_06_swiglu", True),
        ("# of checkpoint_07", "checkpoint_06", False),
        ("id=f'checkpoint_{number}'", "checkpoint_06", True),
        ("id='checkpoint_' + number", "checkpoint_06", True),
        ("id=f'checkpoint_0{number}'", "checkpoint_06", True),
        ("# checkpoints/guide", "checkpoint_06", False),
        ("# checkpoints/guide", "checkpoint", True),
    ],
)
def test_a_number_in_a_keyword_leaves_out_files_that_have_other_numbers(hooks: Any, text: str, word: str, may: bool):
    assert hooks.may_say(text, word) == may


def test_a_selection_of_checkpoints_has_no_more_workers_than_cores(hooks: Any):
    counts = [
        hooks.pytest_xdist_auto_num_workers(SimpleNamespace(option=SimpleNamespace(keyword=keyword)))
        for keyword in ("", "checkpoint_06")
    ]
    assert counts[0] == counts[1] + 1


def test_every_test_that_a_keyword_asks_for_is_in_a_file_that_is_read(hooks: Any, request: pytest.FixtureRequest):
    """Or `pytest_ignore_collect` would lose it: shown in a run of all tests."""
    asked: dict[Path, set[str]] = {}
    for item in request.session.items:
        found = re.findall(r"(?=(checkpoint_\d+b?|checkpoint_?|teeth))", f"{item.path.name} {item.name}".lower())
        asked.setdefault(item.path, set()).update(found)
    for path, words in asked.items():
        said = f"{path} {path.read_text(encoding='utf-8')}".lower()
        assert [word for word in words if not hooks.may_say(said, word)] == [], path


def test_an_id_below_checkpoints_is_no_checkpoint(hooks: Any):
    assert hooks.pytest_make_parametrize_id("checkpoints/guide/files.md") == "guide/files.md"
    assert hooks.pytest_make_parametrize_id("checkpoint_06") is None

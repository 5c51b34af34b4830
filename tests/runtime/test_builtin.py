"""A built-in name and a path of the same name."""

from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.files.hub import find
from llorch.runtime.builtin import builtin_path, find_data


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current folder one with folders that have built-in names."""
    monkeypatch.chdir(tmp_path)
    for name in ("story", "pirate"):
        Path(name).mkdir()


def test_a_built_in_model_wins_over_a_folder_of_its_name_and_a_line_tells_how_to_write_the_folder():
    lines: list[str] = []
    assert find("story", report=lines.append) == builtin_path("story")
    assert_tells(" ".join(lines), "./story")
    assert len(lines) == 1
    assert llorch.load("story").config.hidden_size == 192


def test_a_path_is_a_path():
    for spec in ("./story", Path("story"), str(Path("story").absolute())):
        assert find(spec) == Path(spec)
        with refuses("Missing", "config.json"):
            llorch.load(spec)
    assert find(Path("micro-llama")) == builtin_path("micro-llama")  # where there is no such path


def test_a_built_in_data_set_wins_over_a_folder_of_its_name():
    lines: list[str] = []
    assert find_data("pirate", lines.append).is_absolute()
    assert_tells(" ".join(lines), "./pirate")
    assert find_data("./pirate") == Path("pirate")


@pytest.mark.parametrize("words", ["tokenize story Hi", "inspect story", "data show -n 0 story pirate",
                                   "lora train story --data pirate -o . --lr 1e-4"])  # fmt: skip
def test_a_command_says_that_both_exist_once(words: str):
    if "lora train" in words:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    result = invoke(*words.split())
    assert result.stderr.count("./story") == 1
    assert result.stderr.count("./pirate") == ("pirate" in words)
    assert result.exit_code == (2 if "train" in words else 0)  # of lora train: the folder exists


def test_nothing_is_said_where_only_the_built_in_one_exists():
    Path("story").rmdir()
    assert invoke("tokenize", "story", "Hi").stderr == ""

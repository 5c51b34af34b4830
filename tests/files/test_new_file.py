"""Files and folders that appear complete or not at all."""

from pathlib import Path

import pytest

from llorch.files.new_file import new_file, new_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half_of_a_file(path: Path) -> None:
    with new_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt


def write_half_of_a_folder(path: Path) -> None:
    with new_folder(path) as temporary:
        (temporary / "half").touch()
        raise KeyboardInterrupt


def lose_the_new_folder(path: Path) -> None:
    with new_folder(path) as temporary:
        temporary.rename(path.with_name("elsewhere"))


def test_a_file_appears_at_the_end(tmp_path: Path):
    with new_file(tmp_path / "a") as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path
        assert not (tmp_path / "a").exists()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "new"


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half_of_a_file(tmp_path / "a")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_folder_appears_at_the_end_in_place_of_the_old_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with new_folder(tmp_path / "a") as temporary:
        (temporary / "new").touch()
        assert names(tmp_path / "a") == ["old"]
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["new"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        write_half_of_a_folder(tmp_path / "a")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["old"]


def test_a_new_folder_that_vanishes_leaves_the_old_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(FileNotFoundError):
        lose_the_new_folder(tmp_path / "a")
    assert names(tmp_path / "a") == ["old"]

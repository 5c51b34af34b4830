"""Files and folders that appear complete or not at all."""

from pathlib import Path

import pytest

from llorch.files.new_file import new_file, new_folder


def content(place: Path) -> str:
    """What a file says, or the one file of a folder is called."""
    return place.read_text() if place.is_file() else ",".join(path.name for path in place.iterdir())


def fill(place: Path, text: str) -> None:
    if place.is_dir():
        (place / text).touch()
    else:
        place.write_text(text)


@pytest.fixture(params=[new_file, new_folder])
def new(request: pytest.FixtureRequest, tmp_path: Path):
    """A way to write, and an old file or folder in the place."""
    if request.param is new_folder:
        (tmp_path / "a").mkdir()
    fill(tmp_path / "a", "old")
    return request.param


def write_half(new, place: Path, ends: BaseException) -> None:
    with new(place) as temporary:
        fill(temporary, "half")
        if isinstance(ends, KeyboardInterrupt):
            raise ends
        temporary.rename(place.with_name("elsewhere"))


def test_it_appears_at_the_end_in_place_of_the_old_one(new, tmp_path: Path):
    with new(tmp_path / "a") as temporary:
        fill(temporary, "new")
        assert temporary.parent == tmp_path
        assert content(tmp_path / "a") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert content(tmp_path / "a") == "new"


@pytest.mark.parametrize("ends", [KeyboardInterrupt(), FileNotFoundError()], ids=["interrupted", "vanished"])
def test_one_that_fails_leaves_the_old_one(new, tmp_path: Path, ends: BaseException):
    with pytest.raises(type(ends)):
        write_half(new, tmp_path / "a", ends)
    assert {path.name for path in tmp_path.iterdir()} - {"elsewhere"} == {"a"}
    assert content(tmp_path / "a") == "old"

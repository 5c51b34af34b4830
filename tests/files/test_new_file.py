"""Files and folders that appear complete or not at all."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.command_line import invoke

from llorch.files.new_file import folders_above, new_file, new_folder


def content(place: Path) -> str:
    """Text of a file, or the names of the files of a folder."""
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


def test_new_file_replaces_the_old_one_at_the_end(new, tmp_path: Path):
    with new(tmp_path / "a") as temporary:
        fill(temporary, "new")
        assert temporary.parent == tmp_path
        assert content(tmp_path / "a") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert content(tmp_path / "a") == "new"


@pytest.mark.parametrize("ends", [KeyboardInterrupt(), FileNotFoundError()], ids=["interrupted", "vanished"])
def test_new_file_failed_write_keeps_the_old_content(new, tmp_path: Path, ends: BaseException):
    with pytest.raises(type(ends)):
        write_half(new, tmp_path / "a", ends)
    assert {path.name for path in tmp_path.iterdir()} - {"elsewhere"} == {"a"}
    assert content(tmp_path / "a") == "old"


@pytest.fixture(scope="module")
def gone() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"], stdin=subprocess.DEVNULL) as process:
        pass
    return process.pid


@pytest.mark.parametrize("as_folder", [False, True])
def test_leftovers_of_processes_that_are_gone_are_removed_and_those_of_others_stay(
    new, gone: int, as_folder: bool, tmp_path: Path
):
    names = {number: f".a.{number}.tmp" for number in (gone, os.getppid())}
    names |= {"another name": f".b.{gone}.tmp", "no number": ".a.x.tmp", "old": f".a.{gone}.old"}
    for name in names.values():
        (tmp_path / name).mkdir() if as_folder else (tmp_path / name).touch()
        if as_folder:
            fill(tmp_path / name, "half")
    with new(tmp_path / "a") as temporary:
        fill(temporary, "new")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a", names[os.getppid()], names["another name"], names["no number"]}
    assert content(tmp_path / "a") == "new"


def test_an_old_folder_that_a_killed_run_has_moved_away_is_put_back_when_the_next_run_fails(gone: int, tmp_path: Path):
    old = tmp_path / f".a.{gone}.old"
    old.mkdir()
    fill(old, "precious")
    with pytest.raises(KeyboardInterrupt):
        write_half(new_folder, tmp_path / "a", KeyboardInterrupt())
    assert content(tmp_path / "a") == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_convert_removes_the_partial_file_of_a_killed_convert(gone: int, tmp_path: Path):
    (tmp_path / f".out.gguf.{gone}.tmp").write_bytes(b"half")
    assert invoke("convert", "micro-llama", str(tmp_path / "out.gguf")).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def interrupt_in(folder: Path) -> None:
    assert folder.is_dir()
    raise KeyboardInterrupt


def test_folders_above_a_place_are_made_and_go_with_a_failure(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    place = tmp_path / "kept" / "b" / "c" / "file"
    with pytest.raises(KeyboardInterrupt), folders_above(place):
        interrupt_in(place.parent)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    with folders_above(place):
        place.touch()
    assert place.exists()

"""Pages of checkpoints/how_to: the repository holds what their diffs add, and the files that their commands name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "checkpoints/how_to"
PAGES = sorted(FOLDER.glob("*.md"))
EVERY_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def added(page: str) -> Iterator[tuple[str, str]]:
    """Yield every run of lines that the diffs of a page add, with the path of its file."""
    for diff in DIFF.findall(page):
        path = ""
        for part in re.split(r"^(\+\+\+ b/.*\n|--- a/.*\n|@@ .*\n)", diff, flags=re.MULTILINE):
            if part.startswith("+++ b/"):
                path = part.removeprefix("+++ b/").strip()
            elif lines := [line[1:] for line in part.splitlines() if line.startswith("+")]:
                yield path, "\n".join(lines)


def test_there_is_a_page_for_each_kind_of_addition():
    assert {path.stem.rpartition("_")[2] for path in PAGES} == {"family", "type", "stage", "engine", "mistake"}


@EVERY_PAGE
def test_a_diff_adds_code_that_is_there(path: Path):
    runs = list(added(path.read_text(encoding="utf-8")))
    assert runs
    missing = [(file, lines) for file, lines in runs if lines not in (ROOT / file).read_text(encoding="utf-8")]
    assert not missing, f"write the diff of {path.name} again"


@EVERY_PAGE
def test_a_page_has_at_most_40_lines_and_is_linked_from_contributing(path: Path):
    assert path.read_text(encoding="utf-8").count("\n") <= 40
    assert f"]({path.relative_to(ROOT).as_posix()})" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@EVERY_PAGE
def test_commands_and_paths_of_a_page_name_existing_files(path: Path):
    text = re.sub(DIFF, "", path.read_text(encoding="utf-8"))
    named = set(re.findall(r"\b(?:tests|llorch|checkpoints|reference_outputs|\.ci)/[\w/.]*\w", text))
    assert any(name.startswith("tests/") for name in named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_added_lines_are_found_with_their_file_in_one_run_for_each_part():
    page = (
        "```diff\n--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@ here\n-a\n+b\n+c\n@@ -9,0 +10 @@\n+d\n"
        "--- a/y\n+++ b/y\n@@ -0,0 +1 @@\n+e\n```\n+f\n"
    )
    assert list(added(page)) == [("x.py", "b\nc"), ("x.py", "d"), ("y", "e")]

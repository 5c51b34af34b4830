"""The checkpoint pages: their links lead somewhere, what fills them is strict.

`python checkpoints/build.py --check`, a step of `.ci/run`, fails if a generated part is not current.
"""

import re

import pytest
from helpers.refusals import refuses

from checkpoints.generated import pages
from checkpoints.generated.pages import END, FOLDER, page, render, same
from checkpoints.generated.tables import equal, table
from llorch.judging.judge import compare_exact
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import CHECKPOINTS, STAGES

ALL = [FOLDER / "README.md", *(page(FOLDER, number) for number in CHECKPOINTS)]
IDS = ["index", *(path.parent.name for path in ALL[1:])]
EVERY_PAGE = pytest.mark.parametrize("path", ALL, ids=IDS)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([a-z-]+))?\)")
LINE = "<!-- generated: distances -->\n| `q_rope` | 3.5e-05 | ~3e-08 | 1.5e-04 |\n<!-- end -->\n"


def test_there_is_one_folder_for_each_number():
    assert {path.name for path in FOLDER.glob("[0-9]*")} == {path.parent.name for path in ALL[1:]}


def test_label_of_a_link_is_the_name_of_the_file_that_it_leads_to():
    links = [
        (path, label, target)
        for path in (*FOLDER.parent.glob("*.md"), *FOLDER.rglob("*.md"), *FOLDER.glob("*/lesson.py"))
        for label, target in re.findall(r"\[`([\w./]+\.py)`\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    ]
    assert len(links) > 20
    assert [link for link in links if not link[2].endswith(link[1])] == []


def lesson_rows(path):
    """Number to idea and minutes, of the table of lessons of a page."""
    rows = re.findall(r"^\| (\d\d\w?) \| \[.*?\]\(.*?\) \| (.*?) \|.*?(\d+) \|$", path.read_text(), re.MULTILINE)
    return {number: (idea, minutes) for number, idea, minutes in rows if "`" not in idea}


def test_both_tables_of_lessons_agree():
    index, guide = (lesson_rows(FOLDER / name) for name in ("README.md", "guide/learning.md"))
    assert index == guide
    assert {*guide} == {*CHECKPOINTS}


@EVERY_PAGE
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, heading in LINK.findall(prose):
        file = path.parent / target
        assert file.exists(), target
        if heading:
            headings = [line.lower() for line in file.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
            assert heading in {line.lstrip("# ").replace(" ", "-") for line in headings}


@EVERY_PAGE
def test_text_is_ascii_and_tables_have_whole_lines_and_nothing_that_a_reader_of_markdown_would_swallow(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block
        assert not re.search(r"[<$]", re.sub(r"`[^`\n]*`|\$[^$|\n]+\$", "", block)), block  # code, maths


@pytest.mark.parametrize("number", CHECKPOINTS)
def test_a_page_names_its_tests_and_its_stages(number):
    text = page(FOLDER, number).read_text(encoding="utf-8")
    assert re.search(rf"pytest -k \"?checkpoint.{number}\b", text)
    for stage in (stage for stage in STAGES if stage.checkpoint == number):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{stage.name}`") and "](" in line]
        name, target = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", line)[0]
        source = (page(FOLDER, number).parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def {name.split('.')[-1]}\(|class {name}\b)", source, re.MULTILINE)
        assert stage.function.endswith(f".{name}")


@pytest.mark.parametrize(
    ("old", "new", "current"),
    [
        ("3.5e-05", "3.6e-05", False),
        ("1.5e-04", "1.5e-03", False),
        ("~3e-08", "~4e-07", True),  # a number of the machine
        ("~3e-08", "~0", True),
    ],
)
def test_a_changed_number_makes_a_page_not_current_unless_it_is_of_the_machine(old: str, new: str, current: bool):
    assert same(LINE, LINE)
    assert same(LINE, LINE.replace(old, new)) == current


def test_only_generated_parts_are_rewritten():
    text = f"# by hand\n\n{LINE}\nby hand\n"
    new = render(text, {"distances": "| new |"}, label="page")
    assert new == "# by hand\n\n<!-- generated: distances -->\n| new |\n<!-- end -->\n\nby hand\n"
    assert render(new, {"distances": "| new |"}, label="page") == new


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        LINE + LINE,
        LINE + LINE.replace("distances", "stages"),
        LINE.replace("distances", "distance"),
        LINE.replace("<!-- end -->", ""),
        LINE.replace("<!-- end -->", "") + LINE,
        LINE + "<!-- end -->",
    ],
    ids=["missing", "twice", "one too many", "misspelt", "open", "open before another", "closed twice"],
)
def test_a_page_without_exactly_its_blocks_is_refused(text):
    with refuses(ValueError, expected=(["distances"], END), where="page"):
        render(text, {"distances": "| new |"}, label="page")


def test_without_goldens_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("checkpoints.generated.tables.goldens_folder", lambda: tmp_path)
    with refuses(ValueError, "regenerate.py", expected=pages.goldens_folder(), got="none", where="pages"):
        pages.generated(FOLDER)


def test_a_table_escapes_the_marks_between_its_cells():
    assert table(("a", "b"), [["x|y", "1"]], right=1) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_the_table_of_equal_things_counts_those_that_are():
    stage_ref = StageRef("12", "generation")
    comparisons = [
        compare_exact(stage_ref, "llamacpp", wrong, "", model=model) for model, wrong in (("a", 0.0), ("b", 0.5))
    ]
    assert equal(comparisons).endswith("| `generation` | llama.cpp | 1 of 2 |")

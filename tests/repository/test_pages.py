"""The checkpoint pages: their links lead somewhere, what fills them is strict, lessons are short and show no answer.

`python checkpoints/build.py --check`, a step of `.ci/run`, fails if a generated part is not current.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.refusals import refuses

from checkpoints.generated import pages
from checkpoints.generated.lessons import lesson_tables, route
from checkpoints.generated.pages import END, FOLDER, START, indexes, page, porting_page, render, same
from checkpoints.generated.tables import equal, table
from llorch.apps.learn.lessons import BLOCKS, BY_NUMBER, LESSONS, Lesson, hints_of, stub_of, typed_mistakes
from llorch.judging.compare import compare_exact
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import CHECKPOINTS, STAGES

ALL = [*indexes(FOLDER), *(kind(FOLDER, number) for number in CHECKPOINTS for kind in (page, porting_page))]
EVERY_PAGE = pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([a-z-]+))?\)")
LINE = "<!-- generated: distances -->\n| `q_rope` | 3.5e-05 | ~3e-08 | 1.5e-04 |\n<!-- end -->\n"


def test_there_is_one_folder_for_each_number():
    assert {path.name for path in FOLDER.glob("[0-9]*")} == {page(FOLDER, number).parent.name for number in CHECKPOINTS}


def test_label_of_a_link_is_the_name_of_the_file_that_it_leads_to():
    links = [
        (path, label, target)
        for path in (*FOLDER.parent.glob("*.md"), *FOLDER.rglob("*.md"), *FOLDER.glob("*/*.py"))
        for label, target in re.findall(r"\[`([\w./]+\.py)`\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    ]
    assert len(links) > 20
    assert [link for link in links if not link[2].endswith(link[1])] == []


def test_the_index_lists_the_blocks_of_the_path_with_every_lesson_and_its_minutes():
    text = indexes(FOLDER)[0].read_text(encoding="utf-8")
    assert render(text, {"route": route(), "path": lesson_tables()}, label="index") == text
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [*BLOCKS]
    rows = re.findall(r"^\| (\w+) \| \[[\w ]+\]\(([^)]*)\) \|.*\| (\d+) \|$", text, re.MULTILINE)
    assert [(number, int(minutes)) for number, _, minutes in rows] == [(each.number, each.minutes) for each in LESSONS]
    linked = {number: target for number, target, _ in rows}
    assert {number: page(Path(), number).as_posix() for number in CHECKPOINTS}.items() <= linked.items()


def test_pages_count_the_same_lessons_and_hours():
    required = [lesson for title, block in BLOCKS.items() if "(optional)" not in title for lesson in block]
    allowed = {
        (str(len(lessons)), f"{sum(each.minutes for each in lessons) / 60:.1f}") for lessons in (LESSONS, required)
    }
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *FOLDER.rglob("*.md"))]
    counts = {count for text in texts for count in re.findall(r"\b(\d+) lessons", text)}
    hours = {hour for text in texts for hour in re.findall(r"lessons, which take (\S+) hours", text)}
    assert counts == {count for count, _ in allowed}
    assert hours == {hour for _, hour in allowed}


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
def test_a_page_for_porters_names_its_tests_and_its_stages(number):
    text = porting_page(FOLDER, number).read_text(encoding="utf-8")
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


ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "checkpoints/how_to"
PAGES = sorted(HOW_TO.glob("*.md"))
ADDITIONS = [path for path in PAGES if path.stem.startswith("add_")]
EVERY_HOW_TO = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
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
    assert {path.stem.rpartition("_")[2] for path in ADDITIONS} == {"family", "type", "stage", "engine", "mistake"}


@pytest.mark.parametrize("path", ADDITIONS, ids=lambda path: path.stem)
def test_a_diff_adds_code_that_is_there(path: Path):
    runs = list(added(path.read_text(encoding="utf-8")))
    assert runs
    missing = [(file, lines) for file, lines in runs if lines not in (ROOT / file).read_text(encoding="utf-8")]
    assert not missing, f"write the diff of {path.name} again"


@EVERY_HOW_TO
def test_a_page_has_at_most_40_lines_and_is_linked_from_contributing(path: Path):
    assert path.read_text(encoding="utf-8").count("\n") <= 40
    assert f"]({path.relative_to(ROOT).as_posix()})" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@EVERY_HOW_TO
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


HEADINGS = {
    page: ("where we are", "idea", "maths", "picture", "exercise", "run it", "mistake", "both engines"),
    porting_page: ("reference", "engines differ", "compared values", "check it"),
}
MOST_WORDS = 1300  # of a lesson: text, code and output, without what is folded
IMPORTED = re.compile(r"numpy|llorch(\.ops(\.\w+)?|\.apps\.learn(\.\w+)?)?")
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
EVERY_LESSON = pytest.mark.parametrize("number", CHECKPOINTS)
FETCHED = re.compile(r"!\[[^]]*\]\(https?:|<(?:img|script|iframe|link|video)\b")
NUMPY_ONLY = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "matplotlib", "transformers", "peft", "llama_cpp", "scipy"]))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@EVERY_LESSON
def test_both_pages_have_their_headings_in_order(number: str):
    for kind, expected in HEADINGS.items():
        text = kind(FOLDER, number).read_text(encoding="utf-8")
        headings = iter(re.findall(r"^## (.*)$", text.lower(), re.MULTILINE))
        assert [block for block in expected if not any(block in heading for heading in headings)] == []
    lesson = page(FOLDER, number).read_text(encoding="utf-8")
    assert f"llorch learn check {number}" in lesson
    assert "](fig/where.svg)" in lesson
    assert "](PORTING.md)" in lesson


def open_text(number: str) -> str:
    """Return the page of a lesson without what is folded."""
    return FOLDED.sub("", page(FOLDER, number).read_text(encoding="utf-8"))


@EVERY_LESSON
def test_a_lesson_is_short_and_has_no_generated_table(number: str):
    assert len(open_text(number).split()) <= MOST_WORDS
    assert START not in page(FOLDER, number).read_text(encoding="utf-8")


@EVERY_LESSON
def test_a_lesson_imports_only_public_modules(number: str):
    tree = ast.parse(page(FOLDER, number).with_name("lesson.py").read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if not IMPORTED.fullmatch(name) and (number, name) != ("14", "torch")] == []


@EVERY_LESSON
def test_a_page_shows_nothing_that_is_fetched_from_elsewhere(number: str):
    assert not FETCHED.search(page(FOLDER, number).read_text(encoding="utf-8"))
    for figure in page(FOLDER, number).parent.glob("fig/*.svg"):
        assert not re.search(r"(?:href|src)=[\"'](?!#|data:)|url\((?!#)|@import", figure.read_text(encoding="utf-8"))


def code_lines(text: str) -> set[str]:
    """Return the lines that are long enough to give something away, without spaces, comments and imports."""
    lines = (re.sub(r"\s", "", line.partition("#")[0]) for line in text.splitlines() if "import " not in line)
    return {line for line in lines if len(line) >= 15 and not line.startswith("def")}


@EVERY_LESSON
def test_a_lesson_shows_neither_its_answer_nor_a_line_of_it(number: str):
    shown = open_text(number)
    for exercise in (exercise for lesson in LESSONS if lesson.number == number for exercise in lesson.parts):
        solution = hints_of(BY_NUMBER[number])[exercise.name][-1]
        assert code_lines(solution) & code_lines(shown) == set()
        assert not re.search(rf"^def {exercise.name}\(.*:\n +\S", shown, re.MULTILINE)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_every_part_has_a_stub_three_hints_and_mistakes_of_its_own(lesson: Lesson):
    if lesson.on_torch:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    for exercise in lesson.parts:
        assert re.search(rf"^def {exercise.name}\(", stub_of(lesson), re.MULTILINE)
        assert len(hints_of(lesson)[exercise.name]) == 3
    assert {*typed_mistakes(lesson)} <= {exercise.name for exercise in lesson.parts}


@pytest.mark.slow
@pytest.mark.nightly_cases(but=["01b"])  # checkpoints/build.py --check, a step of `.ci/run`, runs them too
@EVERY_LESSON
def test_a_lesson_runs_as_a_plain_script_and_up_to_13_with_numpy_alone(number: str, tmp_path: Path):
    if number == "14":
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    lesson = str(page(FOLDER, number).with_name("lesson.py"))
    alone = ["-c", NUMPY_ONLY] if number <= "13" else []
    done = subprocess.run([sys.executable, *alone, lesson], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout

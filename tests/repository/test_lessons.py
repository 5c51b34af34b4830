"""Every lesson is whole: nine blocks, hints, mistakes and a stub for each part; and it runs as a plain script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.generated.pages import FOLDER, page
from llorch.apps.learn.lessons import LESSONS, Lesson, hints_of, stub_of, typed_mistakes
from llorch.stages.table import CHECKPOINTS

BLOCKS = ("where we are", "idea", "maths", "picture", "reference", "run it", "mistake", "exercise", "engines differ")
EVERY_LESSON = pytest.mark.parametrize("number", CHECKPOINTS)
FETCHED = re.compile(r"!\[[^]]*\]\(https?:|<(?:img|script|iframe|link|video)\b")
NUMPY_ONLY = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "matplotlib", "transformers", "peft", "llama_cpp", "scipy"]))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@EVERY_LESSON
def test_a_page_has_the_nine_blocks_in_their_order(number: str):
    text = page(FOLDER, number).read_text(encoding="utf-8")
    headings = iter(re.findall(r"^## (.*)$", text.lower(), re.MULTILINE))
    assert [block for block in BLOCKS if not any(block in heading for heading in headings)] == []
    assert f"llorch learn check {number}" in text
    assert "](fig/where.svg)" in text


@EVERY_LESSON
def test_a_page_shows_nothing_that_is_fetched_from_elsewhere(number: str):
    assert not FETCHED.search(page(FOLDER, number).read_text(encoding="utf-8"))
    for figure in page(FOLDER, number).parent.glob("fig/*.svg"):
        assert not re.search(r"(?:href|src)=[\"'](?!#|data:)|url\((?!#)|@import", figure.read_text(encoding="utf-8"))


@EVERY_LESSON
def test_a_page_folds_the_reference_code_that_the_exercise_asks_for(number: str):
    text = page(FOLDER, number).read_text(encoding="utf-8")
    shown = re.sub(r"<details>.*?</details>", "", text[: text.index("## Exercise")], flags=re.DOTALL)
    defined = set(re.findall(r"^def (\w+)\(", shown, re.MULTILINE))
    assert "<details>" in text[: text.index("## Exercise")]
    assert not defined & {exercise.name for lesson in LESSONS if lesson.number == number for exercise in lesson.parts}


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


@pytest.mark.parametrize("path", ["checkpoints/guide/learning.md", "checkpoints/README.md"])
def test_the_tables_list_the_lessons_in_their_order_with_their_minutes(path: str):
    text = (FOLDER.parent / path).read_text(encoding="utf-8").split("<!-- generated: ")[0]
    found = {
        no: int(m) for no, m in re.findall(r"^\| (\w+) \| \[[\w ]+\]\([^)]*\) \|.*\| (\d+) \|$", text, re.MULTILINE)
    }
    assert sorted(found) == sorted(CHECKPOINTS)
    told = {lesson.number: lesson.minutes for lesson in LESSONS if lesson.number in CHECKPOINTS}
    assert [(number, minutes) for number, minutes in found.items() if number in told] == list(told.items())

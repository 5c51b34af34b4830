"""The command that writes pages: what is not current is found and written; a lesson that fails says where."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner
from helpers.refusals import assert_tells, refuses

pytest.importorskip(
    "jupytext", reason="NOT RUN: jupytext is not installed; pip install -c constraints.txt -e '.[docs]'"
)

from checkpoints import build
from checkpoints.drawing import ROWS, draw, same_figure, strip
from checkpoints.executing import executed
from checkpoints.generated.pages import BLOCK
from checkpoints.generated.tables import Blocks
from llorch.apps.learn.lessons import LESSONS
from llorch.stages.table import CHECKPOINTS

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "checkpoints/01_rms_norm"
MADE: dict[tuple[Callable, str], object] = {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy lesson 01 for the command; each text of the lesson is run and drawn once for all tests.

    The generated blocks are those of the repository's page: `tests/repository/test_pages.py` computes them.
    """
    shutil.copytree(LESSON, tmp_path / LESSON.name)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(
        build, "generated", lambda folder, numbers, index: {folder / LESSON.name / "README.md": tables()}
    )
    monkeypatch.setattr(build, "executed", lambda lesson, root: cached_call(executed, lesson, lesson, root))
    monkeypatch.setattr(build, "draw", lambda number, lesson: cached_call(draw, lesson / "lesson.py", number, lesson))
    return tmp_path / LESSON.name


def cached_call(make: Callable, lesson: Path, *arguments: object) -> object:
    """Make something of a lesson, or return what was made of the same text before."""
    key = make, lesson.read_text(encoding="utf-8")
    if key not in MADE:
        MADE[key] = make(*arguments)
    return MADE[key]


@cache
def tables() -> Blocks:
    """Generated blocks of the repository's page."""
    text = (LESSON / "README.md").read_text(encoding="utf-8")
    return {match["name"]: match["body"].removesuffix("\n") for match in BLOCK.finditer(text)}


def built(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build.main, ["01", *words], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.nightly_cases(but=["fig/eps.*"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "differ in 175 of", "differ in 176 of"),  # what a cell printed
        ("README.md", "| 6.8e-08 |", "| 6.9e-08 |"),  # in a table
        ("lesson.py", "[[3.0, 4.0]]", "[[3.0, 5.0]]"),
        ("fig/eps.svg", "eps forgotten", "eps left out"),
        ("fig/where.svg", ">rms norm<", ">norm<"),
    ],
)
def test_outdated_page_is_named_and_then_written(folder: Path, file: str, old: str, new: str):
    good = {path: path.read_text(encoding="utf-8") for path in [folder / "README.md", *folder.glob("fig/*")]}
    damaged = folder / file
    assert old in damaged.read_text(encoding="utf-8")
    damaged.write_text(damaged.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    shown = folder / "README.md" if file == "lesson.py" else damaged
    exit_code, said = built("--check")
    assert exit_code == 1
    (line,) = said.splitlines()
    assert_tells(line, f"{shown}: not", "python checkpoints/build.py")
    assert built() == (0, f"{shown}: written\n")
    assert file == "lesson.py" or build.same(damaged.read_text(encoding="utf-8"), good[damaged])
    assert built("--check") == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "pattern"),
    [
        ("def f():\n    return 1 / 0\n\n\nf()", r"cell 2: .*line 2, in f\(\)\n(?s:.*)ZeroDivisionError"),
        ("import os\nos._exit(3)", "cell 2: .*died"),
        ("import sys\nprint('oh', file=sys.stderr)", "cell 2: .*stderr: oh"),
    ],
)
def test_a_cell_that_fails_is_named_with_its_last_frame(tmp_path: Path, cell: str, pattern: str):
    lesson = tmp_path / "lesson.py"
    lesson.write_text(f"# %% [markdown]\n# Text.\n\n# %%\n{cell}\n", encoding="utf-8")
    with pytest.raises(ClickException, match=f"^{re.escape(str(lesson))}, {pattern}"):
        executed(lesson, ROOT)


def test_source_by_name_is_folded_below_a_link_to_its_file():
    shown = build.source_of("llorch.model.cache.KVCache.append", label="page")
    assert shown.startswith("[`llorch/model/cache.py`](../../llorch/model/cache.py):\n\n<details>\n")
    assert shown.endswith("\n```\n\n</details>")
    assert "def append(" in shown
    with refuses(ClickException, where="page", got="llorch.nowhere"):
        build.source_of("llorch.nowhere", label="page")


@pytest.mark.parametrize(
    ("new", "same"),
    [
        ('<path id="m0123456789" d="M 1.004 20"/>', True),  # the last digits, and the name that is made of them
        ('<path id="mabcdefabcd" d="M 2.2 20"/>', False),
        ('<path id="mabcdefabcd" d="M 1 20 L 3"/>', False),
        ('<path id="mabcdefabcd" d="L 1 20"/>', False),
    ],
)
def test_figures_are_the_same_but_for_last_digits(new: str, same: bool):
    assert same_figure('<path id="mabcdefabcd" d="M 1 20"/>', new) == same


def test_the_strip_shows_every_checkpoint_in_the_order_of_the_lessons_and_lights_one():
    numbers = [number for row in ROWS.values() for number in row]
    assert sorted(numbers) == sorted(CHECKPOINTS)
    learned = [lesson.number for lesson in LESSONS if lesson.number in CHECKPOINTS]
    assert learned == [number for number in numbers if number in learned]
    for number in numbers:
        assert re.findall(r'class="box lit".*?class="no"[^>]*>(\w+)<', strip(number)) == [number]


@pytest.mark.parametrize("number", CHECKPOINTS)
def test_page_before_the_exercise_folds_the_reference_code(number: str):
    folder = ROOT / f"checkpoints/{number}_{CHECKPOINTS[number]}"
    before, exercise, _ = (folder / "README.md").read_text(encoding="utf-8").partition("\n## Exercise\n")
    folded = re.findall(r"^<details>\n.*?^</details>$", before, re.DOTALL | re.MULTILINE)
    lesson = (folder / "lesson.py").read_text(encoding="utf-8")
    names = [name.rpartition(".")[2] for name in build.SOURCE.findall(lesson.replace("\n# ", "\n"))]
    assert names
    assert exercise
    for name in names:
        code = re.compile(rf"^ *(?:def|class) {name}\b", re.MULTILINE)
        assert [len(code.findall(part)) for part in (before, "\n".join(folded))] == [1, 1], name

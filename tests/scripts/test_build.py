"""The command that writes pages: what is not current is found and written; a lesson that fails says where."""

import json
import re
import shutil
from base64 import b64decode
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
from checkpoints.drawing import draw, same_figure
from checkpoints.executing import executed
from checkpoints.generated.pages import BLOCK
from checkpoints.generated.tables import Blocks
from checkpoints.maps import FORWARD, TRAINING, path_map, strip
from checkpoints.notebook import notebook
from llorch.apps.learn.lessons import BLOCKS, LESSONS
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
        build,
        "generated",
        lambda folder, numbers, index: {
            folder / LESSON.name / "README.md": {},
            folder / LESSON.name / "PORTING.md": tables(),
        },
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
    """Generated blocks of the repository's page for porters."""
    text = (LESSON / "PORTING.md").read_text(encoding="utf-8")
    return {match["name"]: match["body"].removesuffix("\n") for match in BLOCK.finditer(text)}


def built(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build.main, ["01", *words], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.nightly_cases(but=["fig/eps.*"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "[[ 1.697", "[[ 1.698"),  # what a cell printed
        ("PORTING.md", "| 6.8e-08 |", "| 6.9e-08 |"),  # in a table
        ("lesson.py", "[[3.0, 4.0]]", "[[3.0, 5.0]]"),
        ("fig/eps.svg", "eps forgotten", "eps left out"),
        ("fig/where.svg", ">norm<", ">Norm<"),
    ],
)
def test_outdated_page_is_named_and_then_written(folder: Path, file: str, old: str, new: str):
    good = {path: path.read_text(encoding="utf-8") for path in [*folder.glob("*.md"), *folder.glob("fig/*")]}
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


@pytest.mark.parametrize("number", CHECKPOINTS)
def test_the_strip_lights_the_boxes_of_a_lesson(number: str):
    lit = [label for label, numbers in (*FORWARD, *TRAINING) if number in numbers.split()]
    assert lit
    assert re.findall(r'class="step lit">.*?>([^<]+)</text>', strip(number)) == lit


def test_the_map_has_a_box_for_every_lesson_in_the_order_of_the_path():
    drawn = path_map()
    assert re.findall(r'class="no"[^>]*>(\w+)<', drawn) == [lesson.number for lesson in LESSONS]
    assert re.findall(r"<text x[^>]*>([A-Z][^<]*)</text>", drawn) == [*BLOCKS]
    assert (ROOT / "checkpoints/lessons.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("number", CHECKPOINTS)
def test_page_for_porters_folds_the_reference_code(number: str):
    folder = ROOT / f"checkpoints/{number}_{CHECKPOINTS[number]}"
    text = (folder / "PORTING.md").read_text(encoding="utf-8")
    folded = re.findall(r"^<details>\n.*?^</details>$", text, re.DOTALL | re.MULTILINE)
    source = (folder / "porting.py").read_text(encoding="utf-8")
    names = [name.rpartition(".")[2] for name in build.SOURCE.findall(source.replace("\n# ", "\n"))]
    assert names
    for name in names:
        code = re.compile(rf"^ *(?:def|class) {name}\b", re.MULTILINE)
        assert [len(code.findall(part)) for part in (text, "\n".join(folded))] == [1, 1], name


def test_a_notebook_has_the_figures_inside_and_no_link_that_leads_out_of_it(tmp_path: Path):
    (tmp_path / "fig").mkdir()
    (tmp_path / "fig/a.svg").write_text("<svg/>")
    lesson = tmp_path / "lesson.py"
    lesson.write_text(
        "# %% [markdown]\n# ![A](fig/a.svg) [01](../01/README.md) [far](https://a)\n#\n# ```math\n# x\n# ```\n"
        "\n# %%\n1\n"
    )
    markdown, code = json.loads(notebook(lesson))["cells"]
    assert "".join(markdown["source"]) == "![A](attachment:a.svg) 01 [far](https://a)\n\n$$\nx\n$$"
    assert b64decode("".join(markdown["attachments"]["a.svg"]["image/svg+xml"])) == b"<svg/>"
    assert "".join(code["source"]) == "1"

"""`llorch run --impl`: text by a learner's parts."""

from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_tells

from llorch.apps.learn.choice import opened
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS
from llorch.cli.outcome import DIFFERS, MISSING, USAGE
from llorch.judging.verify import stored
from llorch.model.model import load

START = "Once upon a time"
LIVE = LESSONS[: LESSONS.index(BY_NUMBER["12"]) + 1]
OURS = "from llorch.apps.learn.lessons import PARTS\ndef {0}(**given):\n    return PARTS['{0}'].reference(**given)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def write(folder: Path, but: str = "") -> None:
    for lesson in LIVE:
        parts = [exercise.name for exercise in lesson.parts if exercise.name != but]
        (folder / f"{lesson.module}.py").write_text("".join(OURS.format(name) for name in parts))


@pytest.mark.slow_cases("without the block")
@pytest.mark.parametrize("but", ["", "block"], ids=["all", "without the block"])  # which hides what it is made of
def test_the_reference_as_implementation_says_the_same(folder: Path, but: str):
    write(folder, but)
    how = ("run", "story", START, "-n", "8")
    result = invoke(*how, "--impl", str(folder))
    assert result.stdout == invoke(*how, "--impl", "reference").stdout
    assert result.stderr.startswith(f"{folder}: ")
    assert result.stderr.strip().endswith(f": {but or 'none'}")
    drawn = (*how, "-t", "1.1", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2")
    assert invoke(*drawn, "--impl", str(folder)).stdout == invoke(*drawn).stdout


@pytest.mark.nightly_cases("block")
@pytest.mark.parametrize("but", ["", "block"])
def test_and_the_same_as_both_engines(folder: Path, but: str):
    write(folder, but)
    implementation, (_, golden) = opened(str(folder)), stored("story")
    with implementation.installed(live=True):
        tokens = list(load("story").generate(golden.cases["near"].ids, max_tokens=24, ignore_eos=True))
    for engine_output in golden.engine_outputs.values():
        n = min(len(tokens), len(engine_output.greedy))
        assert [token.id for token in tokens][:n] == engine_output.greedy.tolist()[:n]


def test_packed_matrices_are_decoded_for_it(folder: Path, tmp_path: Path):
    write(folder, "block")
    packed = tmp_path / "packed.gguf"
    assert invoke("convert", "story", str(packed), "--type", "Q8_0").exit_code == 0
    how = ("run", str(packed), START, "-n", "4", "--weights", "packed")
    assert invoke(*how, "--impl", str(folder)).stdout == invoke(*how).stdout


def test_the_choice_is_that_of_every_command(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "l06_swiglu.py").write_text(OURS.format("swiglu"))
    (folder.parent / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    monkeypatch.chdir(folder.parent)
    assert_tells(invoke("run", "story", START, "-n", "1").stderr, "mine", "swiglu; borrowed", "bfloat16_to_float32")
    assert "swiglu" not in invoke("run", "story", START, "-n", "1", "--impl", "reference").stderr
    assert "swiglu" not in invoke("run", "story", START, "-n", "1", "--numerics", "ggml").stderr
    result = invoke("run", "story", START, "-n", "1", "--numerics", "ggml", "--impl", "mine")
    assert (result.exit_code, "--impl goes with" in result.stderr) == (USAGE, True)
    result = invoke("run", "story", START, "-n", "1", "--impl", "yours")
    assert (result.exit_code, "llorch learn init yours" in result.stderr) == (MISSING, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return gate / None * up", "swiglu: raised TypeError: unsupported operand"),
        ("return (gate * up)[:, :3]", "swiglu: expected y of shape (5, 448), got (5, 3)"),
        ("return gate * np.nan", "swiglu: y has "),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_and_the_frames(folder: Path, body: str, said: str):
    (folder / "l06_swiglu.py").write_text(f"import numpy as np\ndef swiglu(gate, up):\n    {body}\n")
    result = invoke("run", "story", START, "-n", "4", "--impl", str(folder))
    *_, last = result.stderr.splitlines()
    assert result.exit_code == DIFFERS
    assert last.startswith(f"llorch: {said}")
    assert ("l06_swiglu.py:3  " in result.stderr) == ("raised" in said)
    assert "Traceback" not in result.stderr

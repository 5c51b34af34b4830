"""What the README shows is true: its Python runs, its links lead somewhere, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from llorch.cli import main
from llorch.stages import CHECKPOINTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
SHELL = [line for language, block in BLOCKS if not language for line in block.splitlines()]
BUILTIN_ONLY = [line for line in SHELL if line.startswith("llorch") and "path/to" not in line]


def test_the_first_two_blocks_are_the_two_commands():
    assert BLOCKS[0][1].splitlines() == ["pip install -c constraints.txt -e .", "llorch verify"]
    assert BLOCKS[1][1].splitlines() == ['pip install -c constraints.txt -e ".[dev]"', "pytest"]


@pytest.mark.parametrize("line", BUILTIN_ONLY)
def test_a_command_on_built_in_models_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output


def test_the_python_examples_run(capsys: pytest.CaptureFixture[str]):
    import llorch

    theirs: dict[str, object] = {}
    llorch.load("story").forward([1, 2, 3], trace=theirs)  # type: ignore[arg-type]
    first, batch = (block for language, block in BLOCKS if language == "python")
    names = {"other_engines_trace": theirs}
    exec(first, names)
    assert "stages agree" in capsys.readouterr().out
    exec(batch, names)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ")} == {"0", "1"}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_a_link_leads_to_a_file(link: str):
    assert (ROOT / link).exists()


def test_every_checkpoint_is_listed():
    assert re.findall(r"^\| (\w+) \| \[", README, re.MULTILINE) == list(CHECKPOINTS)


def test_the_closing_figures_are_those_of_verify():
    result = CliRunner().invoke(main, ["verify"])
    (n_rows,) = re.findall(r"(\d+) comparisons", result.output)
    assert f"{n_rows} comparisons, all pass" in README
    (n_places,) = re.findall(r"of (\d+) \(stage, layer, model\) rows", result.output)
    assert f"{n_places} (stage, layer, model) rows" in README

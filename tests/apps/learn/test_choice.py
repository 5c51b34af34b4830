"""Choice of the implementation that is checked."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells, refuses

from llorch.apps.learn.check import check
from llorch.apps.learn.choice import chosen, opened
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, stub_of


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a b" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a b" / "deep")
    return tmp_path / "a b"


def test_option_overrides_environment_and_environment_overrides_project(project: Path, monkeypatch: pytest.MonkeyPatch):
    (project / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    assert chosen() == str(project / "mine")
    monkeypatch.setenv("LLORCH_IMPL", "theirs")
    assert chosen() == "theirs"
    assert chosen("cmd:./prog") == "cmd:./prog"


def test_the_nearest_project_counts(project: Path):
    (project / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    (project / "deep" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert chosen() is None


@pytest.mark.parametrize(
    ("impl", "expected"),
    [("cmd:rope --fast", "cmd:rope --fast"), ("cmd:./rope --fast", "cmd:'{0}'/./rope --fast"), ("", None)],
)
def test_a_program_of_a_project_lies_beside_it(project: Path, impl: str, expected: str | None):
    (project / "pyproject.toml").write_text(f'[tool.llorch]\nimpl = "{impl}"\n')
    assert chosen() == (expected and expected.format(project))


@pytest.mark.parametrize("text", ["[tool", "[tool]\nllorch = 3\n", "[tool.llorch]\nimpl = 3\n", "tool = 3"])
def test_a_project_that_cannot_be_read_is_named(project: Path, text: str):
    (project / "pyproject.toml").write_text(text)
    with refuses("Malformed", "pyproject.toml", "[tool.llorch]"):
        chosen()


@pytest.mark.parametrize(
    ("spec", "error", "facts"),
    [
        ("nowhere", FileNotFoundError, ["'nowhere'", "learn init nowhere", "cmd:PROGRAM"]),
        ("file.py", ValueError, ["folder", "'file.py'", "cmd:file.py"]),
        (".", ValueError, ["l01_rms_norm.py", "'.'", "learn init ."]),
        ("cmd:", FileNotFoundError, ["cmd:", "program", "nothing"]),
        ("cmd:./nowhere", FileNotFoundError, ["cmd:", "'./nowhere'"]),
        ("cmd:'", ValueError, ["quotation"]),
    ],
    ids=["nowhere", "file", "no lesson", "nothing", "no program", "quotation"],
)
def test_what_is_not_there_is_said(project: Path, spec: str, error: type[Exception], facts: list[str]):
    Path("file.py").write_text("")
    with refuses(error, *facts):
        opened(spec)


@pytest.mark.parametrize(
    ("file", "head", "facts"),
    [
        ("l01_rms_norm", "def rmsnorm(x, w, eps):", ["rmsnorm", "rms_norm"]),
        ("l01_rms_norm", "def norm(x, weight, eps):", ["norm", "rms_norm"]),
        ("l02_qkv", "def rms_norm(x, weight, eps):", ["l02_qkv.py", "l01_rms_norm.py"]),
        ("l01_rms_norm", "def squares(x):", []),
    ],
)
def test_part_under_another_name_or_in_another_file_is_noted(tmp_path: Path, file: str, head: str, facts: list[str]):
    (tmp_path / "l01_rms_norm.py").write_text("")
    (tmp_path / f"{file}.py").write_text(f"{head}\n    return x\n")
    found = check(BY_NUMBER["01"], opened(str(tmp_path)))
    assert len(found.notes) == bool(facts)
    assert_tells(str(found), "rms_norm", *facts)


def test_stubs_have_no_part_under_another_name(tmp_path: Path):
    for lesson in LESSONS:
        (tmp_path / f"{lesson.module}.py").write_text(stub_of(lesson))
    assert opened(str(tmp_path)).renamed == {}


@pytest.mark.slow
def test_pytest_checks_an_implementation_and_nothing_else(tmp_path: Path):
    (tmp_path / "l06_swiglu.py").write_text(
        "def swiglu(gate, up):\n    return gate * up\ndef feed_forward(**given):\n    raise NotImplementedError\n"
    )
    which = "checkpoint_06- or checkpoint_04"  # not 06b
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "-k", which, f"--impl={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert "2 failed, 2 skipped" in done.stdout
    assert "test_implementation[checkpoint_06-isolated] FAILED" in done.stdout
    assert "BORROWED: attention_scores, attention_probs" in done.stdout
    assert "first wrong number" in done.stdout
    assert "Traceback" not in done.stdout

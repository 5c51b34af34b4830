"""`llorch learn init` and `check`, where the folder comes from, and the exit codes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.one_model import lessons_on_one_model
from helpers.refusals import assert_cli_refuses

WRONG = "def rms_norm(x, weight, eps):\n    print('seen')\n    return x * weight\n"
RAISES = "def rms_norm(x, weight, eps):\n    print('seen')\n    return nothing\n"  # for which no cause is sought
RIGHT = """import numpy as np
def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight
"""


@pytest.fixture(scope="module", autouse=True)
def one_model() -> Iterator[None]:
    with lessons_on_one_model():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def write(folder: Path, text: str) -> None:
    (folder / "l01_rms_norm.py").write_text(text)


def check(folder: Path, *words: str):
    return invoke("learn", "check", "--impl", str(folder), *words)


@pytest.mark.nightly_cases("def rms_norm(x, weight, *", "text0-0")
@pytest.mark.parametrize(("text", "code"), [(RIGHT, 0), (WRONG, 1), ("def rms_norm(x:\n", 1), ("", 0)])
def test_all_that_is_written_has_to_pass(folder: Path, text: str, code: int):
    write(folder, text)
    assert check(folder, "01", "--strict").exit_code == code


def test_verdicts_go_to_stdout_and_what_the_code_prints_to_stderr(folder: Path):
    write(folder, RAISES)
    found = check(folder, "rms_norm", "03")
    assert found.stdout.split()[:2] == ["checkpoint_01_rms_norm", "FAIL"]
    assert found.stdout.endswith("1 FAIL, 1 BORROWED\n")
    assert "01 prints: seen\n" in found.stderr
    assert "seen" not in found.stdout


def test_json_has_what_stands_in_the_verdict(folder: Path):
    write(folder, RAISES)
    found = json.loads(check(folder, "00", "01", "--json", "--chain").stdout)
    assert (found["version"], found["mode"], found["impl"]) == (2, "chained", str(folder))
    assert [(each["lesson"], each["verdict"]) for each in found["lessons"]] == [("00", "NOT RUN"), ("01", "FAIL")]
    assert "raised NameError" in found["lessons"][1]["fault"]


def test_the_whole_traceback_is_shown_when_asked_for(folder: Path):
    write(folder, RAISES)
    assert "guard.py" not in check(folder, "01").stdout
    assert "guard.py" in check(folder, "01", "--full").stdout


@pytest.mark.parametrize("impl", [None, "LLORCH_IMPL", "--impl"])
def test_the_folder_is_said_by_option_environment_or_project(
    folder: Path, impl: str | None, monkeypatch: pytest.MonkeyPatch
):
    write(folder, RAISES)
    other = folder.parent / "other"
    other.mkdir()
    words = ["--impl", str(folder)] if impl == "--impl" else []
    monkeypatch.chdir(Path("/") if impl else folder)
    if impl is not None:
        monkeypatch.setenv("LLORCH_IMPL", str(other if words else folder))
    found = invoke("learn", "check", "01", *words)
    assert (found.exit_code, found.stdout.split()[:2]) == (1, ["checkpoint_01_rms_norm", "FAIL"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--impl", __file__], 2, ("folder", __file__)),
        (["--impl", "cmd:no-such-program"], 3, ("cmd:", "'no-such-program'")),
        (["--seconds", "0"], 2, ("--seconds", "0.0", "0<x")),
    ],
)
def test_usage(folder: Path, words: list[str], code: int, said: tuple[str, ...]):
    write(folder, RIGHT)
    assert_cli_refuses(check(folder, *words), code, *said)


def test_a_program_is_checked_and_nothing_is_kept_of_it(folder: Path):
    program = folder / "norm"
    program.write_text(f"#!/bin/sh\n[ $1 = rms_norm ] || exit 69\nexec {sys.executable} -c 'print(1 / 0)'\n")
    program.chmod(0o755)
    found = check(folder, "--impl", f"cmd:{program}", "01", "03")
    assert [line.split()[1] for line in found.stdout.splitlines() if line.startswith("check")] == ["FAIL", "BORROWED"]
    assert "01 prints: ZeroDivisionError" in found.stderr
    assert {path.name for path in folder.iterdir()} == {"norm"}


def test_known_mistakes_fail_where_code_passes(folder: Path):
    write(folder, RIGHT)
    (folder / "l02_qkv.py").write_text("def linear(x, weight, bias):\n    return nothing\n")
    right, wrong = json.loads(check(folder, "01", "02", "--teeth", "--json").stdout)["lessons"]
    assert (len(right["teeth"]) > 3, "teeth" in wrong) == (True, False)


def test_without_a_folder_the_command_that_makes_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert_cli_refuses(invoke("learn", "check"), 2, "learn init my_llama")


def test_a_project_file_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pyproject.toml").write_text("[tool")
    monkeypatch.chdir(tmp_path)
    assert_cli_refuses(invoke("learn", "check"), 2, f"llorch: {tmp_path}/pyproject.toml: ")

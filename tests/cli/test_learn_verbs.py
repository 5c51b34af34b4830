"""The verbs of `llorch learn` that look at lessons and at progress."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.one_model import lessons_on_one_model
from helpers.refusals import assert_cli_refuses

import llorch
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, WARM_UP, hints_of, stub_of
from llorch.apps.learn.progress import LearnerProgress
from llorch.apps.learn.sandbox import Outcome, outcomes

NORM = BY_NUMBER["01"]
STEPS = hints_of(NORM)["rms_norm"]
RIGHT = f"import numpy as np\n{STEPS[-1]}"


@pytest.fixture(scope="module", autouse=True)
def one_model() -> Iterator[None]:
    with lessons_on_one_model():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLORCH_IMPL", str(tmp_path))
    return tmp_path


def learn(*words: str) -> str:
    found = invoke("learn", *words)
    assert (found.exit_code, found.stderr) == (0, "")
    return found.stdout


def write(folder: Path, text: str) -> None:
    (folder / "l01_rms_norm.py").write_text(text)


def stored_progress(folder: Path) -> dict:
    return json.loads((folder / ".llorch" / "progress.json").read_text())["lessons"]["01"]


def test_init_writes_what_is_missing_and_says_what_comes_next(tmp_path: Path):
    mine = tmp_path / "mine"
    mine.mkdir()
    write(mine, "mine")
    found = invoke("learn", "init", str(mine))
    assert found.stdout.startswith(f"{mine}: ")
    assert re.findall(r"\b\d+\b", found.stdout.removeprefix(str(mine))) == [str(len(LESSONS)), "1"]
    assert found.stderr.endswith(f"cd {mine} && llorch learn\n")
    assert (mine / "l01_rms_norm.py").read_text() == "mine"
    assert {path.name for path in mine.iterdir()} == {"pyproject.toml", *(f"{each.module}.py" for each in LESSONS)}
    assert all((mine / f"{each.module}.py").read_text() == stub_of(each) for each in LESSONS if each != NORM)


def test_a_hint_is_one_step_more_at_every_call(folder: Path):
    write(folder, stub_of(NORM))
    for n in (1, 2, 3, 3):
        shown = learn("hint", "01")
        assert [step.strip() in shown for step in STEPS] == [step < n for step in range(3)]
        assert shown.startswith("rms_norm, hint 1 of 3\n")
        assert stored_progress(folder)["hints"] == {"rms_norm": n}


def test_without_a_part_hints_are_of_what_is_not_written(folder: Path):
    (folder / "l04_attention_scores.py").write_text(
        "def attention_scores(q, k):\n    return q\ndef attention_probs(scores):\n    raise NotImplementedError\n"
    )
    assert learn("hint", "04").startswith("attention_probs, hint 1")
    assert learn("hint", "04", "attention_scores").startswith("attention_scores, hint 1")
    (folder / "l04_attention_scores.py").write_text("def")
    assert learn("hint", "04").startswith("attention_scores, hint 1")


def test_without_a_part_hints_are_of_the_part_that_the_last_check_called_wrong(folder: Path):
    rope = BY_NUMBER["01b"]
    solved = stub_of(rope).replace("raise NotImplementedError", "return None")
    (folder / f"{rope.module}.py").write_text(solved)
    assert learn("hint", "01b").startswith("frequencies, hint 1")
    for where, part in (("mine/l01b_rope.py:14 rope()", "rope"), ("", "frequencies"), ("rope() of cmd:a b", "rope")):
        record = {"where": where, "compared": 3}
        LearnerProgress(folder, print).note(Outcome("01b", "FAIL" if where else "PASS", "", record))
        assert learn("hint", "01b").startswith(f"{part}, hint 1")


def test_unknown_part_is_a_usage_error(folder: Path):
    assert_cli_refuses(invoke("learn", "hint", "01", "rms_nrm"), 2, "'rms_nrm'", "'rms_norm'")
    assert not (folder / ".llorch").exists()


def test_a_solution_below_the_stub_passes_and_is_remembered(folder: Path):
    write(folder, f"{stub_of(NORM)}\n\n{learn('solution', '01')}")
    assert [outcome.label for outcome in outcomes(str(folder), ["01"], progress=pytest.fail)] == ["PASS"]
    assert stored_progress(folder)["solution"] is True


def test_list_next_and_progress_say_how_it_stands(folder: Path):
    write(folder, RIGHT)
    assert "\n00w warm_up, " in learn("next")
    learn("check", "01")
    learn("hint", "01")
    row = next(line.split() for line in learn("list").splitlines() if line.startswith("01 "))
    assert row == ["01", "rms_norm", str(NORM.minutes), "PASS", "1", "1"]
    assert learn("progress").startswith(f"1 of {len(LESSONS)} lessons pass, 1 attempts, 1 hints, 0 solutions seen; ")
    said = json.loads(learn("progress", "--json"))
    assert (said["passed"], said["lessons"]["01"]["attempts"]) == (["01"], 1)
    assert said["minutes_left"] == sum(lesson.minutes for lesson in LESSONS) - NORM.minutes
    write(folder, f"{RIGHT}\n")
    assert "CHANGED" in learn("list")
    assert learn("progress").startswith("0 of")


def test_next_has_the_commands_and_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    read, write, check = (line.split(maxsplit=1)[1] for line in learn("next").splitlines()[2:])
    assert (read, write, check) == ("llorch learn open 00w", "l00w_warm_up.py", "llorch learn check 00w")


def test_reset_keeps_what_was_there(folder: Path):
    write(folder, RIGHT)
    learn("check", "01")
    assert learn("reset", "01").endswith(" l01_rms_norm.py.bak\n")
    assert (folder / "l01_rms_norm.py").read_text() == stub_of(NORM)
    assert (folder / "l01_rms_norm.py.bak").read_text() == RIGHT
    assert (stored_progress(folder)["status"], stored_progress(folder)["attempts"]) == ("", 1)


def test_a_certificate_can_be_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    few = {number: BY_NUMBER[number] for number in ("00", "01", "02")}
    monkeypatch.setattr("llorch.apps.learn.lessons.BY_NUMBER", few)
    write(folder, RIGHT)
    assert "1 PASS" in learn("certificate")
    said = json.loads((folder / "certificate.json").read_text())
    assert said["lessons"].keys() == few.keys()
    assert said["versions"]["llorch"] == llorch.__version__
    assert said["lessons"]["01"] == {"verdict": "PASS", "comparisons": said["lessons"]["01"]["comparisons"]}
    assert (said["lessons"]["01"]["comparisons"] > 100, said["code"].keys()) == (True, {"l01_rms_norm.py"})
    assert "micro-llama/truth.safetensors.xz" in said["goldens"]
    again = ("certificate", "--check", str(folder / "certificate.json"))
    assert learn(*again).startswith(f"{folder / 'certificate.json'}: ")
    write(folder, RIGHT.replace("eps", "0.1"))
    found = invoke("learn", *again)
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == ["lessons", "code"]
    assert (found.exit_code, "'verdict': 'FAIL'" in found.stdout) == (1, True)


def test_a_certificate_of_a_stub_that_nobody_has_changed_has_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch):
    few = {number: BY_NUMBER[number] for number in ("00", WARM_UP)}
    monkeypatch.setattr("llorch.apps.learn.lessons.BY_NUMBER", few)
    stub = folder / f"{BY_NUMBER[WARM_UP].module}.py"
    stub.write_text(stub_of(BY_NUMBER[WARM_UP]))
    assert "FAIL" not in learn("certificate")
    stub.write_text(stub.read_text() + "\n")
    assert "1 FAIL" in learn("certificate")


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1, "lessons": 3}'])
def test_invalid_certificate_is_refused(folder: Path, text: str):
    (folder / "c.json").write_text(text)
    assert invoke("learn", "certificate", "--check", str(folder / "c.json")).exit_code in (1, 2)


WRONG = "def rms_norm(x, weight, eps):\n    print('seen')\n    return x * weight\n"
RAISES = "def rms_norm(x, weight, eps):\n    print('seen')\n    return nothing\n"  # for which no cause is sought
RIGHT_NORM = """import numpy as np
def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight
"""


@pytest.fixture
def project_folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.llorch]\nimpl = "mine"\n')
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def check(project_folder: Path, *words: str):
    return invoke("learn", "check", "--impl", str(project_folder), *words)


@pytest.mark.nightly_cases("def rms_norm(x, weight, *", "text0-0")
@pytest.mark.parametrize(("text", "code"), [(RIGHT_NORM, 0), (WRONG, 1), ("def rms_norm(x:\n", 1), ("", 0)])
def test_every_written_function_has_to_pass(project_folder: Path, text: str, code: int):
    write(project_folder, text)
    assert check(project_folder, "01", "--strict").exit_code == code


def test_verdicts_go_to_stdout_and_what_the_code_prints_to_stderr(project_folder: Path):
    write(project_folder, RAISES)
    found = check(project_folder, "rms_norm", "03")
    assert found.stdout.split()[:2] == ["checkpoint_01_rms_norm", "FAIL"]
    assert found.stdout.endswith("1 FAIL, 1 BORROWED\n")
    assert "01 prints: seen\n" in found.stderr
    assert "seen" not in found.stdout


def test_json_has_what_stands_in_the_verdict(project_folder: Path):
    write(project_folder, RAISES)
    found = json.loads(check(project_folder, "00w", "01", "--json", "--chain").stdout)
    assert (found["version"], found["mode"], found["impl"]) == (2, "chained", str(project_folder))
    assert [(each["lesson"], each["verdict"]) for each in found["lessons"]] == [("00w", "NOT RUN"), ("01", "FAIL")]
    assert "raised NameError" in found["lessons"][1]["fault"]


def test_the_whole_traceback_is_shown_when_asked_for(project_folder: Path):
    write(project_folder, RAISES)
    assert "guard.py" not in check(project_folder, "01").stdout
    assert "guard.py" in check(project_folder, "01", "--full").stdout


@pytest.mark.parametrize("impl", [None, "LLORCH_IMPL", "--impl"])
def test_folder_comes_from_option_environment_or_project(
    project_folder: Path, impl: str | None, monkeypatch: pytest.MonkeyPatch
):
    write(project_folder, RAISES)
    other = project_folder.parent / "other"
    other.mkdir()
    words = ["--impl", str(project_folder)] if impl == "--impl" else []
    monkeypatch.chdir(Path("/") if impl else project_folder)
    if impl is not None:
        monkeypatch.setenv("LLORCH_IMPL", str(other if words else project_folder))
    found = invoke("learn", "check", "01", *words)
    assert (found.exit_code, found.stdout.split()[:2]) == (1, ["checkpoint_01_rms_norm", "FAIL"])


@pytest.mark.parametrize(
    ("words", "code", "facts"),
    [
        (["--impl", __file__], 2, ("folder", __file__)),
        (["--impl", "cmd:no-such-program"], 3, ("cmd:", "'no-such-program'")),
        (["--seconds", "0"], 2, ("--seconds", "0.0", "0<x")),
    ],
)
def test_usage(project_folder: Path, words: list[str], code: int, facts: tuple[str, ...]):
    write(project_folder, RIGHT_NORM)
    assert_cli_refuses(check(project_folder, *words), code, *facts)


def test_a_program_is_checked_and_nothing_is_kept_of_it(project_folder: Path):
    program = project_folder / "norm"
    program.write_text(f"#!/bin/sh\n[ $1 = rms_norm ] || exit 69\nexec {sys.executable} -c 'print(1 / 0)'\n")
    program.chmod(0o755)
    found = check(project_folder, "--impl", f"cmd:{program}", "01", "03")
    assert [line.split()[1] for line in found.stdout.splitlines() if line.startswith("check")] == ["FAIL", "BORROWED"]
    assert "01 prints: ZeroDivisionError" in found.stderr
    assert {path.name for path in project_folder.iterdir()} == {"norm"}


def test_known_mistakes_fail_where_code_passes(project_folder: Path):
    write(project_folder, RIGHT_NORM)
    (project_folder / "l02_qkv.py").write_text("def linear(x, weight, bias):\n    return nothing\n")
    right, wrong = json.loads(check(project_folder, "01", "02", "--teeth", "--json").stdout)["lessons"]
    assert (len(right["teeth"]) > 3, "teeth" in wrong) == (True, False)


def test_without_a_folder_the_command_that_makes_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert_cli_refuses(invoke("learn", "check"), 2, "learn init my_llama")


def test_invalid_project_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pyproject.toml").write_text("[tool")
    monkeypatch.chdir(tmp_path)
    assert_cli_refuses(invoke("learn", "check"), 2, f"llorch: {tmp_path}/pyproject.toml: ")

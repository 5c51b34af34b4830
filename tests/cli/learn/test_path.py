"""The path of a learner at the command line: the first start, the route of 90 minutes, all lessons, their pages."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.scripted_learner import paste_hints
from helpers.command_line import invoke

from llorch.apps.learn.lessons import BLOCKS, BY_NUMBER, LESSONS, OPTIONAL, PATH, ROUTE, lesson_fingerprint, stub_of
from llorch.apps.learn.progress import LearnerProgress
from llorch.apps.learn.sandbox import Outcome
from llorch.cli.learn import watch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every stub, in which the learner is."""
    for lesson in LESSONS:
        (tmp_path / f"{lesson.module}.py").write_text(stub_of(lesson))
    monkeypatch.setenv("LLORCH_IMPL", ".")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learn(*words: str) -> str:
    found = invoke("learn", *words)
    assert found.exit_code == 0, found.stderr
    return found.stdout


def note(number: str, label: str, *unwritten: str) -> None:
    """Record the outcome of a check of the current code."""
    record = {"where": "", "compared": 3, "unwritten": [*unwritten]}
    LearnerProgress(Path(), print).note(Outcome(number, label, "", record))


def title() -> str:
    """Number, name and minutes of the step that `llorch learn next` shows."""
    return next(line for line in learn("next").splitlines() if " min: " in line)


def test_route_takes_90_minutes_and_each_block_has_all_or_no_optional_lessons():
    assert sum(step.minutes for step in ROUTE) == 90
    assert {step.lesson for step in PATH} == {lesson for lesson in LESSONS if lesson.number not in OPTIONAL}
    assert {"00", "13", "14", "05b", "06b"} == OPTIONAL
    assert all(len({lesson.number in OPTIONAL for lesson in lessons}) == 1 for lessons in BLOCKS.values())


def test_without_a_folder_the_route_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LLORCH_IMPL", raising=False)
    monkeypatch.chdir(tmp_path)
    shown = learn()
    assert all(f"  {step.lesson.number:<4} {step.lesson.name} " in shown for step in ROUTE)
    assert "llorch learn init my_llama && cd my_llama && llorch learn" in shown
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("agrees", [True, False])
def test_at_a_terminal_the_folder_is_made_if_the_learner_agrees(
    agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr("click.confirm", lambda question, default: agrees)
    assert watch._offer_folder() == agrees
    assert (tmp_path / "my_llama/l00w_warm_up.py").exists() == agrees
    monkeypatch.delenv("LLORCH_IMPL", raising=False)
    assert (invoke("learn", "next").exit_code == 0) == agrees  # the folder is taken from its parent


def test_next_follows_the_route_and_then_the_lessons_that_have_not_passed(folder: Path):
    assert title() == "00w warm_up, 2 min: bfloat16_to_float32"
    assert learn("next").startswith("step 1 of 5 on the route of 90 minutes\n")
    note("00w", "PASS")
    note("01", "FAIL")
    assert title() == "01 rms_norm, 20 min: rms_norm"
    note("01", "PASS")
    assert title() == "01b rope, 25 min: rope"
    note("01b", "BORROWED", "rope", "rope_tables")
    assert title() == "01b rope, 25 min: rope"
    note("01b", "BORROWED", "rope_tables")
    assert title() == "07 block, 8 min: read the page"
    assert "write" not in learn("next")
    learn("open", "7")
    assert title() == "12 generation, 35 min: positions, generate"
    note("12", "PASS")
    assert "the route is done; hear your code: llorch run story" in learn("next")
    assert title() == "01b rope, 45 min: frequencies, scale_frequencies, rope_tables, rope"
    (folder / "l01b_rope.py").write_text("changed = 1\n")
    assert title() == "01b rope, 25 min: rope"


def test_next_offers_the_museum_and_optional_blocks_at_the_end_of_a_block_only(folder: Path):
    route = [step.lesson.number for step in ROUTE]
    for number in route:
        note(number, "PASS")
    for step in PATH:
        if step.lesson.number in route:
            continue
        shown = learn("next")
        assert f"\n{step.lesson.number} {step.lesson.name}, " in f"\n{shown}"
        is_first = step.lesson.number in ("08", "15")
        assert ("llorch learn museum" in shown) == is_first
        assert ("Files and tokens (optional): 00, 13; On torch (optional): 14" in shown) == (step.lesson.number == "15")
        note(step.lesson.number, "PASS")
    assert title().startswith("00 foundation, ")
    assert "this one is optional" in learn("next")
    for number in OPTIONAL:
        note(number, "PASS")
    assert learn("next").startswith("every lesson passes")


@pytest.mark.parametrize("verb", ["check", "hint", "solution", "reset", "open"])
def test_number_needs_no_first_zero(verb: str, folder: Path):
    for short, number in (("1", "01"), ("1b", "01b"), ("0w", "00w")):
        found = invoke("learn", verb, short)
        assert found.exit_code == (1 if (verb, number) == ("check", "00w") else 0), found.stderr
        assert any(part.name in found.output for part in BY_NUMBER[number].parts) or number in found.output


def test_list_has_the_blocks_and_marks_the_optional_ones(folder: Path):
    lines = [line.strip() for line in learn("list").splitlines()[1:]]
    expected = [text for title, lessons in BLOCKS.items() for text in (title, *(f"{x.number:<3} " for x in lessons))]
    assert len(lines) == len(expected)
    assert all(line.startswith(text.strip()) for line, text in zip(lines, expected, strict=True))


def test_a_named_page_opens_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert learn("open", "2").startswith("# 02")
    assert not [*tmp_path.iterdir()]


def test_open_shows_the_page_or_its_address_on_the_site(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert learn("open", "01") == (BY_NUMBER["01"].folder / "README.md").read_text() + "\n"
    assert "00" in learn("open").splitlines()[0]  # the first step: its page is that of 00
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    learn("open", "01b", "--site", "https://example.org/llorch/")
    (folder / "site").mkdir()
    monkeypatch.setenv("LLORCH_SITE", "site")
    learn("open", "00w")
    assert addresses[0] == "https://example.org/llorch/checkpoints/01b_rope/README.html"
    assert addresses[1] == (folder / "site/checkpoints/00_foundation/README.html").as_uri()


def test_progress_and_certificate_of_an_earlier_version_stay_valid(folder: Path):
    (folder / "l01_rms_norm.py").write_text(paste_hints(BY_NUMBER["01"]))
    passed = lesson_fingerprint(folder, BY_NUMBER["01"])
    empty = {"attempts": 0, "hints": {}, "solution": False, "tried": "", "passed": "", "wrong": ""}
    states = {
        "00": {**empty, "status": "FAIL", "attempts": 3, "hints": {"merge": 2}, "tried": "x", "wrong": "merge"},
        "01": {**empty, "status": "PASS", "attempts": 1, "solution": True, "tried": passed, "passed": passed},
        "05b": {**empty, "status": "BORROWED", "hints": {"delta_rule": 1}},
    }
    (folder / ".llorch").mkdir()
    (folder / ".llorch/progress.json").write_text(json.dumps({"version": 1, "lessons": states}))
    assert learn("progress").startswith(f"1 of {len(LESSONS)} lessons pass, 4 attempts, 3 hints, 1 solutions seen; ")
    rows = {line.split()[0]: line.split() for line in learn("list").splitlines() if line.startswith(("0", "1", "2"))}
    assert rows["01"][3:] == ["PASS", "1", "solution", "seen"]
    assert rows["00"][3:] == ["CHANGED", "3", "2"]
    assert rows["05b"][3:] == ["BORROWED", "1"]
    note("02", "PASS")
    kept = json.loads((folder / ".llorch/progress.json").read_text())["lessons"]
    assert all(kept[number].items() >= state.items() for number, state in states.items())


def test_certificate_says_what_was_reached_and_an_older_one_can_be_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    first_two = [lesson for lessons in [*BLOCKS.values()][:2] for lesson in lessons]
    labels = dict.fromkeys([lesson.number for lesson in LESSONS], "BORROWED")
    chained: list[str] = []

    def fake_outcomes(source: str, numbers: list[str], mode: str = "isolated", **_: object) -> list[Outcome]:
        chained.append(mode)
        is_chain_wrong = mode == "chained" and len(chained) == 5
        return [Outcome(n, "FAIL" if is_chain_wrong else labels[n], "", {"compared": 3}) for n in numbers]

    monkeypatch.setattr("llorch.apps.learn.sandbox.outcomes", fake_outcomes)
    for file in folder.glob("l*.py"):
        file.write_text(f"{file.read_text()}\n")  # else it is an untouched stub
    path = folder / "certificate.json"
    learn("certificate")
    assert json.loads(path.read_text())["reached"] == {"blocks": [], "text": []}
    labels |= {lesson.number: "PASS" for lesson in first_two}
    shown = learn("certificate")
    reached = json.loads(path.read_text())["reached"]
    assert reached["blocks"] == [*BLOCKS][:2]
    assert reached["text"][-1] == "story"
    assert chained == ["isolated", "isolated", "chained"]
    assert f"complete: {'; '.join(reached['blocks'])}" in shown
    assert "your functions, all together, wrote the text of both engines with micro-llama, " in shown
    learn("certificate", "-o", "unchained.json")
    assert json.loads((folder / "unchained.json").read_text())["reached"]["text"] == []
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "reached"} | {"version": 2}
    (folder / "older.json").write_text(json.dumps(older))
    assert "every hash and verdict matches" in learn("certificate", "--check", "older.json")
    labels["05"] = "FAIL"
    found = invoke("learn", "certificate", "--check", str(path))
    assert (found.exit_code, "reached: text" in found.stdout) == (1, True)


def test_trace_has_the_learners_numbers_beside_those_of_llamacpp(folder: Path):
    (folder / "l01_rms_norm.py").write_text(paste_hints(BY_NUMBER["01"]))
    rows = {line.split()[0]: line for line in learn("trace").splitlines()}
    assert rows["l0.attn_norm"].split()[-1] == "PASS"
    assert rows["logits"].split()[-1] == "PASS"
    numbers = [float(word) for word in rows["l0.attn_norm"].split()[1:7]]
    assert numbers[:3] == pytest.approx(numbers[3:], rel=1e-4)
    (folder / "l01_rms_norm.py").write_text("def rms_norm(x, weight, eps):\n    return x * weight\n")
    found = invoke("learn", "trace", "--html", "page.html")
    wrong = [line.split()[0] for line in found.stdout.splitlines() if line.rstrip().endswith("FAIL")]
    assert (found.exit_code, wrong[0]) == (1, "l0.attn_norm")
    page = (folder / "page.html").read_text()
    assert "l0.attn_norm" in page
    assert "beside llama.cpp on micro-llama" in page

"""Every lesson taken by a script: stubs are borrowed, the last hint passes, each typed mistake has its name."""

import shutil
from pathlib import Path

import pytest
from fakes.scripted_learner import ALIKE, TAUGHT, by_hand, named, pasted, possible, typed, untyped, written
from helpers.command_line import invoke

from llorch.apps.learn.check import check
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, WARM_UP, Lesson, hints_of, stub_of, typed_mistakes
from llorch.apps.learn.verdict import BORROWED
from llorch.stages.comparison import FAIL, PASS

TYPED, FIRST = list(typed()), {lesson.number: name for lesson, _, name in reversed(list(typed()))}
NUMBERED = pytest.mark.parametrize("lesson", TAUGHT, ids=lambda lesson: lesson.number)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Implementation:
    return written(tmp_path_factory.mktemp("stubs"), TAUGHT[0], stub_of(TAUGHT[0]))


@pytest.mark.slow_cases(but=["09", "10", "13", "16"])
@NUMBERED
def test_a_stub_is_borrowed_and_the_last_hint_passes(lesson: Lesson, stubs: Implementation, tmp_path: Path):
    word = FAIL if lesson.number == WARM_UP else BORROWED  # that one is written, with a wrong constant
    assert check(lesson, stubs).word == word
    found = check(lesson, written(tmp_path, lesson, pasted(lesson)))
    assert (found.word, found.fault, found.is_honest) == (PASS, "", False), str(found)
    assert {*hints_of(lesson)} == {exercise.name for exercise in lesson.parts}


@pytest.mark.nightly_cases(
    but=["*-selected-first-row", "*-loss-prompt-not-masked", "*-divides-negative-logits", "q4_0-*-of-neighbour"]
)
@pytest.mark.parametrize(
    ("lesson", "part", "name"),
    [
        pytest.param(
            *each, marks=() if FIRST[each[0].number] == each[2] else pytest.mark.nightly, id=f"{each[1]}-{each[2]}"
        )
        for each in TYPED
    ],
)
def test_a_typed_mistake_fails_with_its_name(lesson: Lesson, part: str, name: str):
    found = check(lesson, Implementation("typed", {part: typed_mistakes(lesson)[part][name]}))
    assert (found.word, found.fault) == (FAIL, "")
    assert {name, *ALIKE.get(name, ())} & named(found), str(found)


@NUMBERED
def test_every_mistake_of_a_checkpoint_is_typed_or_said_why_not(lesson: Lesson):
    here, elsewhere = {name for wrong in typed_mistakes(lesson).values() for name in wrong}, untyped(lesson)
    assert {*possible(lesson)} <= here | elsewhere.keys()
    assert not here & elsewhere.keys()
    for name, why in elsewhere.items():
        other = BY_NUMBER.get(why.removeprefix("typed in ").partition(":")[0])
        if why.startswith("typed in ") and other in TAUGHT:
            assert name in {each for wrong in typed_mistakes(other).values() for each in wrong}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "part"), [("01", "rms_norm"), ("04", "attention_scores")])
def test_the_command_takes_a_learner_from_the_stub_to_the_solution(number: str, part: str, tmp_path: Path):
    lesson, folder = BY_NUMBER[number], tmp_path / "mine"
    assert invoke("learn", "init", str(folder)).exit_code == 0
    file, check_it = folder / f"{lesson.module}.py", ("learn", "check", number, "--impl", str(folder))
    assert "BORROWED" in invoke(*check_it).stdout
    file.write_text(pasted(lesson), encoding="utf-8")
    assert (found := invoke(*check_it)).exit_code == 0, found.stdout
    assert "PASS" in found.stdout
    name, function = next(iter(by_hand(lesson)[part].items()))
    shutil.copy(lesson.folder / "mistakes.py", folder / f"typed_{number}.py")  # a learner may have files beside
    typed_in = f"\nfrom typed_{number} import {function.__name__} as {part}\n"
    file.write_text(pasted(lesson) + typed_in, encoding="utf-8")
    found = invoke(*check_it)
    assert (found.exit_code, "FAIL" in found.stdout, name in found.stdout) == (1, True, True)

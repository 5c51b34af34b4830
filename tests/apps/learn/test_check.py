import shutil
from pathlib import Path

import numpy as np
import pytest
from fakes.scripted_learner import (
    ALIKE,
    TAUGHT,
    all_typed_mistakes,
    cause_names,
    handwritten_mistakes,
    paste_hints,
    possible_mistakes,
    untyped_mistakes,
    write_implementation,
)
from helpers.command_line import invoke
from helpers.refusals import assert_tells

from llorch.apps.learn.check import check, check_functions
from llorch.apps.learn.checks import forward
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Call
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, PARTS, WARM_UP, Lesson, hints_of, stub_of, typed_mistakes
from llorch.apps.learn.verdict import BORROWED
from llorch.stages.comparison import FAIL, PASS

REFERENCE = Implementation("reference", {name: exercise.reference for name, exercise in PARTS.items()})

WHOLE_SUITE = forward.suite_of  # before it is replaced by one of fewer cuts


@pytest.mark.nightly_cases(but=["00w", "09", "11", "16"])
@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(each, marks=[pytest.mark.nightly] * (each.number in ("18", "19")), id=each.number)
        for each in LESSONS
    ],
)
def test_the_reference_passes_every_lesson(lesson: Lesson):  # fed goldens the last hints do: the scripted learner
    if lesson.on_torch:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    found = check(lesson, REFERENCE, "chained")
    assert (found.label, found.wrong, found.fault) == (PASS, [], "")
    assert found.comparisons


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_unwritten_functions_are_borrowed(lesson: Lesson):
    if lesson.on_torch:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    found = check(lesson, Implementation("nothing", {}))
    assert (found.label, list(found.unwritten)) == (BORROWED, [exercise.name for exercise in lesson.parts])


def test_a_wrong_formula_fails():
    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps) * weight

    assert check_functions("01", rms_norm=rms_norm).label == FAIL


def naive_softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def first_of_equals(logits: np.ndarray, k: int) -> np.ndarray:
    rank = np.argsort(np.argsort(-logits, kind="stable"))
    return np.where(rank < (k or logits.size), logits, -np.inf)


def always_scaled(grads: dict[str, np.ndarray], max_norm: float) -> tuple[np.ndarray, float]:
    row = np.concatenate([grad.ravel() for grad in grads.values()])
    norm = float(np.linalg.norm(row))
    return row * np.float32(max_norm / (norm + 1e-6)), norm


@pytest.mark.slow_cases(but=["labels", "ties"])
@pytest.mark.parametrize(
    ("lesson", "part", "wrong", "facts"),
    [
        ("04", "attention_probs", naive_softmax, ["probs", "[[[nan, nan, 0]]]", "[[[0.7311, 0.2689, 0]]]"]),
        ("05", "attention_output", lambda context, o_proj, o_bias: context @ o_proj.T, ["y", "[[3]]", "[[3.5]]"]),
        ("06", "swiglu", lambda gate, up: gate * np.exp(gate) / (1 + np.exp(gate)) * up, ["y", "[[0, 1000]]"]),
        ("11", "keep_top_k", first_of_equals, ["logits", "[-inf, 3, -inf, -inf]", "[-inf, 3, 3, -inf]"]),
        ("12", "positions", lambda n_before, n_new: np.arange(n_new) + n_before + 1, ["[6, 7, 8]", "[5, 6, 7]"]),
        ("16", "shifted", lambda labels: np.roll(labels, -1), ["wanted", "[6, 7, 5]", "[6, 7, -100]"]),
        ("18", "clip_by_norm", always_scaled, ["clipped", "[0.6, 0.8]", "[0.3, 0.4]", "max_norm=1"]),
    ],
    ids=["softmax", "bias", "swiglu", "ties", "positions", "labels", "small gradients"],
)
def test_cases_without_goldens_are_checked_too(lesson: str, part: str, wrong: Call, facts: list[str]):
    found = check_functions(lesson, **{part: wrong})
    assert (found.label, found.wrong) == (FAIL, [])
    assert_tells(found.small_errors[part], *facts)


def test_a_check_cuts_each_pass_at_its_ends_and_in_its_middle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "suite_of", WHOLE_SUITE)
    monkeypatch.setattr(forward, "models_of", lambda lesson: ["micro-llama"])
    stage_refs = {each.stage_ref for each in check(BY_NUMBER["03"], REFERENCE).comparisons}
    cut = {case: {each.n_cached for each in stage_refs if each.case == case} - {0} for case in ("near", "far")}
    assert cut == {"near": {1, 6, 11}, "far": {1, 4, 7}}


TYPED, FIRST = (
    list(all_typed_mistakes()),
    {lesson.number: name for lesson, _, name in reversed(list(all_typed_mistakes()))},
)
NUMBERED = pytest.mark.parametrize("lesson", TAUGHT, ids=lambda lesson: lesson.number)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Implementation:
    return write_implementation(tmp_path_factory.mktemp("stubs"), TAUGHT[0], stub_of(TAUGHT[0]))


@pytest.mark.slow_cases(but=["09", "10", "13", "16"])
@NUMBERED
def test_a_stub_is_borrowed_and_the_last_hint_passes(lesson: Lesson, stubs: Implementation, tmp_path: Path):
    word = FAIL if lesson.number == WARM_UP else BORROWED  # that one is written, with a wrong constant
    assert check(lesson, stubs).label == word
    found = check(lesson, write_implementation(tmp_path, lesson, paste_hints(lesson)))
    assert (found.label, found.fault, found.is_rounding) == (PASS, "", False), str(found)
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
    assert (found.label, found.fault) == (FAIL, "")
    assert {name, *ALIKE.get(name, ())} & cause_names(found), str(found)


@NUMBERED
def test_every_mistake_of_a_checkpoint_is_typed_or_has_a_reason(lesson: Lesson):
    here, elsewhere = {name for wrong in typed_mistakes(lesson).values() for name in wrong}, untyped_mistakes(lesson)
    assert {*possible_mistakes(lesson)} <= here | elsewhere.keys()
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
    file.write_text(paste_hints(lesson), encoding="utf-8")
    assert (found := invoke(*check_it)).exit_code == 0, found.stdout
    assert "PASS" in found.stdout
    name, function = next(iter(handwritten_mistakes(lesson)[part].items()))
    shutil.copy(lesson.folder / "mistakes.py", folder / f"typed_{number}.py")  # a learner may have files beside
    typed_in = f"\nfrom typed_{number} import {function.__name__} as {part}\n"
    file.write_text(paste_hints(lesson) + typed_in, encoding="utf-8")
    found = invoke(*check_it)
    assert (found.exit_code, "FAIL" in found.stdout, name in found.stdout) == (1, True, True)

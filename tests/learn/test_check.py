import numpy as np
import pytest

from llorch.learn.check import check, check_functions
from llorch.learn.implementation import Implementation
from llorch.learn.lessons import LESSONS, PARTS, Lesson
from llorch.learn.verdict import BORROWED
from llorch.verify.judge import FAIL, PASS

REFERENCE = Implementation("reference", {name: part.reference for name, part in PARTS.items()})


@pytest.mark.parametrize(
    "lesson",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.number in ("18", "19")), id=each.number) for each in LESSONS],
)
def test_the_reference_passes_every_lesson(lesson: Lesson):  # fed goldens the last hints do: the scripted learner
    found = check(lesson, REFERENCE, "chained")
    assert (found.word, found.wrong, found.fault) == (PASS, [], "")
    assert found.judged


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_what_is_not_written_is_borrowed(lesson: Lesson):
    found = check(lesson, Implementation("nothing", {}))
    assert (found.word, list(found.borrowed)) == (BORROWED, [part.name for part in lesson.parts])


def test_a_wrong_formula_fails():
    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps) * weight

    assert check_functions("01", rms_norm=rms_norm).word == FAIL

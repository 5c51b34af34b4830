"""Functions with a mistake, made from the library, compute the same as a person's own code with that mistake."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fakes.scripted_learner import TAUGHT, by_hand

from llorch.apps.learn.lessons import LESSON_OF, PARTS, typed_mistakes
from llorch.apps.learn.typed_mistakes import make_typed_mistakes

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


POSITIONS = np.arange(5)[:, None] * np.array([1.0, 0.1])
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "embedding": {"ids": np.array([2, 0, 6]), "table": numbers(7, 4)},
    "rms_norm": {"x": numbers(5, 8), "weight": numbers(8), "eps": 1e-2},
    "rope": {"x": numbers(5, 2, 4), "cos": np.cos(POSITIONS), "sin": np.sin(POSITIONS)},
    "append": {"past_k": numbers(2, 3, 4), "past_v": numbers(2, 3, 4), "k": numbers(5, 2, 4), "v": numbers(5, 2, 4)},
    "attention_context": {"probs": numbers(4, 5, 5), "v": numbers(2, 5, 3)},
    "swiglu": {"gate": numbers(5, 8), "up": numbers(5, 8)},
    "topk_weights": {"probs": np.abs(numbers(5, 6)), "ids": np.array([[0, 2]] * 5), "normalised": True},
    "last_row": {"logits": numbers(5, 8)},
    "argmax": {"row": np.array([1, 3, 3], np.float32)},
    "penalise": {"logits": numbers(8), "history": np.array([1, 3, 3]), "penalty": 1.3},
    "lora_delta": {"x": numbers(5, 6), "lora_A": numbers(3, 6), "lora_B": numbers(8, 3), "scaling": 0.5},
    "shifted": {"labels": np.array([-100, 3, 4, 5])},
    "attention_probs_backward": {"grad": numbers(2, 3, 3), "probs": np.abs(numbers(2, 3, 3))},
    "accumulated": {"loss_sums": numbers(3), "n_trained": np.array([2, 3, 4]), "grad_sums": numbers(3, 6)},
}


def twice_typed() -> list[tuple[str, str]]:
    """Mistakes that a lesson's page shows as a person types them, and that the library makes as well."""
    both = ((part, name) for lesson in TAUGHT for part, wrong in by_hand(lesson).items() for name in wrong)
    return [(part, name) for part, name in both if part in GIVEN and name in make_typed_mistakes(PARTS[part])]


@pytest.mark.parametrize(("part", "name"), twice_typed(), ids=["-".join(each) for each in twice_typed()])
def test_code_from_the_library_computes_what_code_typed_by_hand_computes(part: str, name: str):
    theirs = by_hand(LESSON_OF[part])[part][name](**GIVEN[part])
    ours = make_typed_mistakes(PARTS[part])[name](**GIVEN[part])
    for made, expected in zip(*(each if isinstance(each, tuple) else (each,) for each in (ours, theirs)), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
        assert np.asarray(made).dtype == np.asarray(expected).dtype


def test_the_mistakes_that_two_people_typed_are_those_that_pages_show():
    assert {part for part, _ in twice_typed()} == GIVEN.keys()


@pytest.mark.parametrize("part", ["rms_norm", "rope", "swiglu", "append", "lora_delta"])
def test_code_from_the_library_differs_from_the_reference(part: str):
    right = PARTS[part].reference(**GIVEN[part])
    wrong = {name: function(**GIVEN[part]) for name, function in make_typed_mistakes(PARTS[part]).items()}
    assert len(wrong) > 4
    assert not [name for name, made in wrong.items() if np.array_equal(np.asarray(made), np.asarray(right))]


def test_a_lesson_has_its_mistakes_in_the_order_of_the_library_and_by_hand_wins():
    lesson = LESSON_OF["rms_norm"]
    found = typed_mistakes(lesson)["rms_norm"]
    assert [*found] == [*make_typed_mistakes(PARTS["rms_norm"])]
    assert found["norm-eps-outside-root"] is not make_typed_mistakes(PARTS["rms_norm"])["norm-eps-outside-root"]
    assert found["norm-eps-outside-root"].__name__ == "eps_outside_the_root"

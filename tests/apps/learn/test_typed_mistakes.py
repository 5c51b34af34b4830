"""Functions with a mistake, made from the library, compute the same as a person's own code with that mistake."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fakes.scripted_learner import TAUGHT, handwritten_mistakes, possible_mistakes
from helpers.refusals import assert_tells

from llorch.apps.learn.check import FORWARD
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.fault_injection import FaultReport, InjectedFault, inject_faults
from llorch.apps.learn.lessons import BY_NUMBER, LESSON_OF, PARTS, typed_mistakes
from llorch.apps.learn.typed_mistakes import TRAINING_ADAPTERS, make_typed_mistakes
from llorch.diagnosis.mistakes import MISTAKES, Mistake

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
    both = ((part, name) for lesson in TAUGHT for part, wrong in handwritten_mistakes(lesson).items() for name in wrong)
    return [(part, name) for part, name in both if part in GIVEN and name in make_typed_mistakes(PARTS[part])]


@pytest.mark.parametrize(("part", "name"), twice_typed(), ids=["-".join(each) for each in twice_typed()])
def test_code_from_the_library_computes_what_code_typed_by_hand_computes(part: str, name: str):
    theirs = handwritten_mistakes(LESSON_OF[part])[part][name](**GIVEN[part])
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


GRADS = {"a": numbers(2, 3), "b": numbers(4)}
TRAINING_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "lora_scaling": {"r": 8, "lora_alpha": 16.0, "own_r": 4, "own_alpha": 6.0, "use_rslora": True},
    "masked_labels": {"ids": np.array([3, 4, 5]), "learned": np.array([False, True, True])},
    "lora_backward": {
        "grad": numbers(5, 4), "x": numbers(5, 6), "weight": numbers(4, 6), "lora_A": numbers(3, 6),
        "lora_B": numbers(4, 3), "scaling": 0.5,
    },
    "residual_backward": {"grad": numbers(5, 4), "through": numbers(5, 4)},
    "clip_by_norm": {"grads": GRADS, "max_norm": 0.5},
    "adamw_step": {
        "param": numbers(6), "grad": numbers(6), "m": numbers(6), "v": np.abs(numbers(6)), "step": 3, "lr": 0.01,
        "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1,
    },
    "learning_rate": {"step": 5, "schedule": "cosine", "peak": 0.1, "warmup_steps": 3, "total_steps": 20},
    "accumulated": {"loss_sums": numbers(3), "n_trained": np.array([2, 3, 4]), "grad_sums": numbers(3, 6)},
    "merged": {"weight": numbers(4, 6), "lora_A": numbers(3, 6), "lora_B": numbers(4, 3), "scaling": 0.5},
    "gguf_alpha": {"lora_alpha": 16.0, "scalings": np.array([2.0, 2.0]), "ranks": np.array([8, 8])},
}  # fmt: skip
EACH = [(name, part) for name, ways in TRAINING_ADAPTERS.items() for part in ways]


def each_result(returned: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in (returned if isinstance(returned, tuple) else (returned,))]


@pytest.mark.parametrize(("name", "part"), EACH, ids=[f"{name}-{part.rpartition('.')[2]}" for name, part in EACH])
def test_a_row_that_changes_nothing_gives_the_reference(name: str, part: str):
    nothing = Mistake[Any](
        name="nothing-wrong", stages=("loss",), diagnosis="Nothing is wrong.", part=part, wrong=lambda right: right
    )
    made = each_result(TRAINING_ADAPTERS[name][part](nothing, PARTS[name])(**TRAINING_GIVEN[name]))
    expected = each_result(PARTS[name].reference(**TRAINING_GIVEN[name]))
    assert len(made) == len(expected)
    for ours, right in zip(made, expected, strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("name", TRAINING_ADAPTERS)
def test_every_row_of_an_exercise_gives_something_else_than_the_reference(name: str):
    part, given = PARTS[name], TRAINING_GIVEN[name]
    expected = each_result(part.reference(**given))
    wrong = {row: each_result(function(**given)) for row, function in make_typed_mistakes(part).items()}
    # these need other inputs
    unshown = {"adamw-step-counted-per-tensor", "loss-prompt-not-masked", "export-one-alpha", "schedule-without-warmup"}
    shown = {row for row, made in wrong.items() if not all(map(np.array_equal, made, expected))}
    assert wrong
    assert wrong.keys() - shown <= unshown


def test_a_count_of_tensors_goes_up_from_call_to_call():
    counted = make_typed_mistakes(PARTS["adamw_step"])["adamw-step-counted-per-tensor"]
    first, second = (counted(**TRAINING_GIVEN["adamw_step"])[0] for _ in range(2))
    assert not np.array_equal(first, second)


def test_rows_of_a_lesson_have_a_function_and_gradients_of_other_blocks_have_none():
    made = {row for exercise in PARTS.values() for row in make_typed_mistakes(exercise)}
    of_lessons = {row for row, mistake in MISTAKES.items() if mistake.stages[0] in ("token_losses", "parameters")}
    assert of_lessons <= made
    assert not {row for row in made if row.startswith(("gradient-rout", "gradient-decay", "gradient-state"))}


REFERENCE = Implementation("reference", {name: exercise.reference for name, exercise in PARTS.items()})
QUICK = ("03", "10")
# Mistakes hidden in an exercise, or made by `linear`, are injected in other lessons.
AT_LEAST = {"05": 4, "05b": 15, "06": 10, "06b": 15}


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if number in QUICK else pytest.mark.nightly) for number in (*FORWARD, "10")],
)
def test_every_mistake_is_seen_in_a_solution_that_passes(number: str):
    found = inject_faults(BY_NUMBER[number], REFERENCE)
    assert all(each.is_detected for each in found.faults), str(found)
    assert len(found.faults) >= AT_LEAST.get(number, len(possible_mistakes(BY_NUMBER[number])) - 2)


def test_what_is_not_seen_is_said():
    blunt = InjectedFault("rope-missing", "q_rope", 3.0, ())
    sharp = InjectedFault("norm-twice", "attn_norm", np.inf, ("norm-twice",))
    head, line = str(FaultReport("01", [blunt, sharp])).splitlines()
    assert_tells(head, "checkpoint_01", "1 of 2")
    assert_tells(line, "rope-missing", "q_rope", 3)
    taken = str(FaultReport("01", [InjectedFault("rope-missing", "q_rope", np.inf, ("norm-twice",))])).splitlines()
    assert_tells(taken[1], "rope-missing", "q_rope", "norm-twice")

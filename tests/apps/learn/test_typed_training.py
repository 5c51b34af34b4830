"""Functions with a mistake of training, made from rows that replace functions of llorch.

A row that changes nothing gives the reference: what surrounds the wrong function is right.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from llorch.apps.learn.lessons import PARTS
from llorch.apps.learn.typed_mistakes import BROUGHT, make_typed_mistakes
from llorch.diagnosis.mistakes import MISTAKES, Mistake

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


GRADS = {"a": numbers(2, 3), "b": numbers(4)}
GIVEN: Mapping[str, Mapping[str, Any]] = {
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
EACH = [(name, part) for name, ways in BROUGHT.items() for part in ways]


def each_result(returned: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in (returned if isinstance(returned, tuple) else (returned,))]


@pytest.mark.parametrize(("name", "part"), EACH, ids=[f"{name}-{part.rpartition('.')[2]}" for name, part in EACH])
def test_a_row_that_changes_nothing_gives_the_reference(name: str, part: str):
    nothing = Mistake[Any](
        name="nothing-wrong", stages=("loss",), diagnosis="Nothing is wrong.", part=part, wrong=lambda right: right
    )
    made = each_result(BROUGHT[name][part](nothing, PARTS[name])(**GIVEN[name]))
    expected = each_result(PARTS[name].reference(**GIVEN[name]))
    assert len(made) == len(expected)
    for ours, right in zip(made, expected, strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("name", BROUGHT)
def test_every_row_of_an_exercise_gives_something_else_than_the_reference(name: str):
    expected = each_result(PARTS[name].reference(**GIVEN[name]))
    wrong = {row: each_result(function(**GIVEN[name])) for row, function in make_typed_mistakes(PARTS[name]).items()}
    # these need other inputs
    unshown = {"adamw-step-counted-per-tensor", "loss-prompt-not-masked", "export-one-alpha", "schedule-without-warmup"}
    shown = {row for row, made in wrong.items() if not all(map(np.array_equal, made, expected))}
    assert wrong
    assert wrong.keys() - shown <= unshown


def test_a_count_of_tensors_goes_up_from_call_to_call():
    counted = make_typed_mistakes(PARTS["adamw_step"])["adamw-step-counted-per-tensor"]
    first, second = (counted(**GIVEN["adamw_step"])[0] for _ in range(2))
    assert not np.array_equal(first, second)


def test_rows_of_a_lesson_have_a_function_and_gradients_of_other_blocks_have_none():
    made = {row for exercise in PARTS.values() for row in make_typed_mistakes(exercise)}
    of_lessons = {row for row, mistake in MISTAKES.items() if mistake.stages[0] in ("token_losses", "parameters")}
    assert of_lessons <= made
    assert not {row for row in made if row.startswith(("gradient-rout", "gradient-decay", "gradient-state"))}

"""Learning rates: pure functions of the step, equal to those of transformers to the last bit."""

import math

import pytest
from helpers.refusals import refuses

from llorch.training.schedules import SCHEDULES, learning_rate

RUNS = [(0, 10), (1, 10), (3, 10), (10, 10), (12, 10), (7, 1000), (0, 1)]


def rates(schedule: str, warmup_steps: int, total_steps: int, peak: float = 3e-4) -> list[float]:
    kind = {"schedule": schedule, "peak": peak, "warmup_steps": warmup_steps, "total_steps": total_steps}
    return [learning_rate(step, **kind) for step in range(total_steps + 2)]


@pytest.mark.nightly_cases(but=["constant-10-10"])
@pytest.mark.live
@pytest.mark.parametrize(("warmup_steps", "total_steps"), RUNS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_those_of_transformers(schedule: str, warmup_steps: int, total_steps: int):
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    make = getattr(transformers, f"get_{schedule}_schedule_with_warmup")
    lengths = {} if schedule == "constant" else {"num_training_steps": total_steps}
    scheduler = make(optimizer, num_warmup_steps=warmup_steps, **lengths)
    expected = []
    for _ in range(total_steps + 2):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(schedule, warmup_steps, total_steps) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_reached_right_after_the_warm_up(schedule: str):
    actual = rates(schedule, 4, 20)
    assert actual[:5] == [0.0, 3e-4 * 0.25, 3e-4 * 0.5, 3e-4 * 0.75, 3e-4]
    assert max(actual) == actual[4]


def test_linear_and_cosine_fall_to_zero_and_stay_there():
    assert rates("linear", 2, 12)[12:] == [0.0, 0.0]
    assert rates("cosine", 2, 12)[12] == 0.0
    assert math.isclose(rates("cosine", 2, 12)[7], 1.5e-4, rel_tol=1e-12)  # half the peak half way
    assert rates("constant", 2, 12)[2:] == [3e-4] * 12


def test_an_unknown_schedule_is_refused_with_those_that_exist():
    with refuses(ValueError, expected=("constant", "linear", "cosine"), got="'polynomial'"):
        learning_rate(0, schedule="polynomial", peak=1.0, warmup_steps=0, total_steps=1)

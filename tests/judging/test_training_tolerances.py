"""Tolerances: effect of gradient errors on parameters, by hand and in torch's AdamW; tolerances of other engines."""

import numpy as np
import pytest
import torch

from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import OPTIMIZER
from llorch.judging.tolerances.training import (
    CEILINGS,
    FLOAT64_TOLERANCE,
    amplification,
    of_dump,
    of_parameters,
    wide_limit,
)
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import Tolerance

N, SIZE = 200, 1e-9


def test_a_first_step_is_as_sensitive_as_its_gradient_is_small():
    grad = np.array([1e-2, 1e-6])
    state = {"w": 0.1 * grad}, {"w": 0.05 * grad * grad}
    (found,) = amplification([({"w": grad}, *state)], [1e-3], OPTIMIZER)
    roots = np.array([1e-2 + 1e-8, 1e-6 + 1e-8])
    each = 1e-2 * (1 + grad / roots) / roots
    np.testing.assert_allclose(found["w"], [np.sqrt(np.square(each).mean()), each.max()], rtol=1e-12)


def test_float64_tolerance_has_a_minimum_and_grows_with_amplification():
    assert (wide_limit(None).error, wide_limit(None).worst) == (FLOAT64_TOLERANCE, FLOAT64_TOLERANCE)
    tolerance = wide_limit(np.array([0.5, 30.0]))
    assert (tolerance.error, tolerance.worst) == (FLOAT64_TOLERANCE, pytest.approx(30 * FLOAT64_TOLERANCE))


@pytest.mark.parametrize("seed", range(3))
def test_parameters_move_no_further_than_the_bound_says(seed: int):
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=N) * 10.0 ** rng.uniform(-9, -2, N) for _ in range(6)]
    signs = [SIZE * np.abs(grad).max() * rng.choice([-1.0, 1.0], N) for grad in grads]
    straight, taken = steps(grads)
    disturbed, _ = steps([grad + off for grad, off in zip(grads, signs, strict=True)])
    found = amplification(taken, [OPTIMIZER.max_norm] * len(grads), OPTIMIZER)  # so that nothing is clipped
    for moved, other, bound in zip(straight, disturbed, found, strict=True):
        apart = np.abs(moved - other) / OPTIMIZER.learning_rate
        assert apart.max() <= 1.01 * SIZE * bound["w"][1]
        assert np.sqrt(np.square(apart).mean()) <= 1.01 * SIZE * bound["w"][0]


def steps(grads: list[np.ndarray]) -> tuple[list[np.ndarray], list[tuple[dict[str, np.ndarray], ...]]]:
    """Parameters after each step of torch's AdamW, and what `amplification` is made of."""
    w = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([w], lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    moved, taken = [], []
    for grad in grads:
        w.grad = torch.from_numpy(grad)
        optimizer.step()
        state = optimizer.state[w]
        moved.append(w.detach().numpy().copy())
        taken.append(({"w": grad}, *({"w": state[name].numpy().copy()} for name in ("exp_avg", "exp_avg_sq"))))
    return moved, taken


def test_dump_tolerance_grows_with_roundings_up_to_a_ceiling():
    config = open_weights(builtin_path("micro-qwen3")).config
    forward, back = (of_dump(config, stage, "chained", "float32", 10) for stage in ("adapted_logits", "gradient"))
    assert 1e-6 < forward.error < back.error < 1e-4
    assert of_dump(config, "gradient", "chained", "float32", 100_000).error == CEILINGS["chained"]
    assert of_dump(config, "first_moment", "isolated", "bfloat16", 10).error == CEILINGS["isolated"]


def test_parameter_tolerance_adds_ulps_divided_by_the_learning_rate():
    own = of_parameters(np.array([3.0, 4.0]), 1e-4, Tolerance(1e-4, 1e-3))
    assert own.worst == pytest.approx(1e-3 + 4 * 2.0**-23 / 1e-4)

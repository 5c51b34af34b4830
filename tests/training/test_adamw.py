"""AdamW in NumPy, by hand and beside torch's; LoRA+ in the groups of PEFT; learning rates equal to transformers'."""

import math

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.refusals import refuses
from helpers.training_passes import attach_in_peft, peft_name

from llorch.files import open_weights
from llorch.runtime.builtin import builtin_path
from llorch.training.adamw import SCHEDULES, NonFiniteNorm, adamw_step, clip_by_norm, learning_rate, rate_factor

HYPER = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def gradients(rng: np.random.Generator, steps: int, dtype: type) -> list[np.ndarray]:
    """Of very different sizes, some of them zero."""
    shape = (13, 7)
    made = [rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 2, shape) for _ in range(steps)]
    for grad in made:
        grad[:2] = 0
    return [grad.astype(dtype) for grad in made]


def test_one_step_worked_by_hand():
    one = {"step": 1, "lr": 0.1, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.5}
    zero = np.zeros(1)
    param, m, v = adamw_step(np.array([2.0]), np.array([4.0]), zero, zero, **one)
    np.testing.assert_allclose((m, v), ([2.0], [4.0]))
    np.testing.assert_allclose(param, [2.0 * 0.95 - 0.1 * 4 / (4 + 1)])  # corrected: m 4, sqrt(v) 4


def test_moments_and_parameters_are_those_of_torch(rng: np.random.Generator, dtype: type):
    start = rng.standard_normal((13, 7)).astype(dtype)
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, **HYPER)
    param, m, v = start, np.zeros_like(start), np.zeros_like(start)
    ulp = np.finfo(dtype).eps
    for step, grad in enumerate(gradients(rng, 30, dtype), 1):
        param, m, v = adamw_step(param, grad, m, v, step=step, lr=1e-2, **HYPER)
        theirs.grad = torch.from_numpy(grad)
        optimizer.step()
        state = optimizer.state[theirs]
        for actual, expected in ((m, state["exp_avg"].numpy()), (v, state["exp_avg_sq"].numpy())):
            assert actual.dtype == dtype
            # a product and a sum, fused in torch
            assert np.linalg.norm(actual - expected) <= 4 * ulp * np.linalg.norm(expected)
        np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=0, atol=8 * step * ulp)


def test_decay_is_apart_from_the_gradient():
    still = {"step": 3, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}
    zero, param = np.zeros(4), np.arange(4.0)
    after, m, v = adamw_step(param, zero, zero, zero, **still)
    np.testing.assert_array_equal(after, param * 0.95)
    assert not m.any()
    assert not v.any()


def test_the_clipped_gradients_are_those_of_torch(rng: np.random.Generator, dtype: type):
    grads = {"a": rng.standard_normal((3, 5)).astype(dtype), "b": rng.standard_normal(7).astype(dtype)}
    params = [torch.nn.Parameter(torch.zeros_like(torch.from_numpy(grad))) for grad in grads.values()]
    for max_norm in (0.5, 100.0, math.inf):
        for param, grad in zip(params, grads.values(), strict=True):
            param.grad = torch.tensor(grad)
        expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
        clipped, norm = clip_by_norm(grads, max_norm=max_norm)
        assert math.isclose(norm, expected.item(), rel_tol=4 * np.finfo(dtype).eps)
        for actual, param in zip(clipped.values(), params, strict=True):
            assert param.grad is not None
            np.testing.assert_allclose(actual, param.grad.numpy(), rtol=8 * np.finfo(dtype).eps, strict=True)


def test_a_norm_that_is_not_finite_is_refused_with_the_tensors():
    grads = {"good": np.ones(3), "bad": np.array([1.0, np.nan]), "worse": np.array([np.inf])}
    with refuses(NonFiniteNorm, 2, "bad, worse"):
        clip_by_norm(grads, max_norm=1.0)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # PEFT's advice on tied embeddings
def test_rates_of_lora_plus_are_those_of_peft():
    from peft.optimizers import create_loraplus_optimizer

    settings = {"target_modules": ("q_proj", "down_proj", "embed_tokens", "lm_head"), "use_dora": True}
    adapter = random_adapter(open_weights(builtin_path("micro-llama")).config, **settings)
    model = attach_in_peft("micro-llama", adapter, **settings)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    theirs = {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    for name in adapter.flat():
        rate = theirs[peft_name(name, adapter.targets)]
        if name in ("embed_tokens.lora_A", "embed_tokens.lora_B"):
            assert rate == 1e-6  # the group that we do not have
        else:
            assert rate == 1e-3 * rate_factor(name, lr_ratio=16.0), name


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

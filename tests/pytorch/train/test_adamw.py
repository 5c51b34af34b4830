"""AdamW in use: the bits of torch's, a state that continues bit by bit, and refusals before anything is changed."""

import math
from collections.abc import Mapping

import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor, nn

from llorch.pytorch.train.adamw import AdamW
from llorch.training.adamw import NonFiniteNorm

SHAPES = {"q_proj.lora_A": (8, 600), "q_proj.lora_B": (31, 8), "q_proj.magnitude": (31,), "v_proj.lora_B": (700, 8)}
HYPER = {"betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.02}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}


def optimizer(params: dict[str, nn.Parameter], *, lr_ratio: float = 1.0, eight_bit: bool = False) -> AdamW:
    return AdamW(params, lr_ratio=lr_ratio, eight_bit=eight_bit, **HYPER)


def give_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def run(params: dict[str, nn.Parameter], adamw: AdamW, steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        adamw.clip(1.0)
        adamw.step(1e-3 * (step + 1))


def values(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in params.items()}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("ratio", [1.0, 16.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torch_bit_for_bit(dtype: torch.dtype, ratio: float):
    mine, theirs = parameters(dtype), parameters(dtype)
    ours = optimizer(mine, lr_ratio=ratio)
    groups = [{"params": [p], "ratio": 1.0 if name.endswith("lora_A") else ratio} for name, p in theirs.items()]
    torchs = torch.optim.AdamW(groups, **HYPER)
    for step in range(10):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        for group in torchs.param_groups:
            group["lr"] = 1e-3 * (step + 1) * group["ratio"]
        assert ours.clip(1.0) == float(nn.utils.clip_grad_norm_(theirs.values(), 1.0))
        ours.step(1e-3 * (step + 1))
        torchs.step()
        state = ours.state()
        for name, parameter in theirs.items():
            assert torch.equal(mine[name], parameter), (step, name)
            assert torch.equal(state[f"{name}.m"], torchs.state[parameter]["exp_avg"])
            assert torch.equal(state[f"{name}.v"], torchs.state[parameter]["exp_avg_sq"])


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_loaded_state_continues_bit_by_bit(eight_bit: bool):
    straight = parameters()
    ours = optimizer(straight, eight_bit=eight_bit)
    run(straight, ours, range(4))
    at_four, saved = values(straight), values(ours.state())
    run(straight, ours, range(4, 9))
    resumed = {name: nn.Parameter(value.clone()) for name, value in at_four.items()}
    other = optimizer(resumed, eight_bit=eight_bit)
    other.load(saved)
    assert is_equal(saved, other.state())
    run(resumed, other, range(4, 9))
    assert is_equal(values(straight), values(resumed))
    assert is_equal(ours.state(), other.state())


def test_moments_are_float32_for_small_tensors_and_8_bit_for_large_ones():
    state = optimizer(parameters(), eight_bit=True).state()
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    assert kinds["q_proj.lora_A.m"] == (torch.uint8, (8, 600))
    assert kinds["q_proj.lora_A.v_absmax"] == (torch.float32, (19,))
    assert kinds["q_proj.lora_B.m"] == (torch.float32, (31, 8))
    assert "q_proj.lora_B.m_absmax" not in kinds


def test_state_of_other_settings_is_refused_without_loading():
    ours = optimizer(parameters(), eight_bit=True)
    with refuses(ValueError, where="q_proj.lora_A.m", expected=("uint8", "(8, 600)"), got=("float32", "(8, 600)")):
        ours.load(optimizer(parameters()).state())
    short = ours.state() | {"step": torch.tensor(7)}
    del short["q_proj.lora_B.v"]
    with refuses(ValueError, 1, where="q_proj.lora_B.v", expected=("float32", "(31, 8)"), got="none"):
        ours.load(short)
    assert ours.step_count == 0


def test_missing_gradient_is_an_error_and_changes_nothing():
    params = parameters()
    ours, before = optimizer(params), values(params)
    give_gradients(params, 0)
    params["q_proj.lora_B"].grad = None
    for act in (lambda: ours.step(0.1), lambda: ours.clip(1.0)):
        with refuses(ValueError, "1 of 4", "gradient", "q_proj.lora_B", where="optimizer"):
            act()
    assert is_equal(values(params), before)
    assert ours.step_count == 0


@pytest.mark.parametrize(
    ("bad", "facts"),
    [(math.nan, ("1", "v_proj.lora_B")), (math.inf, ("1", "v_proj.lora_B")), (1e30, ("inf", "squares"))],
    ids=["nan", "inf", "large"],
)
def test_clip_non_finite_norm_is_refused_and_keeps_the_gradients(bad: float, facts: tuple[str, ...]):
    params = parameters()
    ours = optimizer(params)
    give_gradients(params, 0)
    grads = {name: p.grad for name, p in params.items() if p.grad is not None}
    grads["v_proj.lora_B"][3, 3] = bad
    kept = {name: grad.clone() for name, grad in grads.items()}
    with refuses(NonFiniteNorm, *facts, where="gradients"):
        ours.clip(1.0)
    assert all(torch.equal(grads[name].nan_to_num(), kept[name].nan_to_num()) for name in kept)


def test_clip_at_infinity_changes_no_gradient_and_gradients_can_be_cleared():
    params = parameters()
    ours = optimizer(params)
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params.values() if p.grad is not None]
    norm = ours.clip(math.inf)
    assert math.isclose(norm, math.sqrt(sum(float(grad.square().sum()) for grad in before)), rel_tol=1e-5)
    after = [p.grad for p in params.values() if p.grad is not None]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in params.values())


def test_zero_gradients_before_the_first_nonzero_one_change_nothing():
    """With B = 0 the gradient of A is zero at step 1; the count of steps goes on for all tensors together."""
    params = parameters()
    ours = AdamW(params, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, lr_ratio=1.0, eight_bit=False)
    theirs = params["q_proj.lora_A"].detach().clone()
    give_gradients(params, 0)
    params["q_proj.lora_A"].grad = torch.zeros(8, 600)
    ours.step(1e-2)
    assert torch.equal(params["q_proj.lora_A"], theirs)
    params["q_proj.lora_A"].grad = torch.ones(8, 600)
    ours.step(1e-2)
    moved = (params["q_proj.lora_A"] - theirs).abs()
    expected = 1e-2 * (0.1 / (1 - 0.9**2)) / math.sqrt(0.01 / (1 - 0.99**2))  # step 2 for all, so not a whole lr
    torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-4, atol=1e-7)

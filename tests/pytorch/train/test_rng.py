"""States of the random generators: after they are restored, the same numbers are drawn again."""

import random

import numpy as np
import pytest
import torch

from llorch.pytorch.train.rng import capture_rng, restore_rng, seed_rng


@pytest.fixture(autouse=True)
def _as_before():
    states = capture_rng()
    yield
    restore_rng(states)


def draw(device: str = "cpu") -> list[float]:
    """From every generator; the odd number of normal draws leaves one in reserve in Python's and NumPy's."""
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]  # noqa: NPY002
    return [*drawn, *torch.rand(3, device=device).tolist(), torch.nn.functional.dropout(torch.ones(64)).sum().item()]


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_a_seed_decides_every_generator(seed: int):
    draw()
    seed_rng(seed)
    first = draw()
    seed_rng(seed)
    assert draw() == first
    seed_rng(seed + 1)
    assert not {*draw()[:-1]} & {*first}


def test_capturing_draws_nothing_and_restored_states_draw_the_same_numbers_again():
    draw()
    states = capture_rng()
    copies = {name: state.copy() for name, state in states.items()}
    first, second = draw(), draw()
    assert first != second
    for name, state in states.items():
        assert state.dtype == np.uint8
        np.testing.assert_array_equal(state, copies[name])
    restore_rng(copies | {"adapter/x": np.zeros(3)})
    assert draw() == first


@pytest.mark.parametrize("name", ["rng/python", "rng/numpy", "rng/torch"])
def test_each_generator_is_restored(name: str):
    states = capture_rng()
    first = draw()
    other = capture_rng()
    assert states[name].tobytes() != other[name].tobytes()
    restore_rng(other | {name: states[name]})
    assert {*draw()} & {*first}


def test_a_state_without_a_generator_and_a_generator_without_a_state_are_refused():
    states = capture_rng()
    with pytest.raises(ValueError, match="no generator for rng/cuda:99; resume on the devices of the run"):
        restore_rng(states | {"rng/cuda:99": states["rng/torch"]})
    del states["rng/python"]
    with pytest.raises(ValueError, match="no generator for rng/python"):
        restore_rng(states)


@pytest.mark.gpu
def test_the_generators_of_cuda_devices_are_restored():
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
    draw("cuda:0")
    states = capture_rng()
    assert "rng/cuda:0" in states
    first = draw("cuda:0")
    restore_rng(states)
    assert draw("cuda:0") == first

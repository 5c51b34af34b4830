"""What `conftest.py` promises each test."""

import pytest
import torch

THREADS = torch.get_num_threads()


@pytest.fixture(scope="module")
def more_threads() -> None:
    torch.set_num_threads(THREADS + 2)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_no_test_meets_the_threads_that_another_has_set(turn: str):
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(THREADS + 1)


def test_a_fixture_may_set_them(more_threads: None):
    assert torch.get_num_threads() == THREADS + 2


def test_until_the_test_that_asked_for_it_ends():
    assert torch.get_num_threads() == THREADS

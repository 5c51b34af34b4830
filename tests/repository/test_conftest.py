"""What `conftest.py` promises each test."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from shape_checks import checked

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


Rows = Float[np.ndarray, "rows width"]


@checked(typechecker=beartype)
def joined(x: Rows, y: Float[np.ndarray, " width"] | None = None, *, n: int = 1) -> Rows:
    return x[:n] if y is None else x


@checked(typechecker=beartype)
def named(name: "str", x: "Rows | None" = None) -> "str":
    return name * 2 if name else None  # type: ignore[return-value]


@checked(typechecker=beartype)
def unchecked(name: str) -> str:
    return name


@checked(typechecker=beartype)
def parts(x: Rows) -> Iterator[int]:
    yield from range(len(x))


@checked(typechecker=beartype)
@dataclass
class Held:
    rows: Rows
    more: "Held | None" = None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: joined(np.zeros((2, 3)), np.zeros(4)),
        lambda: joined(np.zeros((2, 3), np.int64)),
        lambda: joined(np.zeros((2, 3)), n=1),  # the result has other rows
        lambda: joined(np.zeros((1, 3)), n=1.0),  # type: ignore[arg-type]
        lambda: named(3),  # type: ignore[arg-type]
        lambda: named(""),
        lambda: next(parts(np.zeros(2))),
        lambda: Held(np.zeros(3)),
    ],
)
def test_what_an_annotation_does_not_allow_is_refused(wrong):
    with pytest.raises(TypeCheckError):
        wrong()


def test_types_without_axes_are_left_to_pyright():
    assert unchecked(3) == 3  # type: ignore[arg-type]


def test_each_call_has_axes_of_its_own():
    for width in (3, 4):
        assert joined(np.zeros((2, width)), np.zeros(width)).shape == (2, width)
        assert Held(np.zeros((2, width)), Held(np.zeros((3, 5)))).rows.shape == (2, width)
    assert (named("a"), [*parts(np.zeros((2, 1)))]) == ("aa", [0, 1])


@checked(typechecker=beartype)
def some(x: Rows, kept: list[bool]) -> Rows | list[Rows]:
    return [x] if len(kept) == 1 else x[: sum(kept)] if all(kept) else x[0]


def test_what_passed_once_is_checked_again_where_it_may_differ():
    x = np.zeros((2, 3))
    for _ in range(2):
        assert joined(x, n=2).shape == (2, 3)
        assert (len(some(x, [True, True])), len(some(x, [True]))) == (2, 1)
        for wrong in (lambda: joined(x, n=1), lambda: some(x, [True, False]), lambda: some(x, [1])):  # type: ignore[list-item]
            with pytest.raises(TypeCheckError):
                wrong()


def test_a_refusal_says_the_shapes_of_the_call():
    with pytest.raises(TypeCheckError, match="parameter y=") as error:
        joined(np.zeros((2, 3)), np.zeros(4), n=2)
    assert error.value.__notes__ == ["called with (2, 3), (4,), int"]


def test_an_annotation_that_cannot_be_read_here_is_no_error():
    def odd(x: "np.no_such_type", y: Rows) -> None: ...  # type: ignore[reportAttributeAccessIssue]

    with pytest.raises(TypeCheckError):
        checked(odd, typechecker=beartype)(1, "2")

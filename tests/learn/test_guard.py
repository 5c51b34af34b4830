"""What is said of functions that cannot be gone on with."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llorch.errors import LearnerFault
from llorch.learn.check import check_functions
from llorch.learn.guard import guarded
from llorch.learn.implementation import Implementation
from llorch.learn.lessons import PARTS
from llorch.verify.judge import FAIL, PASS

RIGHT = PARTS["rms_norm"].reference


def scaled_in_place(x: Any, weight: Any, eps: float) -> Any:
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * weight


async def asynchronous(x: Any, weight: Any, eps: float) -> Any:
    return x


def yielding(x: Any, weight: Any, eps: float) -> Any:
    yield RIGHT(x, weight, eps)


class OfClass:
    def __init__(self, x: Any, weight: Any, eps: float) -> None:
        self.y = RIGHT(x, weight, eps)


def without_end(x: Any, weight: Any, eps: float) -> Any:
    return without_end(x, weight, eps)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, weight, eps: 1 / 0, "rms_norm: raised ZeroDivisionError: division by zero"),
        (lambda x, weight, eps: sys.exit(3), "raised SystemExit: 3"),
        (without_end, "raised RecursionError"),
        (lambda x, weight, eps: None, "returned None; does it end with return?"),
        (lambda x, weight, eps: x[:1], "expected y of shape"),
        (lambda x, weight, eps: x.astype(np.float16), "expected y of dtype float32, got float16; use .astype"),
        (lambda x, weight, eps: RIGHT(x, weight, eps).astype(object), "array of numbers, got ndarray of objects"),
        (lambda x, weight, eps: "text", "expected y of shape"),
        (lambda x, weight, eps: [[1, 2], [3]], "NumPy cannot read as y"),
        (OfClass, "expected y to be an array of numbers, got OfClass of objects"),
        (yielding, "is written with yield; expected a plain function"),
        (asynchronous, "is written with async def; expected a plain function"),
        (scaled_in_place, "writes into an argument"),
        (lambda x, gain, eps: x, "expected the parameters (x, weight, eps), got (x, gain, eps): missing a required"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_one_sentence(function: Callable[..., Any], said: str):
    found = check_functions("01", rms_norm=function)
    assert found.word == FAIL
    assert said in found.fault


def test_several_results_are_counted():
    found = check_functions("01b", rope_tables=lambda positions, inv_freq: np.cos(positions[:, None] * inv_freq))
    assert "expected to return 2 arrays (cos, sin), got ndarray" in found.fault


def test_what_is_right_may_be_anything_that_numpy_reads():
    torch = pytest.importorskip("torch")

    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> Any:
        rows = torch.from_numpy(x)
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * torch.from_numpy(weight)

    assert check_functions("01", rms_norm=rms_norm).word == PASS


def test_memory_that_was_written_to_without_asking():
    torch = pytest.importorskip("torch")

    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> Any:
        result = RIGHT(x, weight, eps)
        torch.from_numpy(x).zero_()
        return result

    assert "changed its argument x; compute into a new array" in check_functions("01", rms_norm=rms_norm).fault


@pytest.mark.parametrize("live", [False, True])
def test_no_later_call_reaches_what_an_earlier_one_was_given(live: bool):
    kept: list[Any] = []

    def append(past_k: Any, past_v: Any, k: Any, v: Any) -> Any:
        kept.append(k)
        if len(kept) > 1:
            kept[0][...] = 0
        return PARTS["append"].reference(past_k, past_v, k, v)

    call, rows, past = guarded(PARTS["append"], append, live=live), np.ones((3, 2, 4)), np.ones((2, 0, 4))
    call(past_k=past, past_v=past, k=rows, v=rows)
    with pytest.raises(LearnerFault, match="writes into an argument"):
        call(past_k=past, past_v=past, k=rows, v=rows)
    assert rows.all()


def test_the_arrays_in_a_dict_are_as_safe():
    def block(w: dict[str, Any], **given: Any) -> Any:
        w["attn_norm"] *= 2
        return PARTS["block"].reference(w=w, **given)

    assert "writes into an argument" in check_functions("07", block=block).fault


def test_nan_and_views_are_noted():
    def embedding(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
        rows = table[ids]
        rows[1, 2] = np.nan
        return rows

    found = check_functions("00", embedding=embedding)
    assert found.word == FAIL
    assert any("embedding: rows has 1 NaN of " in note and "the first at (1, 2)" in note for note in found.notes)
    found = check_functions("06", swiglu=lambda gate, up: up)
    assert "swiglu: y is a view of an argument; a copy is used" in found.notes


def test_a_live_run_asks_the_reference_once_for_each_shape_and_ends_at_nan(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    part = PARTS["swiglu"]

    def reference(gate: Any, up: Any) -> Any:
        asked.append(len(gate))
        return gate * up

    monkeypatch.setitem(vars(part), "reference", reference)
    call = guarded(part, lambda gate, up: gate / up, live=True)
    for n in (1, 2, 1, 2, 2):
        assert call(gate=np.ones((n, 3)), up=np.ones((n, 3))).shape == (n, 3)
    assert asked == [1, 2]
    zeros = np.zeros((1, 3))
    with (
        np.errstate(all="ignore"),
        pytest.raises(LearnerFault, match=r"y has 3 NaN of 3 numbers, the first at \(0, 0\)"),
    ):
        call(gate=zeros, up=zeros)


def test_notes_are_of_the_last_check():
    implementation = Implementation("mine", {"swiglu": lambda gate, up: up})
    with implementation.installed([PARTS["swiglu"]]):
        pass
    assert not implementation.notes

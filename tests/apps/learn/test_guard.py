"""Faults of functions whose results cannot be used."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

from llorch.apps.learn.check import check_functions
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.guard import guard_function
from llorch.apps.learn.lessons import PARTS
from llorch.runtime.errors import LearnerFault
from llorch.stages.comparison import FAIL, PASS

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


def call_llorch(x: Any, weight: Any, eps: float) -> Any:
    from llorch.ops import rms_norm

    return rms_norm.rms_norm(x, weight, eps=eps)


FAULTS = {
    "call_llorch": (call_llorch, ["llorch.ops.rms_norm.rms_norm"], {}),
    "list": (lambda x, weight, eps: RIGHT(x, weight, eps).tolist(), ["np.asarray(y, np.float32)"],
             {"expected": "float32", "got": "list"}),
    "raises": (lambda x, weight, eps: 1 / 0, ["ZeroDivisionError: division by zero"], {}),
    "exits": (lambda x, weight, eps: sys.exit(3), ["SystemExit: 3"], {}),
    "without_end": (without_end, ["RecursionError"], {}),
    "returns nothing": (lambda x, weight, eps: None, ["None", "return"], {}),
    "other shape": (lambda x, weight, eps: x[:1], ["y", "shape"], {"expected": "(8, 96)", "got": "(1, 96)"}),
    "other dtype": (
        lambda x, weight, eps: RIGHT(x, weight, eps).astype(np.float16), ["y", ".astype"],
        {"expected": "float32", "got": "float16"},
    ),
    "objects": (lambda x, weight, eps: RIGHT(x, weight, eps).astype(object), ["y"], {"got": ("ndarray", "objects")}),
    "text": (lambda x, weight, eps: "text", ["y", "shape"], {"expected": "(1, 2)", "got": "()"}),
    "rows of two lengths": (lambda x, weight, eps: [[1, 2], [3]], ["NumPy", "y", "inhomogeneous"], {}),
    "OfClass": (OfClass, ["y"], {"got": ("OfClass", "objects")}),
    "yielding": (yielding, ["yield"], {"expected": "function"}),
    "asynchronous": (asynchronous, ["async def"], {"expected": "function"}),
    "scaled_in_place": (scaled_in_place, ["argument", "read-only"], {}),
    "other parameters": (
        lambda x, gain, eps: x, ["missing", "'gain'"], {"expected": "(x, weight, eps)", "got": "(x, gain, eps)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "facts", "fields"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_sentence(function: Callable[..., Any], facts: list[str], fields: dict[str, Any]):
    found = check_functions("01", rms_norm=function)
    assert found.label == FAIL
    assert_tells(found.fault.splitlines()[0], "rms_norm", *facts, **fields)


@pytest.mark.parametrize(("error", "name"), [(ValueError, "ValueError"), (NotImplementedError, "not written yet")])
def test_fault_of_an_exception_without_message_ends_with_its_name(error: type[Exception], name: str):
    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        raise error

    found = check_functions("01", rms_norm=rms_norm)
    assert found.fault.splitlines()[0].endswith(name)


def test_call_of_a_reference_with_an_argument_missing_names_the_part():
    for exercise in PARTS.values():
        with pytest.raises(TypeError, match=f"^{exercise.reference.__qualname__}") as caught:
            exercise.reference()
        assert "<lambda>" not in str(caught.value)


def test_several_results_are_counted():
    found = check_functions("01b", rope_tables=lambda positions, inv_freq: np.cos(positions[:, None] * inv_freq))
    assert_tells(found.fault, "rope_tables", expected=(2, "(cos, sin)"), got="ndarray")


def test_right_results_may_be_anything_that_numpy_reads():
    torch = pytest.importorskip("torch", reason="NOT RUN: torch is not installed")

    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> Any:
        rows = torch.from_numpy(x)
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * torch.from_numpy(weight)

    assert check_functions("01", rms_norm=rms_norm).label == PASS


def test_memory_that_was_written_to_without_asking():
    torch = pytest.importorskip("torch", reason="NOT RUN: torch is not installed")

    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> Any:
        result = RIGHT(x, weight, eps)
        torch.from_numpy(x).zero_()
        return result

    assert_tells(check_functions("01", rms_norm=rms_norm).fault, "rms_norm", "changed", "x")


@pytest.mark.parametrize("live", [False, True])
def test_no_later_call_reaches_what_an_earlier_one_was_given(live: bool):
    kept: list[Any] = []

    def append(past_k: Any, past_v: Any, k: Any, v: Any) -> Any:
        kept.append(k)
        if len(kept) > 1:
            kept[0][...] = 0
        return PARTS["append"].reference(past_k, past_v, k, v)

    call, rows, past = guard_function(PARTS["append"], append, live=live), np.ones((3, 2, 4)), np.ones((2, 0, 4))
    call(past_k=past, past_v=past, k=rows, v=rows)
    with refuses(LearnerFault, "append", "argument", "read-only"):
        call(past_k=past, past_v=past, k=rows, v=rows)
    assert rows.all()


def test_the_arrays_in_a_dict_are_as_safe():
    def block(w: dict[str, Any], **arguments: Any) -> Any:
        w["attn_norm"] *= 2
        return PARTS["block"].reference(w=w, **arguments)

    assert_tells(check_functions("07", block=block).fault.splitlines()[0], "block", "argument", "read-only")


def test_nan_is_noted():
    def embedding(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
        rows = table[ids]
        rows[1, 1] = np.nan
        return rows

    found = check_functions("00", embedding=embedding)
    assert found.label == FAIL
    assert any("embedding: rows" in note and "1 NaN of" in note and "(1, 1)" in note for note in found.notes)


def test_a_live_run_asks_the_reference_once_for_each_shape_and_ends_at_nan(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    exercise = PARTS["swiglu"]

    def reference(gate: Any, up: Any) -> Any:
        asked.append(len(gate))
        return gate * up

    monkeypatch.setitem(vars(exercise), "reference", reference)
    call = guard_function(exercise, lambda gate, up: gate / up, live=True)
    for n in (1, 2, 1, 2, 2):
        assert call(gate=np.ones((n, 3)), up=np.ones((n, 3))).shape == (n, 3)
    assert asked == [1, 2]
    zeros = np.zeros((1, 3))
    with np.errstate(all="ignore"), refuses(LearnerFault, "swiglu: y", "3 NaN of 3", "(0, 0)"):
        call(gate=zeros, up=zeros)


def test_notes_are_of_the_last_check():
    implementation = Implementation("mine", {"swiglu": lambda gate, up: up})
    with implementation.installed([PARTS["swiglu"]]):
        pass
    assert not implementation.notes

"""A wrong function is named by the numbers that it returns, in all calls of a check."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llorch.apps.learn.alterations import make_alterations
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.function_calls import MAX_ALIKE, CallRecord, FunctionCall
from llorch.apps.learn.guard import guard_function
from llorch.apps.learn.lessons import PARTS
from llorch.apps.learn.small_cases import SMALL_CASES, find_small_error, take_tokens
from llorch.apps.learn.wrong_functions import find_causes
from llorch.stages.comparison import FAIL

REFERENCES = {name: exercise for name, exercise in PARTS.items() if not exercise.on_torch}


def call(name: str, actual: Callable[..., Any], **arguments: Any) -> FunctionCall:
    """A call of a wrong function."""
    exercise = PARTS[name]
    results = []
    for function in (actual, exercise.reference):
        returned = function(**arguments)
        returned = take_tokens(returned, arguments) if exercise.streams else returned
        results.append(tuple(map(np.asarray, exercise.results(returned).values())))
    return FunctionCall(arguments, *results)


def names(name: str, wrong: Callable[..., Any], *cases: dict[str, Any]) -> list[str]:
    return [cause.name for cause in find_causes(PARTS[name], [call(name, wrong, **case) for case in cases], wrong)]


RNG = np.random.default_rng(3)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


NORMS = [{"x": numbers(5, 8), "weight": numbers(8), "eps": eps} for eps in (1e-2, 1e-1)]
PAIRS = [{"gate": numbers(4, 6), "up": numbers(4, 6)} for _ in range(2)]
SCORES = [{"q": numbers(3, 2, n), "k": numbers(2, 4, n)} for n in (4, 6)]
RIGHT = {name: exercise.reference for name, exercise in PARTS.items()}


@pytest.mark.parametrize(
    ("name", "wrong", "cases", "expected"),
    [
        ("rms_norm", lambda x, weight, eps: RIGHT["rms_norm"](x, weight, eps * eps), NORMS, "eps-squared"),
        ("rms_norm", lambda x, weight, eps: -RIGHT["rms_norm"](x, weight, eps), NORMS, "x-negated"),
        ("rms_norm", lambda x, weight, eps: RIGHT["rms_norm"](x, weight, eps) + x, NORMS, "y-plus-x"),
        ("rms_norm", lambda x, weight, eps: x.copy(), NORMS, "norm-skipped"),
        ("rms_norm", lambda x, weight, eps: x / np.sqrt((x * x).mean(0) + eps) * weight, NORMS, "mean-over-tokens"),
        ("swiglu", lambda gate, up: RIGHT["swiglu"](gate=gate, up=gate), PAIRS, "gate-for-up"),
        ("swiglu", lambda gate, up: RIGHT["swiglu"](gate=gate, up=up)[::-1], PAIRS, "y-reversed-0"),
        ("attention_scores", lambda q, k: RIGHT["attention_scores"](q * np.float32(len(q)), k), SCORES,
         "scores-factor"),
        ("attention_scores", lambda q, k: RIGHT["attention_scores"](q * np.float32(7), k), SCORES,
         "scores-times-7"),
    ],
)  # fmt: skip
def test_a_wrong_function_is_named(name: str, wrong: Callable, cases: list[dict], expected: str):
    assert names(name, wrong, *cases)[:1] == [expected]


def test_a_right_call_contradicts_a_name():
    def wrong(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return RIGHT["rms_norm"](x, weight, eps * (2 if len(x) == 5 else 1))

    assert names("rms_norm", wrong, NORMS[0]) == ["eps-doubled"]
    assert names("rms_norm", wrong, NORMS[0], NORMS[1] | {"x": numbers(4, 8)}) == []


def test_an_exact_match_goes_before_one_within_rounding():
    bits = np.array([0x3F80, 0xC000], np.uint16)
    shifted = lambda bits: (bits.astype(np.uint32) << 8).view(np.float32)  # noqa: E731 (a learner's function)
    assert names("bfloat16_to_float32", shifted, {"bits": bits}) == ["bits-shifted-by-8"]


def test_a_function_with_a_state_is_named():
    counter = iter(range(2, 99))
    wrong = lambda gate, up: RIGHT["swiglu"](gate=gate, up=up) * next(counter)  # noqa: E731 (a learner's function)
    assert names("swiglu", wrong, PAIRS[1]) == ["results-change"]


def test_nothing_is_named_if_all_is_right_or_only_rounded():
    rounded = lambda gate, up: RIGHT["swiglu"](gate=gate, up=up) * np.float32(1 + 2e-6)  # noqa: E731
    assert names("swiglu", RIGHT["swiglu"], *PAIRS) == names("swiglu", rounded, *PAIRS) == []


def test_a_record_keeps_few_calls_and_every_kind_of_error():
    record, right = CallRecord(), call("swiglu", RIGHT["swiglu"], **PAIRS[0])
    wrong = call("swiglu", lambda gate, up: up, **PAIRS[1])
    for _ in range(50):
        record.add("swiglu", "the same shapes", right)
    record.add("swiglu", "the same shapes", wrong)
    assert [recorded.is_wrong for recorded in record.of("swiglu")].count(True) == 1
    assert len(record.of("swiglu")) == MAX_ALIKE + 1
    record.clear()
    assert record.of("swiglu") == []


def test_the_flag_of_a_weight_is_not_said_to_be_false_where_it_is_true():
    report = check_functions(
        "06b", topk_weights=lambda probs, ids, normalised: RIGHT["topk_weights"](probs, ids, not normalised)
    )
    assert report.label == FAIL
    assert "not normalised" in report.causes[0].sentence


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_is_right_in_small_cases(name: str):
    exercise, record = PARTS[name], CallRecord()
    assert (name in SMALL_CASES) == (name != "tensor_table")
    assert find_small_error(exercise, guard_function(exercise, exercise.reference, record=record), record) == ""
    assert bool(record.of(name)) == (name in SMALL_CASES)


def test_alterations_have_names_of_their_own():
    for name, case in (("rms_norm", NORMS[0]), ("attention_scores", SCORES[0])):
        alterations = [*make_alterations(PARTS[name], call(name, RIGHT[name], **case))]
        assert len(alterations) == len({alteration.name for alteration in alterations}) > 40

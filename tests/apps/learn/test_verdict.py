"""Text of a verdict, and the names that mistakes get."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from helpers.refusals import assert_tells

from llorch.apps.learn.check import check, check_functions
from llorch.apps.learn.checks import forward as checks
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercises import forward
from llorch.apps.learn.failed_comparison import FailedComparison
from llorch.apps.learn.lessons import BY_NUMBER
from llorch.apps.learn.verdict import BORROWED, WIDTH, LessonReport
from llorch.judging.compare import judge_difference
from llorch.stages.comparison import FAIL, PASS, Difference, Tolerance
from llorch.stages.stage_ref import StageRef

Array = np.ndarray


def pairs_rotated(x: Array, cos: Array, sin: Array) -> Array:
    y, (c, s) = np.empty_like(x), (table[:, None].astype(x.dtype) for table in (cos, sin))
    y[..., ::2], y[..., 1::2] = x[..., ::2] * c - x[..., 1::2] * s, x[..., ::2] * s + x[..., 1::2] * c
    return y


def eps_outside(x: Array, weight: Array, eps: float) -> Array:
    return x / (np.sqrt((x * x).mean(-1, keepdims=True)) + np.float32(eps)) * weight


def eps_forgotten(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True)) * weight


def gain_squared(x: Array, weight: Array, eps: float) -> Array:
    return forward.rms_norm(x, weight * weight, eps)


def silu_on_up(h: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    up = h @ up_proj.T
    return (h @ gate_proj.T * (up / (1 + np.exp(-up)))) @ down_proj.T


def first_key_lost(past_k: Array, past_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
    k, v = forward.append(past_k, past_v, k, v)
    return np.concatenate([k[:, :1] * (past_k.shape[1] == 0), k[:, 1:]], axis=1), v


def bfloat16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def product(rounded: Callable[[Array], Array], to_dtype: Callable[[Array], Array] = np.asarray) -> Callable[..., Array]:
    def linear(x: Array, weight: Array, bias: Array | None) -> Array:
        y = to_dtype(rounded(x) @ rounded(weight).T).astype(np.float32)
        return y if bias is None else y + bias

    return linear


def softmax_over_heads(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=0, keepdims=True))
    return weights / weights.sum(axis=0, keepdims=True)


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:  # without biases and with them
    monkeypatch.setattr(checks, "models_of", lambda lesson: ["micro-llama", "micro-qwen2"])


@pytest.mark.nightly_cases(but=["eps outside", "silu on up"])
@pytest.mark.parametrize(
    ("number", "parts", "name", "facts"),
    [
        ("01b", {"rope": pairs_rotated}, "rope-interleaved-pairs", ["tokens from 1 on only", "[[[-3, 2, 1, 4]]]"]),
        ("01", {"rms_norm": eps_outside}, "norm-eps-outside-root", ["1.008", "1.014", "[[0.4405, 1.101]]"]),
        ("01", {"rms_norm": eps_forgotten}, "norm-eps-missing", ["rms_norm_eps"]),
        ("04", {"attention_probs": softmax_over_heads}, "softmax-over-heads", ["axis 0"]),
        ("06", {"feed_forward": silu_on_up}, "ffn-gate-and-up-swapped", ["gate_proj"]),
        ("01", {"rms_norm": gain_squared}, "weight-squared", ["square"]),
        ("03", {"append": first_key_lost}, "", ["no known", "token 0 only: all 0"]),
    ],
    ids=["pairs rotated", "eps outside", "eps forgotten", "softmax over heads", "silu on up", "gain squared",
         "first key lost"],
)  # fmt: skip
def test_a_failure_is_named_and_shown(number: str, parts: Mapping[str, Callable], name: str, facts: list[str]):
    found = check_functions(number, **parts)
    assert (found.label, found.where) == (FAIL, f"{next(iter(parts))}() of this page")
    assert [each.name for each in found.causes if each.explained_share > 0.999][:1] == ([name] if name else [])
    lines = str(found).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= WIDTH
    assert_tells(str(found), *facts)
    assert found.record()["first"]


@pytest.mark.nightly_cases("bfloat16")
@pytest.mark.parametrize(
    ("linear", "facts"),
    [
        (product(lambda x: np.ascontiguousarray(x[:, ::-1])), []),
        (product(bfloat16), ["Inputs", "weights", "BF16"]),
        pytest.param(product(lambda x: x.astype(np.float16)), ["float16"], marks=pytest.mark.nightly),
        pytest.param(product(bfloat16, bfloat16), ["weights", "results"], marks=pytest.mark.nightly),
    ],
    ids=["another-order", "bfloat16", "float16", "kept-in-bfloat16"],
)
@pytest.mark.usefixtures("two_models")
def test_arithmetic_is_no_bug(linear: Callable[..., Array], facts: list[str]):
    found = check_functions("02", linear=linear, qkv=forward.qkv)
    assert (found.label, found.is_rounding) == (PASS, bool(facts))
    assert (len(str(found).splitlines()) > 1) == bool(facts)
    assert_tells(str(found), *facts)


@pytest.mark.slow
@pytest.mark.usefixtures("two_models")
def test_a_mistake_beside_arithmetic_fails():
    def qkv(h: Array, **arguments: Array) -> tuple[Array, Array, Array]:
        q, k, v = forward.qkv(h, **arguments)  # type: ignore[arg-type] (as it is called)
        return q, k[:, ::-1], v

    found = check_functions("02", linear=product(bfloat16), qkv=qkv)
    assert (found.label, found.is_rounding) == (FAIL, False)


def test_the_first_lesson_that_differs_is_said_where_results_go_on():
    rotated = {"rms_norm": forward.rms_norm, "rope": pairs_rotated, "attention_scores": eps_outside}
    found = check(BY_NUMBER["05"], Implementation("x", rotated | {"attention_context": forward.our_context}), "chained")
    assert (found.lesson, found.label) == ("01b", FAIL)
    assert_tells(str(found), "03, 04, 05")


def test_a_pass_is_one_line():
    found = check_functions("01", rms_norm=forward.rms_norm)
    assert (found.label, found.wrong, found.causes) == (PASS, [], ())
    assert str(found).count("\n") == 0
    assert len(found.comparisons) == 192
    assert {comparison.mode for comparison in found.comparisons} == {"isolated", "decode"}
    chained = check(BY_NUMBER["01"], Implementation("x", {"rms_norm": forward.rms_norm}), "chained")
    assert {comparison.mode for comparison in chained.comparisons} == {"chained", "decode"}
    assert_tells(str(found), PASS, 192, 4, "llorch learn next")  # comparisons, models
    assert_tells(str(LessonReport("01", BORROWED, unwritten=["rms_norm"])), BORROWED, "rms_norm")


def test_a_pass_shows_the_error_of_the_engine_if_it_was_measured():
    comparison = judge_difference(
        Difference(1e-7, 1e-7), Tolerance(1e-6, 1e-6), StageRef("01", "attn_norm", 0), "isolated", "llamacpp",
        model="micro-llama", backend="numpy",
    )  # fmt: skip
    measured = replace(comparison, engine_error=2e-7)
    texts = [str(LessonReport("01", PASS, by_exercise={"": [c]})) for c in (comparison, measured)]
    assert ["the engine's own ~2e-07" in text for text in texts] == [False, True]
    assert "the engine's own" not in texts[0]


def test_a_fail_shows_the_error_of_the_engine_if_it_was_measured():
    report = check_functions("01", rms_norm=eps_outside)
    comparisons = report.wrong[0], replace(report.wrong[0], engine_error=float("nan"))
    texts = ["\n".join(report._number_lines(FailedComparison(comparison))) for comparison in comparisons]
    assert ["(engine's own error" in text for text in texts] == [True, False]

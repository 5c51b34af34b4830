"""An int8 KV cache: declared, its rounding is none of the engine's mistakes; a wrong scale is one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from faults.wrong_dumps import WHOLE, dump_run, float64_weights, passes

from llorch.diagnosis.diagnose import check_stages, findings
from llorch.diagnosis.replay import Change, StageChange
from llorch.engines.dumps.stage_dump import INT8_CACHES, Features, StageDump
from llorch.judging.tolerances.forward import CACHES
from llorch.judging.tolerances.rounding import Int8Cache
from llorch.stages.comparison import FAIL, ROUNDING

MODEL = "micro-qwen3"  # 3 KV heads of 32
Wrong = Callable[[np.ndarray], np.ndarray]  # scales of every value, (kv_heads, ctx, head_dim), to wrong ones
RIGHT: Wrong = lambda scales: scales  # noqa: E731
WRONG: dict[str, Wrong] = {
    "factor 1.05": lambda scales: scales * 1.05,
    "factor 0.98": lambda scales: scales * 0.98,
    "scale of another head": lambda scales: np.roll(scales, 1, axis=0),
}


def quantised(form: str, wrong: Wrong) -> Callable[[object, str, np.ndarray], np.ndarray]:
    axes = {"int8-token": (0, 2), "int8-row": (2,), "int8-head": (1, 2), "int8-block": (2,)}[form]

    def round_cache(inputs: object, stage: str, array: np.ndarray) -> np.ndarray:
        scales = np.broadcast_to(np.abs(array).max(axis=axes, keepdims=True) / 127, array.shape)
        return np.rint(array / scales).clip(-127, 127) * wrong(scales)

    return round_cache


def dump_with(form: str, wrong: Wrong, is_dumped: Callable[[str], bool] = WHOLE, *, kv_cache: str) -> StageDump:
    caches = [f"l{layer}.{stage}" for layer in (0, 1) for stage in CACHES]
    change = Change(dict.fromkeys(caches, StageChange(quantised(form, wrong))))
    return replace(dump_run(MODEL, passes(MODEL, 5, 7), change, is_dumped), features=Features(kv_cache=kv_cache))


def verdicts(dump: StageDump) -> dict[str, set[str]]:
    checks = check_stages(float64_weights(MODEL), dump, lambda line: None)[1]
    return {stage: {check.verdict for check in checks if check.stage == stage} for stage in {c.stage for c in checks}}


@pytest.mark.parametrize("form", INT8_CACHES)
@pytest.mark.parametrize("is_dumped", [WHOLE, lambda key: "cache" not in key], ids=["cache", "no cache"])
def test_declared_int8_cache_is_rounding(form: str, is_dumped: Callable[[str], bool]):
    dump = dump_with(form, RIGHT, is_dumped, kv_cache=form)
    assert set.union(*verdicts(dump).values()) == {ROUNDING}
    undeclared = verdicts(replace(dump, features=Features()))
    assert FAIL in set.union(*undeclared.values())


@pytest.mark.parametrize("form", INT8_CACHES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_scale_of_a_declared_int8_cache_fails(form: str, name: str):
    if (form, name) == ("int8-token", "scale of another head"):
        return  # all heads of a token have one scale
    by_stage = verdicts(dump_with(form, WRONG[name], kv_cache=form))
    assert FAIL in by_stage["k_cache"]
    assert FAIL in by_stage["v_cache"]


def test_int8_cache_that_nobody_declared_is_rounding():
    dump = dump_with("int8-row", RIGHT, lambda key: "cache" not in key, kv_cache="")
    assert {cause.name for finding in findings(float64_weights(MODEL), dump) for cause in finding.causes} == {
        "cache-in-int8"
    }
    wrong = dump_with("int8-row", WRONG["factor 1.05"], lambda key: "cache" not in key, kv_cache="")
    assert any(finding.kind != "rounding" for finding in findings(float64_weights(MODEL), wrong))


def test_steps_are_those_of_the_values_that_share_a_scale():
    y = np.arange(2 * 3 * 64, dtype=float).reshape(2, 3, 64) + 1
    largest = {"token": (255.0, 384.0), "row": (63.0, 384.0), "head": (191.0, 384.0), "block": (31.0, 384.0)}
    for group, (first, last) in largest.items():
        steps = 254 * Int8Cache(2.0**-24, group=group).half_steps(y)
        np.testing.assert_allclose((steps[0, 0, 0], steps[1, 2, 63]), (first + 1, last))

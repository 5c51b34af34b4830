"""Tolerances of half precision made again: how far they may be from the stored ones."""

import importlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from types import ModuleType

import pytest
from planted import golden_of

from llorch.builtin import goldens_folder
from llorch.verify.goldens import Golden


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(goldens_folder()))
        yield importlib.import_module("regenerate")


@pytest.fixture
def golden() -> Golden:
    return golden_of("micro-qwen3")


def with_tolerance(golden: Golden, mode: str, stage: str, **factors: float) -> Golden:
    """The golden with one tolerance of bfloat16 multiplied."""
    made = deepcopy(dict(golden.half_tolerances))
    old = made["bfloat16"]["far"][mode][stage]
    new = {what: factor * getattr(old, what) for what, factor in factors.items()}
    made["bfloat16"]["far"][mode][stage] = replace(old, **new)
    return replace(golden, half_tolerances=made)


@pytest.mark.parametrize(("mode", "what"), [("chained", "error"), ("isolated", "worst")])
def test_a_tolerance_of_half_precision_may_move_as_far_as_its_engines_pass(
    script: ModuleType, golden: Golden, mode: str, what: str
):
    for factor in (3.9, 1 / 3.9):
        assert script.differences(with_tolerance(golden, mode, "ffn_up", **{what: factor}), golden) == []
    for factor in (4.1, 1 / 4.1, 9, 1 / 9):
        (line,) = script.differences(with_tolerance(golden, mode, "ffn_up", **{what: factor}), golden)
        assert line.startswith(f"tolerance bfloat16 far {mode} ffn_up {what}: ")


def test_a_tolerance_of_half_precision_on_one_side_only_is_a_difference(script: ModuleType, golden: Golden):
    less = replace(golden, half_tolerances={"bfloat16": golden.half_tolerances["bfloat16"]})
    for new, stored in ((less, golden), (golden, less)):
        lines = script.differences(new, stored)
        assert lines
        assert all(line.startswith("tolerance float16 ") and line.endswith(": only on one side") for line in lines)

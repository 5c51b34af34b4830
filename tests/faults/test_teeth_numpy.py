"""Faults in the running code of the forward pass turn a comparison red, not only variants in a table.

In float64 the mistakes are in code that every precision runs, which no run of llorch could show alone.
"""

from pathlib import Path

import pytest
from faults.fault import InjectedFault, assert_seen
from faults.table import FLOAT64, NUMPY
from helpers.stored_goldens import suite_of, weights_of

from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.runner_check import check_runner
from llorch.judging.runners.numpy import FLOAT64 as IN_FLOAT64
from llorch.judging.runners.numpy import NumpyRunner
from llorch.judging.tolerances.forward import MATHEMATICS


@pytest.mark.parametrize("fault", NUMPY, ids=str)
def test_a_fault_is_red_where_it_is(fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_seen(fault, monkeypatch, tmp_path)


@pytest.mark.slow_cases(but=["cache-*", "eps-*"])
@pytest.mark.parametrize("fault", FLOAT64, ids=str)
def test_fault_of_any_precision_shows_in_float64(fault: InjectedFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_seen(fault, monkeypatch, tmp_path)


def test_numpy_float64_error_is_far_below_its_tolerance():
    comparisons = check_runner(suite_of("micro-qwen3"), NumpyRunner(weights_of("micro-qwen3"), IN_FLOAT64))
    assert {c.engine for c in comparisons} == {FLOAT64_REFERENCE}
    assert {c.mode for c in comparisons} == {"isolated", "chained", "decode", "exact"}
    assert max(c.difference.error for c in comparisons) < MATHEMATICS.error / 4

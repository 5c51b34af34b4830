"""`--sample`: each test keeps a case, there or in plain pytest, and every case is drawn for some commit."""

from types import SimpleNamespace
from typing import Any

import pytest
from runs.sample import Sample, drawn

TESTS = {"f.py::test_a": 7, "f.py::test_b": 3, "g.py::test_a": 1}
CASES = [f"{test}[{case}]" for test, n in TESTS.items() for case in range(n)] + ["g.py::test_alone"]
DAYS = [drawn(CASES, 3, f"{tree:040x}") for tree in range(40)]


def test_a_sample_has_a_third_of_the_cases_of_each_test_and_never_none():
    for day in DAYS:
        found = {test: sum(case.partition("[")[0] == test for case in day) for test in (*TESTS, "g.py::test_alone")}
        assert found == {"f.py::test_a": 3, "f.py::test_b": 1, "g.py::test_a": 1, "g.py::test_alone": 1}


def test_every_case_is_in_the_sample_of_some_tree_and_one_tree_draws_one_sample():
    assert set().union(*DAYS) == {*CASES}
    assert drawn(reversed(CASES), 3, f"{5:040x}") == DAYS[5]
    assert drawn(CASES, 1, "0") == {*CASES}


def test_spare_cases_are_drawn_for_some_trees_and_not_for_others():
    spare = {case for case in CASES if case.startswith("f.py::test_a")}
    days = [drawn(CASES, 3, f"{tree:040x}", spare) for tree in range(40)]
    assert set().union(*days) == {*CASES}
    assert any(not spare & day for day in days)
    assert all(day - spare == kept - spare for day, kept in zip(days, DAYS, strict=True))


CASE_MARKS = {
    "f.py::test_plain[1]": [], "f.py::test_plain[2]": ["slow"],
    "f.py::test_engine[1]": [], "f.py::test_engine[2]": ["live", "slow"],
    "f.py::test_device[1]": ["gpu"], "f.py::test_device[2]": ["slow"],
    "f.py::test_slow[1]": ["slow"], "f.py::test_slow[2]": ["slow"],
}  # fmt: skip


def test_a_test_keeps_a_slow_case_unless_plain_pytest_runs_another_case_of_it():
    items: Any = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda mark, own=own: mark in own)
        for name, own in CASE_MARKS.items()
    ]
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    sampling = Sample(f"{1 << 200}/ab").pytest_collection_modifyitems(config, items)
    next(sampling)
    items[:] = [item for item in items if {"slow", "live"} & {*CASE_MARKS[item.nodeid]}]  # as -m has chosen
    assert next(sampling, None) is None
    assert [item.nodeid.partition("[")[0] for item in items] == [
        "f.py::test_engine",
        "f.py::test_device",
        "f.py::test_slow",
    ]


@pytest.mark.parametrize("option", ["3", "0/ab", "x/ab", "3/"])
def test_a_sample_without_a_size_or_a_tree_is_refused(option: str):
    with pytest.raises(pytest.UsageError, match="N/TREE"):
        Sample(option)

"""`--sample`: each test keeps a case, and every case is drawn for some commit."""

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


@pytest.mark.parametrize("option", ["3", "0/ab", "x/ab", "3/"])
def test_a_sample_without_a_size_or_a_tree_is_refused(option: str):
    with pytest.raises(pytest.UsageError, match="N/TREE"):
        Sample(option)

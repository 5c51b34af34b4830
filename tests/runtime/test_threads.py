"""The number of threads that engines are told."""

from pathlib import Path
from typing import Any

import pytest

from llorch import engines
from llorch.runtime.threads import VARIABLES, limited, n_asked


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_threads_that_a_user_asks_for_are_those_of_the_option_then_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert n_asked() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert n_asked() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert n_asked() == 3
    with limited(2):
        with limited(1):
            assert n_asked() == 1
        assert n_asked() == 2
    assert n_asked() == 3


@pytest.mark.parametrize(("told", "given"), [(None, 2), (5, 5)])
def test_an_engine_gets_the_threads_that_the_user_asks_for(
    told: int | None, given: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found: list[Any] = []
    monkeypatch.setattr(engines, "EngineInChild", lambda *_args, n_threads, **_how: found.append(n_threads))
    monkeypatch.setattr(engines, "find_spec", lambda name: True)
    with limited(2):
        engines.open_engine("llamacpp", tmp_path, n_threads=told)
    engines.open_engine("llamacpp", tmp_path, n_threads=told)
    assert found == [given, told]

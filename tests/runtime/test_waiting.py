"""Variables of waiting threads: set while the compiled library is loaded, and only then; the user's stay."""

import os

import pytest

from llorch.ops.compiled import library as cpu_library
from llorch.runtime.waiting import ASLEEP


@pytest.mark.parametrize("by_the_user", [{}, {"GOMP_SPINCOUNT": "7", "OPENBLAS_THREAD_TIMEOUT": "9"}])
def test_library_is_loaded_with_threads_that_wait_asleep(by_the_user: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name in ASLEEP:
        monkeypatch.delenv(name, raising=False)
    for name, text in by_the_user.items():
        monkeypatch.setenv(name, text)
    environment: dict[str, str] = {}
    load_cached = cpu_library.load_cached
    monkeypatch.setattr(cpu_library, "load_cached", lambda *args: environment.update(os.environ) or load_cached(*args))
    assert cpu_library.library.__wrapped__() is not None
    assert {name: environment[name] for name in ASLEEP} == ASLEEP | by_the_user
    assert {name: os.environ[name] for name in ASLEEP if name in os.environ} == by_the_user

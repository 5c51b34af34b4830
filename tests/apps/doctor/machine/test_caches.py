import shutil
from types import SimpleNamespace

import pytest

from llorch.apps.doctor.machine.caches import of_caches


@pytest.mark.parametrize(("free", "state"), [(10**9, "ok"), (10**9 - 1, "note")])
def test_a_cache_is_noted_where_less_than_a_gigabyte_is_free(free: int, state: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=free))
    monkeypatch.setattr("os.access", lambda _place, _mode: True)
    assert {check.state for check in of_caches()} == {state}

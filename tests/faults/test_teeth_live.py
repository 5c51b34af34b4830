"""Faults in checks by engines that run now: on random models, and on a model that llama.cpp quantised."""

from pathlib import Path

import pytest
from faults.fault import InjectedFault, assert_seen
from faults.table import LIVE

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models; each is made, and its engines asked, once."""
    return tmp_path_factory.mktemp("live")


@pytest.mark.nightly_cases(but=["numpy-cache-of-zeros-file"])
@pytest.mark.parametrize("fault", LIVE, ids=lambda fault: f"{fault.backend.removesuffix('-live')}-{fault}")
def test_a_fault_is_red_where_it_is(fault: InjectedFault, models: Path, monkeypatch: pytest.MonkeyPatch):
    assert_seen(fault, monkeypatch, models)

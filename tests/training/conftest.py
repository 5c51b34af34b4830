"""The tiny base that merged adapters of these tests are made for."""

from pathlib import Path

import pytest


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from builders.random_adapters import tiny_base

    return tiny_base(tmp_path / "base")

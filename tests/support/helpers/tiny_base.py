"""Fixtures: a tiny base that adapters are made for."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llorch.files import Weights


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from builders.random_adapters import tiny_base

    return tiny_base(tmp_path / "base")


@pytest.fixture
def weights(base: Path) -> "Weights":
    from llorch.files import open_weights

    return open_weights(base)

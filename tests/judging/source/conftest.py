"""Sources that several tests of this folder compare files with."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def source_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random source folders by family, see `builders.source_folders`; read-only."""
    from builders.source_folders import FAMILIES, write_source

    parent = tmp_path_factory.mktemp("source_folders")
    return {family: write_source(parent / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def writers() -> ModuleType:
    """Module that draws the float tensors of all quantised folders of the repository."""
    pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    from builders.quantised_folders import FOLDERS

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDERS.parent))
        return import_module("quantised_writers.base")

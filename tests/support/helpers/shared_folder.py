"""A folder that all workers of one run share, for what each of them would otherwise make again."""

import os
from pathlib import Path

import pytest


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder above those of the workers of pytest-xdist, or that of the only process."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

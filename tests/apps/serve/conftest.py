"""The built-in story model, alone and served."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.served import Served

    from llorch.model.model import Model


@pytest.fixture(scope="module")
def story() -> "Model":
    from llorch.model.model import load

    return load("story")


@pytest.fixture(scope="module")
def server() -> Iterator["Served"]:
    from helpers.served import served

    with served() as running:
        yield running

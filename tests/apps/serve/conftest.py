"""The built-in story model, served."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.served import Served


@pytest.fixture(scope="module")
def server() -> Iterator["Served"]:
    from helpers.served import served

    with served() as running:
        yield running

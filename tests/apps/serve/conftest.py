"""The built-in story model, served."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runs.served import Served


@pytest.fixture(scope="module")
def server() -> Iterator["Served"]:
    from runs.served import served

    with served() as running:
        yield running

"""Kernels in Triton's interpreter, where there is no device."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fakes.quick_interpreter import prepare_once_a_launch


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):
            prepare_once_a_launch(patch)
        yield

"""Lessons judged on one built-in model, whose goldens are read once: for tests of what commands say, not of checks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llorch.apps.learn import fault_injection
from llorch.apps.learn.checks import forward
from llorch.apps.learn.lessons import BY_NUMBER
from llorch.apps.learn.sandbox import warm


@contextmanager
def lessons_on_one_model(warmed: str = "01") -> Iterator[None]:
    """Judge lessons of the forward pass on the first of their models; processes that check are copies of this one.

    Args:
        warmed: The lesson whose goldens are read before.
    """
    models_of = forward.models_of
    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, fault_injection):
            patch.setattr(module, "models_of", lambda lesson: models_of(lesson)[:1])
        warm(BY_NUMBER[warmed])
        yield

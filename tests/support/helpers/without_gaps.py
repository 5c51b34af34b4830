"""Diagnoses of training without the search for what a dump could not have shown, which takes most of their time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llorch.diagnosis.training import diagnose


@contextmanager
def without_gaps() -> Iterator[None]:
    """Leave `could_not_show` of a diagnosis empty while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnose, "could_not_show", lambda *_: ({}, []))
        yield

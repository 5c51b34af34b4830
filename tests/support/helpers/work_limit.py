"""A limit on work that is counted, not timed: lines of Python, which are the same on every machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


class LineCount:
    """Number of lines of Python that ran so far."""

    n_lines = 0


@contextmanager
def work_limit(most_lines: float) -> Iterator[LineCount]:
    """Fail as soon as the body has run more lines of Python, its callees included.

    A function of C counts as the line that calls it. So the loops of a reader are seen, and what one call of NumPy or
    `json` does is not; memory tells that.

    Args:
        most_lines: Number of lines after which the test fails.

    Yields:
        The number of lines so far.
    """
    count, before = LineCount(), sys.gettrace()

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            count.n_lines += 1
            if count.n_lines > most_lines:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                pytest.fail(f"more than {most_lines:,.0f} lines of Python ran; the last one is {place}")
        return count_line

    sys.settrace(count_line)
    try:
        yield count
    finally:
        sys.settrace(before)

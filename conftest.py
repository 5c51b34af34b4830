"""Options of the tests. They stand here because pytest asks only the top folder for options.

`pytest -k checkpoint --impl my_llama` checks a learner's functions. Write `--impl=../my_llama` for a folder outside of
the repository: after a space pytest takes it for a folder of tests.
"""

import pytest


def read_part(text: str) -> tuple[int, int]:
    """Read K/N; raise ValueError unless 1 <= K <= N."""
    part, n_parts = map(int, text.split("/"))
    if not 1 <= part <= n_parts:
        raise ValueError(text)
    return part, n_parts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--impl`, `--part` and `--processor-limit`."""
    parser.addoption("--impl", help="check this implementation, a folder or cmd:PROGRAM, and nothing else")
    parser.addoption("--part", type=read_part, default=(1, 1), metavar="K/N", help="run part K of N of the tests")
    parser.addoption(
        "--processor-limit", type=float, metavar="SECONDS",
        help="print the tests that cost most processor time, and fail if one costs more than SECONDS",
    )  # fmt: skip

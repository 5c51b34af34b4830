"""Options of the tests. They stand here because pytest asks only the top folder for options.

`pytest -k checkpoint --impl my_llama` checks a learner's functions. Write `--impl=../my_llama` for a folder outside of
the repository: after a space pytest takes it for a folder of tests.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--impl`, `--processor-limit` and `--sample`."""
    parser.addoption("--impl", help="check this implementation, a folder or cmd:PROGRAM, and nothing else")
    parser.addoption("--sample", metavar="N/TREE", help="run one in N of the cases of each test, drawn by a hash")
    parser.addoption(
        "--processor-limit", type=float, metavar="SECONDS",
        help="print the tests that cost most processor time, and fail if one costs more than SECONDS",
    )  # fmt: skip

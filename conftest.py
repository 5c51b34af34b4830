"""`pytest -k checkpoint --impl my_llama`: here, as pytest asks the top folder alone for options.

It takes a folder outside of the repository for one of tests; --impl=../my_llama it understands.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Check what a learner wrote, and nothing else."""
    parser.addoption("--impl", help="check this implementation, a folder or cmd:PROGRAM, and nothing else")

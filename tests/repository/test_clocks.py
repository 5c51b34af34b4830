"""No test asserts seconds on a clock: the machine, not the code, would decide."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")


def reads_clock(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr.removesuffix("_ns") in CLOCKS for node in ast.walk(tree))


def clock_assertions(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of assertions about a clock; a loop that waits may give up at a time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assert) and reads_clock(node.test):
            yield node.lineno
        elif not isinstance(node, ast.While):
            yield from clock_assertions(node)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def test():\n    assert time.process_time() - start < 1", [2]),
        ("while not ready():\n    assert time.monotonic() < end", []),
    ],
)
def test_an_assertion_about_a_clock_is_seen_outside_of_a_loop_that_waits(source: str, lines: list[int]):
    assert [*clock_assertions(ast.parse(source))] == lines


def test_no_test_asserts_seconds_on_a_clock():
    sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    trees = {path: ast.parse(source) for path, source in sources.items() if any(clock in source for clock in CLOCKS)}
    assert [(path.name, line) for path, tree in trees.items() for line in clock_assertions(tree)] == []

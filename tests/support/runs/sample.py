"""`--sample N/TREE`: run one in N of the cases of each test, drawn by a hash.

Every test keeps at least one case. Only slow cases have no such minimum, if plain pytest runs other cases of the test.
TREE is the hash of the commit's tree. The same tree draws the same cases, and other trees draw other cases.
"""

from collections.abc import Collection, Generator, Iterable
from hashlib import sha256

import pytest

ELSEWHERE = ("live", "weights", "nightly", "gpu")  # marks of cases that plain pytest cannot run, or never runs


def drawn(names: Iterable[str], n: int, tree: str, spare: Collection[str] = ()) -> set[str]:
    """Draw cases of each test.

    Args:
        names: Node ids of all cases.
        n: The size of the sample is the number of cases divided by `n`, rounded up.
        tree: Orders the cases, together with their names.
        spare: Those of `names` that have no minimum. Each is drawn with a chance of one in `n`.

    Returns:
        Node ids of the drawn cases.
    """

    def place(name: str) -> int:
        return int.from_bytes(sha256(f"{tree} {name}".encode()).digest(), "big")

    cases: dict[str, list[str]] = {}
    for name in names:
        if name not in spare:
            cases.setdefault(_test_of(name), []).append(name)
    found = {name for name in spare if place(name) % n == 0}
    for of_test in cases.values():
        found |= {*sorted(of_test, key=place)[: -(-len(of_test) // n)]}
    return found


def _test_of(name: str) -> str:
    """Return the node id of a test without the case."""
    return name.partition("[")[0]


def _has_mark(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for mark in marks)


class Sample:
    """Leave out the cases that are not drawn, after marks and keywords have chosen."""

    def __init__(self, option: str) -> None:
        """Read the option, `N/TREE`."""
        n, _, self.tree = option.partition("/")
        if not n.isdecimal() or int(n) < 1 or not self.tree:
            raise pytest.UsageError(f"--sample: expected N/TREE with N of at least 1, got {option!r}")
        self.n = int(n)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Deselect the cases that are not drawn, after marks and keywords have chosen."""
        every = [*items]
        done = yield
        in_plain = {_test_of(item.nodeid) for item in every if not _has_mark(item, "slow", *ELSEWHERE)}
        spare = {item.nodeid for item in items if _test_of(item.nodeid) in in_plain and not _has_mark(item, *ELSEWHERE)}
        kept = drawn((item.nodeid for item in items), self.n, self.tree, spare)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
        return done

"""`--sample N/TREE`: run one in N of the cases of each test, drawn by a hash; every test keeps at least one case.

TREE is the hash of the commit's tree. The same sources draw the same cases, and other sources draw other cases.
"""

from collections.abc import Iterable
from hashlib import sha256

import pytest


def drawn(names: Iterable[str], n: int, tree: str) -> set[str]:
    """Draw cases of each test.

    Args:
        names: Node ids of all cases.
        n: The size of the sample is the number of cases divided by `n`, rounded up.
        tree: Orders the cases, together with their names.

    Returns:
        Node ids of the drawn cases.
    """
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    found: set[str] = set()
    for of_test in cases.values():
        of_test.sort(key=lambda name: sha256(f"{tree} {name}".encode()).digest())
        found |= {*of_test[: -(-len(of_test) // n)]}
    return found


class Sample:
    """Leave out the cases that are not drawn, after marks and keywords have chosen."""

    def __init__(self, option: str) -> None:
        """Read the option, `N/TREE`."""
        n, _, self.tree = option.partition("/")
        if not n.isdecimal() or int(n) < 1 or not self.tree:
            raise pytest.UsageError(f"--sample: expected N/TREE with N of at least 1, got {option!r}")
        self.n = int(n)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the cases that are not drawn."""
        kept = drawn((item.nodeid for item in items), self.n, self.tree)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]

"""The tree of packages stands in three pages, equal, in the order of imports; the picture names folders that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.repository.test_layers import PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = PAGE.partition("```\n")[2].partition("```")[0]
TREE = re.search(r"^llorch/\n.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
PARTS = re.compile(r"[\w/]+(?:/|\.py)(?=[\s,:;]|$)")


def tree() -> list[str]:
    """Return the lines of the tree in ARCHITECTURE.md."""
    assert TREE
    return TREE[0].splitlines()


def missing(lines: list[str]) -> list[str]:
    """List the folders and files that a tree names and the repository lacks."""
    names = []
    for line in lines:
        folder, *parts = PARTS.findall(line)
        home = f"llorch/{folder}" if line.startswith(" ") else folder
        names += [] if (ROOT / home).exists() else [home]
        names += [home + part for part in parts if not any((ROOT / parent / part).exists() for parent in (home, "."))]
    return names


def test_tree_names_every_package_in_the_order_of_imports():
    packages = [line.split("/")[0].strip() for line in tree() if line.startswith("  ")]
    assert packages == [name for name in PACKAGES if (ROOT / "llorch" / name / "__init__.py").exists()]
    assert len(tree()) <= 25
    assert missing(tree()) == []


@pytest.mark.parametrize("path", ["README.md", "llorch/__init__.py"])
def test_other_pages_show_the_same_tree(path: str):
    text = (ROOT / path).read_text(encoding="utf-8")
    page = text if path.endswith(".md") else ast.get_docstring(ast.parse(text)) or ""
    indent = "" if path.endswith(".md") else "    "
    assert "".join(f"{indent}{line}\n" for line in tree()) in f"{page}\n"


def test_missing_folder_or_file_of_a_tree_is_listed():
    assert missing(["  ops/  one a file: rope.py, rape.py", "nowhere/  nothing"]) == ["llorch/ops/rape.py", "nowhere/"]


def test_picture_names_existing_folders():
    names = re.findall(r"(?<!\w)[a-z_/]+/(?=[\s,)]|$)", PICTURE)
    assert len(names) > 12
    assert [name for name in names if not any((ROOT / parent / name).exists() for parent in ("llorch", "."))] == []


def test_page_is_short():
    assert PAGE.count("\n") <= 80

"""ARCHITECTURE.md: every package of llorch has one sentence, in the order of imports; its picture names modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.test_layers import ROOMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = PAGE.partition("```\n")[2].partition("```")[0]
PACKAGES = [name for name in ROOMS if (ROOT / "llorch" / name / "__init__.py").exists()]


def described(page: str) -> list[tuple[str, str]]:
    """Find the packages of the table, each with its sentence."""
    return re.findall(r"^\| \[`(\w+)/`\]\(llorch/\1\) \| (.*) \|$", page, re.MULTILINE)


def test_every_package_has_its_sentence_in_the_order_of_imports():
    assert [name for name, _ in described(PAGE)] == PACKAGES
    assert [text for _, text in described(PAGE) if not re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", text)] == []


def test_picture_names_existing_packages_and_modules():
    named = re.findall(r"([a-z_]+)(/|\.py)(?=[\s,]|$)", PICTURE)
    assert len(named) > 15
    assert [name for name, end in named if not (ROOT / "llorch" / f"{name}{end}").exists()] == []


def test_page_is_short():
    assert PAGE.count("\n") <= 80


def test_a_missing_package_or_sentence_is_found():
    row = "| [`ops/`](llorch/ops) | Computes. |\n"
    assert described(row + row.replace("(llorch/ops)", "(llorch/op)") + "| `files/` | Reads. |\n") == [
        ("ops", "Computes.")
    ]


MAPS = [*sorted((ROOT / "llorch").rglob("__init__.py")), ROOT / "llorch/apps/serve/app.py"]


def mapped_modules(docstring: str) -> Iterator[str]:
    """Yield the modules in the left column of a module map; lines without two columns hold none."""
    for line in docstring.splitlines():
        left, gap, _ = re.sub(r" ?\(.*?\)", "", line.strip()).partition("  ")
        words = re.split(r",? ", left.strip())
        if gap and all(re.fullmatch(r"[a-z_0-9]+/?", word) for word in words):
            yield from words


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.relative_to(ROOT / "llorch").as_posix())
def test_module_map_of_a_docstring_names_existing_modules(path: Path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    names = [*mapped_modules(docstring)]
    assert [name for name in names if not any((path.parent / f"{name}{end}").exists() for end in ("", ".py"))] == []


def test_module_map_of_the_server_names_all_its_modules():
    docstring = ast.get_docstring(ast.parse((ROOT / "llorch/apps/serve/app.py").read_text(encoding="utf-8"))) or ""
    modules = {file.stem for file in (ROOT / "llorch/apps/serve").glob("*.py")} - {"__init__", "app"}
    assert modules - {*mapped_modules(docstring)} == {"openapi", "replies_of_responses", "requests_of_responses"}

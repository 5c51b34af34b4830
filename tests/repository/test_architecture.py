"""ARCHITECTURE.md: every package of llorch has one sentence, in the order of imports; its picture names modules."""

import re
from pathlib import Path

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

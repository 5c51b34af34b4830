"""List the messages of the package: errors, verdicts, progress lines, notes, and descriptions in the API.

    python tests/support/messages.py            file:line: text, one message a line
    python tests/support/messages.py cli serve  those of some packages

A message is a string with three plain words in a row that is no docstring and no help text of an option. Parts of an
f-string that are computed are shown as {...}.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "llorch"
WORDS = re.compile(r"(?<![\w.'-])[A-Za-z][a-z']*(?:,? [a-z][a-z']*){2,}(?![\w-])")
HELP = ("help", "short_help", "epilog", "examples", "default_help")  # click's texts; tests of help pages read those
SOURCES = ("dumps/writers",)  # programs in other languages
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def messages(root: Path = ROOT) -> list[tuple[Path, int, str]]:
    """List every message below a folder with its file and line."""
    files = (path for path in sorted(root.rglob("*.py")) if not any(name in path.as_posix() for name in SOURCES))
    return [(path, line, text) for path in files for line, text in messages_of(path.read_text(encoding="utf-8"))]


def messages_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the messages of one source file."""
    tree = ast.parse(source)
    left_out = {id(each) for node in ast.walk(tree) for each in _no_messages(node)}
    for node in ast.walk(tree):
        if id(node) in left_out or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        text = _text(node)
        if WORDS.search(text):
            yield node.lineno, re.sub(r"\s+", " ", text).strip()


def _no_messages(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the strings below a node that are docstrings, help texts or parts of an f-string."""
    if isinstance(node, Documented) and node.body and isinstance(node.body[0], ast.Expr):
        yield node.body[0].value
    if isinstance(node, ast.keyword) and node.arg in HELP:
        yield from ast.walk(node.value)
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in node.values if isinstance(part, ast.Constant))


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)


if __name__ == "__main__":
    for path, line, text in messages():
        name = path.relative_to(ROOT).as_posix()
        if not sys.argv[1:] or any(name.startswith(package) for package in sys.argv[1:]):
            print(f"{name}:{line}: {text}")

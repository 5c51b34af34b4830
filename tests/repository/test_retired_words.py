"""Retired words stand in no page, message, docstring or comment: the field has a better word, which the table names.

Code in backticks, names of options and quotations are not prose.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("llorch", "tests", "benchmarks", "reference_outputs", "checkpoints", ".ci", ".github")
PAGES = (".md", ".html", ".js", ".toml", ".yml", ".svg")
IN_TEXT = {  # retired words, as a regular expression: what to write
    r"witness(es)?|producers?": "reference engine, or its name",
    r"(the|foreign|float64|no) truth": "float64 reference",
    r"leaf(?! node| tensor)": "kernel, module",
    r"granted": "allowed; a tolerance",
    r"tooth|teeth": "fault injection, injected fault",
    r"sisters?": "control input",
    r"lockstep|baton": "layerwise",
    r"rooms": "packages",
    r"(of|is|are) (ours|theirs)|ours is|theirs": "llorch's or the engine's, with a noun",
    r"sees, too": "multimodal",
}
RETIRED = {re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.IGNORECASE): new for words, new in IN_TEXT.items()}
ANY = re.compile("|".join(pattern.pattern for pattern in RETIRED), re.IGNORECASE)
CODE = re.compile(  # fenced code, code in a line, targets of links, comments of pages, options, names of arguments
    r"^ *```.*?^ *```|(`+)(?!`).{1,300}?(?<!`)\1(?!`)|\]\([^)\s]*\)|<!--.*?-->|(?<!\w)--[a-z-]+|^ +\w+:",
    re.DOTALL | re.MULTILINE,
)


def files(folder: str, *suffixes: str) -> list[Path]:
    """List the files of a folder, or of the repository's root itself, without this one."""
    paths = ROOT.glob("*") if folder == "." else (ROOT / folder).rglob("*")
    return sorted(path for path in paths if path.suffix in suffixes and path != Path(__file__))


def texts(source: str, *, messages: bool) -> Iterator[tuple[int, str]]:
    """Yield comments and docstrings of a Python file, and other strings of several words, with their first lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        text = node if messages else node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and " " in text.value:
            yield text.lineno, text.value


def retired(text: str, first_line: int = 1) -> Iterator[str]:
    """Yield the line of each retired word outside code, the word and what to write."""
    prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for pattern, new in RETIRED.items():
        for word in pattern.finditer(prose):
            line = first_line + prose.count("\n", 0, word.start())
            yield f"{line}: {word[0]!r}; write: {new}"


def findings(path: Path) -> list[str]:
    """List the retired words in the text of a file; most files have none and are not parsed."""
    source = path.read_text(encoding="utf-8")
    if not ANY.search(source):
        return []
    name = path.relative_to(ROOT).as_posix()
    parts = texts(source, messages=name.startswith("llorch/")) if name.endswith(".py") else [(1, source)]
    return [f"{name}:{hit}" for line, text in parts for hit in retired(text, line)]


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_text_has_no_retired_word(folder: str):
    paths = files(folder, *PAGES, ".py")
    assert paths
    assert [hit for path in paths for hit in findings(path)] == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""Compare with the producer."""', 1),
        ('def f():\n    """Return x.\n\n    Args:\n        x: Distance from the\n            truth.\n    """', 5),
        ("x = 1\ny = 2  # Teeth of x", 2),
        ('\nraise ValueError(f"{x}: the witness has {y}")', 2),
    ],
)
def test_retired_word_of_a_program_is_found_with_its_line(source: str, line: int):
    (hit,) = [hit for at, text in texts(source, messages=True) for hit in retired(text, at)]
    assert hit.startswith(f"{line}: ")


@pytest.mark.parametrize(
    "page",
    [
        "`producer`, ``the `teeth` `` and --teeth",
        "```\nthe truth\n```\n\n  ```\n  theirs\n  ```",
        "[a page](of/witness.md) <!-- generated: teeth -->",
        "It is granular, and our own.",
    ],
)
def test_code_and_similar_words_are_not_found(page: str):
    assert list(retired(page)) == []
    assert len(list(retired(f"{page}\n\nThe\ntruth"))) == 1

"""Retired words stand in no name, page, message, docstring or comment: a table has the word of the field for each.

In texts, code in backticks and names of options are left out. Names are those that Python code defines or assigns.
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
IN_NAMES = {  # parts of names: what to write
    "witness witnesses producer producers": "engine",
    "truth": "reference",
    "evidence": "engine_outputs",
    "claim claims claimed": "expectation",
    "leaf leaves": "kernel, module",
    "granted": "tolerance",
    "tooth teeth planted": "fault, injected",
    "sister sisters": "control",
    "judged": "comparisons",
    "lockstep baton": "layerwise",
}
LATER = frozenset({"JudgedArray"})  # names of classes that a later issue deletes
RETIRED = {re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.IGNORECASE): new for words, new in IN_TEXT.items()}
ANY = re.compile("|".join(pattern.pattern for pattern in RETIRED), re.IGNORECASE)
PART_OF_NAME = {part: new for parts, new in IN_NAMES.items() for part in parts.split()}
CODE = re.compile(  # fenced code, code in a line, targets of links, comments of pages, options
    r"^ *```.*?^ *```|(`+)(?!`).{1,300}?(?<!`)\1(?!`)|\]\([^)\s]*\)|<!--.*?-->|(?<!\w)--[a-z-]+",
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


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names that a Python file defines or assigns, and arguments, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def retired_names(source: str) -> Iterator[str]:
    """Yield the line of each name with a retired part, the name and what to write."""
    if not re.search("|".join(PART_OF_NAME), source, re.IGNORECASE):
        return
    for line, name in names(source):
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)
        for part in PART_OF_NAME.keys() & {part.lower() for part in parts} if name not in LATER else ():
            yield f"{line}: {name}; write: {PART_OF_NAME[part]}"


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
    hits = [hit for path in paths for hit in findings(path)]
    assert paths
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_have_no_retired_part(folder: str):
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files(folder, ".py")}
    hits = [f"{path}:{hit}" for path, source in sources.items() for hit in retired_names(source)]
    assert not hits, "\n".join(hits)


def test_retired_parts_of_names_are_found_and_uses_and_similar_names_are_not():
    source = "class LoraLeaf: ...\ndef f(truth): ...\nx.witnessError = 1\nleaflet = x.truth(judged)\nimport claims"
    assert sorted(hit.partition(":")[0] for hit in retired_names(source)) == ["1", "2", "3"]


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

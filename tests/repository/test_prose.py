"""No test pins prose: nobody has to change a test when a sentence of a message, a help text or a report is improved.

Prose is four plain words in a row. A test asserts facts in place of it: see `tests/support/runs/refusals.py`.
"""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
N_WORDS = 4
PLAIN = re.compile(r"(?<![\w.'-])[A-Za-z][a-z']*(?:,? [a-z][a-z']*)*(?![\w.-]*\w)")  # words between single spaces
Run = tuple[str, ...]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
INPUTS = (  # what tests give to llorch, names, and what others say; the same words stand in llorch, too
    "once upon a time, a small fox found a stone",
    "once upon a time there was a small red fox",
    "upon a time there was a fox",
    "for i in range",
    "for n in range",
    "is no part of a",  # of the comment of a program
    "llorch data show story path",
    "size of the change",  # a check of `llorch lora doctor`
    "no such file or directory",
    "found missing adapter keys",  # PEFT; torch says what follows
    "matrix multiplication available but not enabled",
    "but there was no current",
    "online softmax is disabled on the fly since",
)


def word_runs(text: str) -> Iterator[Run]:
    """Yield every run of `N_WORDS` plain words of a text; of a regular expression without its backslashes."""
    for found in PLAIN.finditer(text.replace("\\", "")):
        words = re.findall(r"[a-z']+", found[0].lower())
        yield from (tuple(words[start : start + N_WORDS]) for start in range(len(words) - N_WORDS + 1))


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Yield every string of a source text, and every constant part of an f-string, with its line; no docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    bodies = [node.body for node in nodes if isinstance(node, Documented)]
    docstrings = {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


def offenders(source: str, said: Collection[Run]) -> list[tuple[int, str]]:
    """List the literals of a test, with their lines, that hold a run of a message and are no input."""
    inputs = {run for text in INPUTS for run in word_runs(text)}
    return [
        (line, text)
        for line, text in literals(source)
        if any(run in said and run not in inputs for run in word_runs(text))
    ]


def said_by(sources: Collection[str]) -> set[Run]:
    """Collect the runs of all messages in source texts."""
    return {run for source in sources for _, text in literals(source) for run in word_runs(text)}


def test_no_test_pins_a_sentence():
    said = said_by([path.read_text(encoding="utf-8") for path in sorted((ROOT / "llorch").rglob("*.py"))])
    assert len(said) > 1000
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for line, text in offenders(path.read_text(encoding="utf-8"), said)
    ]
    assert not found, f"{len(found)} literals hold a sentence; assert facts:\n" + "\n".join(found)


MESSAGE = '''
def refuse(name, hat):
    """Refuse what is no purple hat of felt rank."""
    raise ValueError(f"{name}: expected a purple hat of felt, got {hat}")
'''


@pytest.mark.parametrize(
    "test",
    [
        'def test_it():\n    assert said == "x: expected a purple hat of felt, got 3"',
        "def test_it():\n    assert f'{x}: Expected a purple hat' in said",
        "@pytest.mark.parametrize('said', [(1, 'purple hat of felt')])\ndef test_it(said): ...",
        "TABLE = [row('name', make, ValueError, r'purple hat\\ of felt')]",
    ],
)
def test_a_sentence_of_a_message_is_found_wherever_a_test_holds_it(test: str):
    ((_, text),) = offenders(test, said_by([MESSAGE]))
    assert "hat" in text


@pytest.mark.parametrize(
    "test",
    [
        "def test_it():\n    assert_tells(said, 'x', 'hat', got=3)",
        "def test_it():\n    '''Expected a purple hat of felt.'''",
        "def test_it():\n    assert 'purple hat of' in said",  # three words
        "def test_it():\n    assert 'refuse what is no purple' in said",  # of a docstring
        "PROMPT = 'Once upon a time'",
    ],
)
def test_facts_docstrings_and_inputs_are_no_sentences(test: str):
    assert offenders(test, said_by([MESSAGE, "EXAMPLE = 'once upon a time'"])) == []

"""Refusals as data: which error, with which code, and which facts its message tells, whatever its sentence is.

A fact is a value, a name, a path or a number. A fact that is a sentence is refused here, so that sentences can be
improved without a change of tests; those that users meet most stand in `tests/cli/messages.toml`.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

SENTENCE = re.compile(r"[A-Za-z][a-z']*(,? [a-z][a-z']+){3}")  # four words of prose
MARKS = {"expected": "expected", "got": "got"}  # fields of a message that a word announces


def assert_tells(text: str, *facts: object, **fields: object) -> None:
    """Assert that a message holds every fact as a whole word or number.

    Args:
        text: The message.
        facts: What it holds anywhere.
        fields: `expected`, `got`: what it holds behind that word, if the message has the word; `where`: anywhere.
            A tuple stands for several facts.
    """
    for fact in facts:
        _assert_holds(text, fact, text)
    for name, value in fields.items():
        assert name in ("expected", "got", "where"), name
        before, mark, after = text.partition(MARKS.get(name, "\0"))
        for fact in value if isinstance(value, tuple) else (value,):
            _assert_holds(after if mark else before, fact, text)


def _assert_holds(part: str, fact: object, text: str) -> None:
    said = str(fact)
    assert not SENTENCE.search(said), f"{said!r} is a sentence; name the value, the path or the number in it"
    edges = [r"(?<![\w.-])" if said[:1].isalnum() else "", r"(?!\w|\.\d)" if said[-1:].isalnum() else ""]
    assert said, "an empty fact is told by every message"
    assert re.search(edges[0] + re.escape(said) + edges[1], part), f"expected {said!r} in: {text}"


@contextmanager
def refuses(kind: type[BaseException] | str, *facts: object, **fields: object) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the block raises an error of a class, or a FormatError with a code, that tells the facts.

    Yields:
        The exception info of `pytest.raises`.
    """
    from llorch.runtime.errors import FormatError

    error = FormatError if isinstance(kind, str) else kind
    with pytest.raises(error) as caught:
        yield caught
    if isinstance(kind, str):
        found: Any = caught.value
        assert found.code == kind, str(found)
    assert_tells(str(caught.value), *facts, **fields)


@dataclass(frozen=True)
class Refusal:
    """A row of a table of refusals: what is refused, with which error or code, and which facts are told."""

    name: str
    make: Callable[..., object]
    kind: type[BaseException] | str
    facts: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)

    def check(self, *args: object) -> None:
        """Call `make` with what the test provides, and judge the error."""
        with refuses(self.kind, *self.facts, **self.fields):
            self.make(*args)


def row(
    name: str, make: Callable[..., object], kind: type[BaseException] | str, *facts: object, **fields: object
) -> Any:
    """Make a row of a table for `pytest.mark.parametrize("refusal", ...)`, with its name as id."""
    return pytest.param(Refusal(name, make, kind, facts, fields), id=name)


def assert_cli_refuses(
    result: Any, exit_code: int, *facts: object, stdout: str = "", traceback: bool = False, **fields: object
) -> None:
    """Assert that a command ended with a code, printed nothing but one error line, and told the facts.

    Args:
        result: What `invoke` or `spawn` returned.
        exit_code: The code.
        facts: See `assert_tells`; they stand in the last line of stderr or, of a usage error, in its lines.
        stdout: What it printed before.
        traceback: Whether a traceback stands before the line.
        fields: See `assert_tells`.
    """
    code = result.exit_code if hasattr(result, "exit_code") else result.returncode
    assert (code, result.stdout) == (exit_code, stdout), (result.stdout, result.stderr)
    assert ("Traceback" in result.stderr) == traceback
    assert_tells(" ".join(result.stderr.split()), *facts, **fields)

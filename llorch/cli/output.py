"""Output: results on stdout, messages on stderr, progress only on a terminal."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


def say(line: str) -> None:
    """Print a message on stderr."""
    click.echo(line, err=True)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Write JSON that every parser accepts: NaN and infinity become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    """Replace NaN and infinity by None, also inside lists and mappings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(task: str) -> Iterator[Callable[[str], None]]:
    """Show a progress line while the body runs, if stderr is a terminal; yield a function that changes its text."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(task)) as status:
        yield lambda line: status.update(Text(f"{task}: {line}"))

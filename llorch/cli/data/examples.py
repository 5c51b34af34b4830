"""Training examples and what they amount to, for people and for programs."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import click
import numpy as np

from llorch.files.tokenizer import Tokenizer
from llorch.training.batch import IGNORED, Example
from llorch.training.data import Examples, TrainingData
from llorch.training.data.plan import best_fit

_MARKS = "[[", "]]"  # around what is learned, where there is no colour


class TokenSpan(NamedTuple):
    """Neighbouring tokens that are alike."""

    text: str  # a character whose tokens lie in two pieces shows as U+FFFD in both
    learned: bool
    control: bool  # control tokens; their text may also be written by a user, and is none then


def pieces_of(example: Example, tokenizer: Tokenizer | None) -> list[TokenSpan]:
    """Cut an example where learned tokens begin and end; without a tokenizer, tokens show as ids."""
    control = tokenizer.control_ids if tokenizer is not None else frozenset[int]()
    labels = (IGNORED, *example.labels[1:])
    kinds = [(label != IGNORED, one in control) for one, label in zip(example.ids, labels, strict=True)]
    runs = groupby(zip(example.ids, kinds, strict=True), key=lambda pair: pair[1])
    return [TokenSpan(_decoded_text([one for one, _ in pairs], tokenizer), *kind) for kind, pairs in runs]


def _decoded_text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """Return the text of token ids, or the ids themselves, separated by spaces, if there is no tokenizer."""
    if tokenizer is None:
        return "".join(f"{one} " for one in ids)
    raw = b"".join(tokenizer.token_bytes(one) or tokenizer.decode([one], skip_special=False).encode() for one in ids)
    return raw.decode("utf-8", "replace")


def as_object(example: Example, pieces: Sequence[TokenSpan]) -> dict[str, object]:
    """Write an example for programs: ids and labels as training has them, and the pieces."""
    return {
        "source": example.source,
        "tokens": len(example.ids),
        "learned": example.n_trained,
        "ids": list(example.ids),
        "labels": [IGNORED, *example.labels[1:]],
        "pieces": [piece._asdict() for piece in pieces],
    }


def facts_of(data: TrainingData, examples: Examples) -> dict[str, Any]:
    """Count a split; `fill` is the share of packed rows that holds tokens."""
    room = data.settings.max_length
    longest = int(np.argmax(examples.lengths))
    n_rows = len(best_fit(examples.lengths, room=room))
    return {
        "examples": len(examples),
        "tokens": examples.n_tokens,
        "learned": examples.n_trained,
        "longest": {"tokens": int(examples.lengths[longest]), "source": examples[longest].source},
        "packed": {"room": room, "rows": n_rows, "fill": examples.n_tokens / (n_rows * room)},
        "digest": data.digest,
        "notes": data.notes,
    }


def summary(split: str, facts: dict[str, Any]) -> Iterator[str]:
    """Say the counts of a split in words."""
    tokens, learned, longest, packed = facts["tokens"], facts["learned"], facts["longest"], facts["packed"]
    yield f"{split}: {facts['examples']} examples, {tokens} tokens, {learned} learned ({learned / tokens:.1%})"
    yield f"longest: {longest['tokens']} tokens ({longest['source']}); mean {tokens / facts['examples']:.1f}"
    yield f"packed into rows of {packed['room']}: {packed['rows']} rows, {packed['fill']:.1%} full"


def print_examples(shown: Sequence[tuple[Example, Sequence[TokenSpan]]]) -> None:
    """Print examples on stdout; what is learned is green, or in brackets where there is no colour."""
    from rich.text import Text

    from llorch.cli.tables import console

    out = console()
    coloured = out.is_terminal and not out.no_color
    for example, pieces in shown:
        head = f"{example.source}: {len(example.ids)} tokens, {example.n_trained} learned"
        if coloured:
            parts = [(_printable(piece.text), _style(piece)) for piece in pieces]
            out.print(Text(head, style="bold"), Text.assemble(*parts), "", sep="\n")
        else:
            click.echo(f"{head}\n{_bracketed(pieces)}\n")


def _style(piece: TokenSpan) -> str:
    """Return the rich style of a piece: green if it is learned, underlined if it is a control token."""
    colour = "bold green" if piece.learned else "dim"
    return f"{colour} underline" if piece.control else colour


def _bracketed(pieces: Sequence[TokenSpan]) -> str:
    """Join the pieces' texts, with marks around each run of learned ones."""
    runs = groupby(pieces, key=lambda piece: piece.learned)
    texts = [(learned, "".join(_printable(piece.text) for piece in run)) for learned, run in runs]
    return "".join(text.join(_MARKS) if learned else text for learned, text in texts)


def _printable(text: str) -> str:
    """Replace characters that are not printable by their escapes; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)

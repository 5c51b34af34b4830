"""Training examples and their counts, for people and for programs."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import click
import numpy as np

from llorch.files.tokenizer import Tokenizer
from llorch.training.batch import IGNORED, Example
from llorch.training.data import Examples, TrainingData
from llorch.training.data.plan import best_fit

_MARKS = "[[", "]]"  # around tokens in the loss, if there is no colour


class TokenSpan(NamedTuple):
    """Run of neighbouring tokens that are all in the loss or all masked, and all control tokens or none."""

    text: str  # a character whose tokens lie in two spans shows as U+FFFD in both
    learned: bool  # in the loss
    control: bool  # True for control tokens; the same text typed by a user is no control token


def pieces_of(example: Example, tokenizer: Tokenizer | None) -> list[TokenSpan]:
    """Split an example where the loss mask changes; without a tokenizer, tokens show as ids."""
    control = tokenizer.control_ids if tokenizer is not None else frozenset[int]()
    labels = (IGNORED, *example.labels[1:])  # nothing predicts the first token
    kinds = [(label != IGNORED, token in control) for token, label in zip(example.ids, labels, strict=True)]
    runs = groupby(zip(example.ids, kinds, strict=True), key=lambda pair: pair[1])
    return [TokenSpan(_decoded_text([token for token, _ in pairs], tokenizer), *kind) for kind, pairs in runs]


def _decoded_text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """Return the text of t ids, or the ids themselves, separated by spaces, if there is no tokenizer."""
    if tokenizer is None:
        return "".join(f"{t} " for t in ids)
    text_bytes = b"".join(tokenizer.token_bytes(t) or tokenizer.decode([t], skip_special=False).encode() for t in ids)
    return text_bytes.decode("utf-8", "replace")


def as_object(example: Example, pieces: Sequence[TokenSpan]) -> dict[str, object]:
    """Return an example for programs: ids and labels as in training, and the spans."""
    return {
        "source": example.source, "tokens": len(example.ids), "learned": example.n_trained, "ids": list(example.ids),
        "labels": [IGNORED, *example.labels[1:]], "pieces": [piece._asdict() for piece in pieces],
    }  # fmt: skip


def facts_of(data: TrainingData, examples: Examples) -> dict[str, Any]:
    """Count a split, also packed (several examples in a row); `fill` is the share of packed rows that holds tokens."""
    row_length = data.settings.max_length
    longest = int(np.argmax(examples.lengths))
    n_rows = len(best_fit(examples.lengths, room=row_length))
    return {
        "examples": len(examples), "tokens": examples.n_tokens, "learned": examples.n_trained,
        "longest": {"tokens": int(examples.lengths[longest]), "source": examples[longest].source},
        "packed": {"room": row_length, "rows": n_rows, "fill": examples.n_tokens / (n_rows * row_length)},
        "digest": data.digest, "notes": data.notes,
    }  # fmt: skip


def summary(split: str, facts: dict[str, Any]) -> Iterator[str]:
    """Yield the counts of a split as text."""
    tokens, learned, longest, packed = facts["tokens"], facts["learned"], facts["longest"], facts["packed"]
    yield f"{split}: {facts['examples']} examples, {tokens} tokens, {learned} learned ({learned / tokens:.1%})"
    yield f"longest: {longest['tokens']} tokens ({longest['source']}); mean {tokens / facts['examples']:.1f}"
    yield f"packed into rows of {packed['room']}: {packed['rows']} rows, {packed['fill']:.1%} full"


def print_examples(examples: Sequence[tuple[Example, Sequence[TokenSpan]]]) -> None:
    """Print examples on stdout; tokens in the loss are green, or in brackets if there is no colour."""
    from rich.text import Text

    from llorch.cli.tables import console

    out = console()
    is_coloured = out.is_terminal and not out.no_color
    for example, pieces in examples:
        heading = f"{example.source}: {len(example.ids)} tokens, {example.n_trained} learned"
        if is_coloured:
            texts = [(_printable(piece.text), _span_style(piece)) for piece in pieces]
            out.print(Text(heading, style="bold"), Text.assemble(*texts), "", sep="\n")
        else:
            click.echo(f"{heading}\n{_mark_learned(pieces)}\n")


def _span_style(piece: TokenSpan) -> str:
    """Return the rich style of a span: green if it is in the loss, underlined if it is a control token."""
    colour = "bold green" if piece.learned else "dim"
    return f"{colour} underline" if piece.control else colour


def _mark_learned(pieces: Sequence[TokenSpan]) -> str:
    """Join the spans' texts, with marks around each run in the loss."""
    runs = groupby(pieces, key=lambda piece: piece.learned)
    texts = [(learned, "".join(_printable(piece.text) for piece in run)) for learned, run in runs]
    return "".join(text.join(_MARKS) if learned else text for learned, text in texts)


def _printable(text: str) -> str:
    """Replace characters that are not printable by their escapes; line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)

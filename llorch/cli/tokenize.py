"""`llorch tokenize`: convert text to token ids."""

import json

import click

from llorch.cli.options import MODEL, TEXT, group, json_option, page_option, verb
from llorch.cli.output import to_json


@verb(
    "Turn text into token ids.",
    'llorch tokenize story "The little fox ran home."',
    'llorch tokenize story "The little fox" --json',
    "cat README.md | llorch tokenize story --no-special",
)
@click.argument("model", type=MODEL)
@click.argument("text", type=TEXT, required=False)
@group(
    "Input",
    page_option("--no-special", is_flag=True, help="No beginning and end tokens."),
    page_option("--parse-special", is_flag=True, help="Control tokens read from the text, such as <|eot_id|>."),
)
@json_option("One object: ids, and tokens with id, bytes (hexadecimal) and text (null if the bytes are not UTF-8).")
def command(*, model: str, text: str | None, no_special: bool, parse_special: bool, as_json: bool) -> None:
    """Print the token ids of TEXT, one per line, each with its data of text.

    Without TEXT, stdin is read. Pieces are quoted. A token that is part of a character shows its bytes.
    """
    from llorch.cli.inputs import model_path, prompt_text
    from llorch.files import open_weights
    from llorch.model.model import Model

    tokenizer = Model(open_weights(model_path(model))).tokenizer
    ids = tokenizer.encode(prompt_text(text), add_special=not no_special, parse_special=parse_special)
    pieces = [tokenizer.token_bytes(token) or tokenizer.decode([token], skip_special=False).encode() for token in ids]
    if as_json:
        tokens = [{"id": i, "bytes": p.hex(), "text": _piece_text(p)} for i, p in zip(ids, pieces, strict=True)]
        click.echo(to_json({"ids": ids, "tokens": tokens}))
        return
    for token, piece in zip(ids, pieces, strict=True):
        click.echo(f"{token:>7}  {quoted(piece)}")


def quoted(piece: bytes) -> str:
    """Quote a piece for a reader: as a string, or as bytes if it is not valid UTF-8."""
    text = _piece_text(piece)
    if text is None:
        return repr(piece)
    return json.dumps(text) if not text.isprintable() else json.dumps(text, ensure_ascii=False)


def _piece_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None

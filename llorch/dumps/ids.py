"""Token ids of a dump: stated by it, by the mapping or by the command; else found in its embeddings."""

from collections.abc import Mapping, Sequence

import numpy as np

from llorch.dumps.mapping import NameMap
from llorch.dumps.raw import RawArray, RawDump
from llorch.dumps.stage_dump import Tokens
from llorch.errors import FormatError
from llorch.files import Weights

_ROWS_AT_ONCE = 4096
_SAME_ROW = 1e-2  # of its norm: rows that were rounded to bfloat16 are within 2^-9


def passes_of(
    raw: RawDump,
    mapping: NameMap,
    ids: Sequence[int] | None,
    first_position: int,
    weights: Weights | None,
    embeddings: Mapping[int, RawArray],
    vocab_size: int,
) -> tuple[tuple[Tokens, ...], list[str]]:
    """The tokens of every pass, and a note where they were found in `embeddings`, arrays by pass.

    FormatError: nobody states them, two say different things, a pass has none, or the model has no such token.
    """
    n_passes = 1 + max((number for number, _ in raw.arrays), default=0)
    given = (Tokens(tuple(map(int, ids)), first_position),) if ids else ()
    said = {"the dump": raw.passes, "the mapping": mapping.passes, "the command": given}
    said = {who: passes for who, passes in said.items() if passes}
    notes = []
    if not said and weights is not None:
        found = _in_embeddings(embeddings, weights, n_passes, first_position)
        said = {"the embeddings": found} if found else {}
        notes = [f"token ids were found in {embeddings[0].name}, rows of the embedding table"] if found else []
    if not said:
        raise FormatError(
            "Missing",
            "ids: expected the token ids of the run, got none; give --ids, or [run] ids in a mapping",
            path=raw.source,
        )
    (who, passes), *others = said.items()
    for other, theirs in others:
        if theirs != passes:
            raise FormatError("Inconsistent", f"ids: {who} has {passes}, {other} has {theirs}", path=raw.source)
    if n_passes > len(passes):
        message = f"ids: expected those of {n_passes} passes, got {len(passes)} from {who}"
        raise FormatError("Missing", message, path=raw.source)
    wrong = next((token for tokens in passes for token in tokens.ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise FormatError("OutOfRange", f"ids: expected 0 to {vocab_size - 1}, got {wrong}", path=raw.source)
    return passes, notes


def _in_embeddings(
    embeddings: Mapping[int, RawArray], weights: Weights, n_passes: int, first_position: int
) -> tuple[Tokens, ...]:
    """Tokens of all passes, or none."""
    width, passes = weights.config.hidden_size, []
    for number in range(n_passes):
        array = embeddings.get(number)
        if array is None or array.shape[-1:] != (width,):
            return ()
        ids = ids_from_embedding(array.read().reshape(-1, width), weights)
        if ids is None:
            return ()
        passes.append(Tokens(ids, first_position))
        first_position += len(ids)
    return tuple(passes)


def ids_from_embedding(array: np.ndarray, weights: Weights) -> tuple[int, ...] | None:
    """The tokens whose embeddings these are.

    Args:
        array: The stage `embed`, (tokens, hidden).
        weights: Of the model.

    Returns:
        Of equal rows the lowest id; None where a row is no row of the table.
    """
    wanted = array.astype(np.float64)
    best = np.full(len(wanted), np.inf)
    ids = np.zeros(len(wanted), np.int64)
    table = weights.array("embed_tokens")
    for start in range(0, len(table), _ROWS_AT_ONCE):
        rows = table[start : start + _ROWS_AT_ONCE].astype(np.float64)
        squares = (rows**2).sum(1) - 2 * wanted @ rows.T  # less the wanted row's own, the same for all
        nearest = squares.argmin(1)
        distances = squares[np.arange(len(wanted)), nearest]
        ids = np.where(distances < best, start + nearest, ids)
        best = np.minimum(best, distances)
    errors = np.linalg.norm(wanted - table[ids], axis=1)
    is_row = errors <= _SAME_ROW * np.linalg.norm(wanted, axis=1)
    return tuple(map(int, ids)) if is_row.all() else None

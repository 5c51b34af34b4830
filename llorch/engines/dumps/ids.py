"""Token ids of a dump: stated by it, by the mapping or by the command; else found in its embeddings."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.files import Weights
from llorch.runtime.errors import FormatError, GuardFailed
from llorch.stages.stage_ref import Tokens

_ROWS_AT_ONCE = 4096
_SHOWN_IDS = 8
_SAME_ROW = 1e-2  # of its norm: rows that were rounded to bfloat16 are within 2^-9

EMBEDDINGS = "the embeddings"  # a source of tokens, in messages
FIRST_TOKEN_TWICE = "the first token is there twice"  # a benchmark looks for it


def passes_of(
    raw: RawDump,
    mapping: NameMap,
    ids: Sequence[int] | None,
    first_position: int,
    weights: Weights | None,
    embeddings: Mapping[int, RawArray],
    vocab_size: int,
) -> tuple[tuple[Tokens, ...], list[str]]:
    """Find the tokens of every pass, and write a note if they were found in `embeddings` (arrays by pass).

    FormatError: nothing states the tokens, a pass has none, or the model has no such token. GuardFailed: two sources
    disagree, or a pass does not begin where the previous pass ended.
    """
    n_passes = 1 + max((number for number, _ in raw.arrays), default=0)
    stated = (Tokens(tuple(map(int, ids)), first_position),) if ids else ()
    sources = {"the dump": raw.passes, "the mapping": mapping.passes, "the command": stated}
    if not any(sources.values()) and weights is not None:
        sources = {EMBEDDINGS: _in_embeddings(embeddings, weights, n_passes, first_position)}
    who, passes = _agreed_passes({who: passes for who, passes in sources.items() if passes}, raw.source)
    if n_passes > len(passes):
        message = f"ids: expected token ids for {n_passes} passes, got {len(passes)} from {who}"
        raise FormatError("Missing", message, path=raw.source)
    wrong = next((token for tokens in passes for token in tokens.ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise FormatError("OutOfRange", f"ids: expected 0 to {vocab_size - 1}, got {wrong}", path=raw.source)
    require_one_after_the_other(passes, raw.source)
    if who != EMBEDDINGS:
        return passes, []
    return passes, [f"llorch found the token ids in {embeddings[0].name}, which holds rows of the embedding table"]


def _agreed_passes(sources: Mapping[str, Sequence[Tokens]], path: str) -> tuple[str, tuple[Tokens, ...]]:
    """Return the first source and its passes; all sources state the same ones."""
    if not sources:
        message = "ids: expected the token ids of the run, got none; give --tokens, or [run] ids in a mapping"
        raise FormatError("Missing", message, path=path)
    (who, passes), *others = sources.items()
    for other, theirs in others:
        if theirs != passes:
            raise _contradiction(path, who, passes, other, theirs)
    return who, tuple(passes)


def _contradiction(
    source: str, who: str, passes: Sequence[Tokens], other: str, theirs: Sequence[Tokens]
) -> GuardFailed:
    """Make the refusal of two sources that state other tokens or other positions."""
    wanted, actual = ([token for tokens in each for token in tokens.ids] for each in (theirs, passes))
    if wanted != actual:
        message = f"expected {shown(wanted)}, as in {other}, got {shown(actual)} in {who}{parting(wanted, actual)}"
        return GuardFailed("ids", f"{message}; run the engine on the same tokens", source=source)
    firsts = ([each.first_position for each in tokens] for tokens in (theirs, passes))
    wanted, actual = (", ".join(map(str, positions)) for positions in firsts)
    message = f"expected passes from {wanted} on, as in {other}, got {actual} in {who}"
    return GuardFailed("positions", f"{message}; run the engine at the same positions", source=source)


def require_one_after_the_other(passes: Sequence[Tokens], source: str) -> None:
    """Refuse (GuardFailed) passes of which one does not begin where the one before ended."""
    for number, (before, after) in enumerate(pairwise(passes), 1):
        end, start = before.first_position + len(before.ids), after.first_position
        if start != end:
            message = f"expected pass {number} to begin at {end}, where the previous pass ends, got {start}"
            advice = "make one dump for each sequence, with all passes of the sequence"
            raise GuardFailed("positions", f"{message}; {advice}", source=source)


def _in_embeddings(
    embeddings: Mapping[int, RawArray], weights: Weights, n_passes: int, first_position: int
) -> tuple[Tokens, ...]:
    """Find the tokens of all passes in the embeddings; empty if a row is not found."""
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
    """Find the tokens that have these embeddings, (tokens, hidden): the lowest ids if several rows are equal.

    None if a row is not in the embedding table.
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


def parting(wanted: list[int], actual: list[int]) -> str:
    """Explain how one sequence of tokens differs from another, as the end of a message."""
    if len(actual) > 1 and (actual[1:] == wanted or (len(actual) == len(wanted) > 1 and actual[1:] == wanted[:-1])):
        twice = f"{FIRST_TOKEN_TWICE}, as when template and tokenizer both add BOS"
        return f": {twice if actual[0] == actual[1] else f'{actual[0]} comes first, like BOS'}"
    for shorter, longer, what in ((wanted, actual, "padded with"), (actual, wanted, "without the padding of")):
        n_more = len(longer) - len(shorter)
        for end, rest in ((longer[:n_more], longer[n_more:]), (longer[len(shorter) :], longer[: len(shorter)])):
            if n_more > 0 and rest == shorter and len({*end}) == 1:
                return f": {what} {n_more} times {end[0]}"
    differing = (index for index, (a, b) in enumerate(zip(wanted, actual, strict=False)) if a != b)
    return f": first difference at token {next(differing, min(len(wanted), len(actual)))}"


def shown(ids: Sequence[int]) -> str:
    """Format token ids for a message."""
    shown = " ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{len(ids)} tokens ({shown}{' ...' if len(ids) > _SHOWN_IDS else ''})"

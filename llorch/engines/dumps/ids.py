"""Token ids of a dump: declared in the dump, the mapping or the command, or detected from its embeddings."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.files import Weights
from llorch.runtime.errors import FormatError, GuardFailed
from llorch.stages.stage_ref import Tokens

_ROWS_AT_ONCE = 4096  # rows of the embedding table in one product, to limit memory
_SHOWN_IDS = 8  # in messages
_SAME_ROW = 1e-2  # largest distance over norm of equal rows; rounding to bfloat16 moves a row by 2^-9

EMBEDDINGS = "the embeddings"  # a source of tokens, in messages
FIRST_TOKEN_TWICE = "the first token is there twice"  # a benchmark searches for this text


def passes_of(
    raw: RawDump,
    mapping: NameMap,
    ids: Sequence[int] | None,
    first_position: int,
    weights: Weights | None,
    embeddings: Mapping[int, RawArray],
    vocab_size: int,
) -> tuple[tuple[Tokens, ...], list[str]]:
    """Return the tokens of every pass (call of the forward), and a note if they were detected from `embeddings`.

    `ids` and `first_position` come from the command; `embeddings` are arrays by pass. Raise FormatError if no source
    has the tokens, or a token is not in the vocabulary. Raise GuardFailed if two sources disagree, or a pass does not
    start where the previous pass ended.
    """
    n_passes = 1 + max((number for number, _ in raw.arrays), default=0)
    command_passes = (Tokens(tuple(map(int, ids)), first_position),) if ids else ()
    sources = {"the dump": raw.passes, "the mapping": mapping.passes, "the command": command_passes}
    if not any(sources.values()) and weights is not None:
        sources = {EMBEDDINGS: _in_embeddings(embeddings, weights, n_passes, first_position)}
    source, passes = _agreed_passes({source: passes for source, passes in sources.items() if passes}, raw.source)
    if n_passes > len(passes):
        message = f"ids: expected token ids for {n_passes} passes, got {len(passes)} from {source}"
        raise FormatError("Missing", message, path=raw.source)
    bad_id = next((token for tokens in passes for token in tokens.ids if not 0 <= token < vocab_size), None)
    if bad_id is not None:
        raise FormatError("OutOfRange", f"ids: expected 0 to {vocab_size - 1}, got {bad_id}", path=raw.source)
    require_one_after_the_other(passes, raw.source)
    if source != EMBEDDINGS:
        return passes, []
    return passes, [f"llorch found the token ids in {embeddings[0].name}, which holds rows of the embedding table"]


def _agreed_passes(sources: Mapping[str, Sequence[Tokens]], path: str) -> tuple[str, tuple[Tokens, ...]]:
    """Return the first source and its passes; raise an error unless all sources have equal passes."""
    if not sources:
        message = "ids: expected the token ids of the run, got none; give --tokens, or [run] ids in a mapping"
        raise FormatError("Missing", message, path=path)
    (source, passes), *remaining = sources.items()
    for other_source, other_passes in remaining:
        if other_passes != passes:
            raise _contradiction(path, source, passes, other_source, other_passes)
    return source, tuple(passes)


def _contradiction(
    source: str, source_a: str, passes_a: Sequence[Tokens], source_b: str, passes_b: Sequence[Tokens]
) -> GuardFailed:
    """Create the error for two sources with different tokens or positions."""
    ids_b, ids_a = ([token for tokens in passes for token in tokens.ids] for passes in (passes_b, passes_a))
    if ids_b != ids_a:
        message = f"expected {shown(ids_b)}, as in {source_b}, got {shown(ids_a)} in {source_a}{parting(ids_b, ids_a)}"
        return GuardFailed("ids", f"{message}; run the engine on the same tokens", source=source)
    firsts = ([tokens.first_position for tokens in passes] for passes in (passes_b, passes_a))
    ids_b, ids_a = (", ".join(map(str, positions)) for positions in firsts)
    message = f"expected passes from {ids_b} on, as in {source_b}, got {ids_a} in {source_a}"
    return GuardFailed("positions", f"{message}; run the engine at the same positions", source=source)


def require_one_after_the_other(passes: Sequence[Tokens], source: str) -> None:
    """Raise GuardFailed if a pass does not start where the previous pass ended."""
    for number, (previous, current) in enumerate(pairwise(passes), 1):
        end, start = previous.first_position + len(previous.ids), current.first_position
        if start != end:
            message = f"expected pass {number} to begin at {end}, where the previous pass ends, got {start}"
            advice = "make one dump for each sequence, with all passes of the sequence"
            raise GuardFailed("positions", f"{message}; {advice}", source=source)


def _in_embeddings(
    embeddings: Mapping[int, RawArray], weights: Weights, n_passes: int, first_position: int
) -> tuple[Tokens, ...]:
    """Detect the tokens of all passes from their embeddings; empty if a pass has none, or a row is not in the table."""
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
    """Return the ids of embeddings, (tokens, hidden); the lowest if table rows are equal; None if one is no row."""
    targets = array.astype(np.float64)
    best = np.full(len(targets), np.inf)
    ids = np.zeros(len(targets), np.int64)
    table = weights.array("embed_tokens")
    for start in range(0, len(table), _ROWS_AT_ONCE):
        rows = table[start : start + _ROWS_AT_ONCE].astype(np.float64)
        squares = (rows**2).sum(1) - 2 * targets @ rows.T  # squared distance without |target|^2, which is constant
        nearest = squares.argmin(1)
        distances = squares[np.arange(len(targets)), nearest]
        ids = np.where(distances < best, start + nearest, ids)
        best = np.minimum(best, distances)
    errors = np.linalg.norm(targets - table[ids], axis=1)
    is_row = errors <= _SAME_ROW * np.linalg.norm(targets, axis=1)
    return tuple(map(int, ids)) if is_row.all() else None


def parting(expected: list[int], actual: list[int]) -> str:
    """Explain the difference of two token sequences, as the end of an error message."""
    if len(actual) > 1 and (
        actual[1:] == expected or (len(actual) == len(expected) > 1 and actual[1:] == expected[:-1])
    ):
        explanation = f"{FIRST_TOKEN_TWICE}, as when template and tokenizer both add BOS"
        return f": {explanation if actual[0] == actual[1] else f'{actual[0]} comes first, like BOS'}"
    for shorter, longer, relation in ((expected, actual, "padded with"), (actual, expected, "without the padding of")):
        n_extra = len(longer) - len(shorter)
        for end, middle in ((longer[:n_extra], longer[n_extra:]), (longer[len(shorter) :], longer[: len(shorter)])):
            if n_extra > 0 and middle == shorter and len({*end}) == 1:
                return f": {relation} {n_extra} times {end[0]}"
    differing = (index for index, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b)
    return f": first difference at token {next(differing, min(len(expected), len(actual)))}"


def shown(ids: Sequence[int]) -> str:
    """Format token ids for a message."""
    first_ids = " ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{len(ids)} tokens ({first_ids}{' ...' if len(ids) > _SHOWN_IDS else ''})"

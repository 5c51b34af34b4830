"""Guards: check that the numbers of a dump can be compared with llorch's at all. `read_comparable` reads such a dump.

Typical invalid comparisons use two prompts, a row before a norm and a row after it, or other weights. Guards do not
judge the engine's mistakes: an array counts as misnamed only if the arrays made from it prove it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llorch.diagnosis.search.norm_places import check_norms, dumped_tokens, relative_distance
from llorch.diagnosis.weight_hashes import check_weights
from llorch.engines.dumps.ids import ids_from_embedding, parting, require_one_after_the_other, shown
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.mapping import read_mapping
from llorch.engines.dumps.raw import with_earlier
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.ops.embedding import embedding
from llorch.runtime.errors import GuardFailed
from llorch.stages.comparison import FLOORS, measure
from llorch.stages.table import Stage, keys

_CLOSE = 0.1  # relative error of the same rows, whatever their dtype


def read_comparable(
    path: Path,
    weights: Weights,
    *,
    mapping: Path | None = None,
    ids: Sequence[int] | None = None,
    first_position: int | None = None,
) -> StageDump:
    """Read a dump as stages of a model, and refuse it if its numbers cannot be compared with the model's.

    Args:
        path: File or folder of the dump.
        weights: Weights of the model, as the file has them.
        mapping: File that maps the dump's names to stages.
        ids: The tokens of all passes, as the user knows them; None: the dump must have them.
        first_position: Position of the first of them, as the user knows it.

    Raises:
        FileNotFoundError: There is no dump, or no mapping.
        FormatError: The dump or the mapping cannot be read.
        GuardFailed: See `require_comparable`.
    """
    raw = with_earlier(open_raw(path), ids)
    names = None if mapping is None else read_mapping(mapping)
    needed = None if raw.passes else ids  # if the dump has ids, `require_comparable` compares the given ones with them
    dump = stage_dump(
        raw, weights.config, mapping=names, ids=needed, first_position=first_position or 0, weights=weights
    )
    return require_comparable(dump, weights, ids=ids, first_position=first_position, hashes=raw.weights)


def require_comparable(
    dump: StageDump,
    weights: Weights,
    *,
    ids: Sequence[int] | None = None,
    first_position: int | None = None,
    hashes: Mapping[str, str] | None = None,
) -> StageDump:
    """Refuse a dump that cannot be compared, before any number is; return it with oddities among its notes.

    Its `misread` then tells that the engine's reader of a quantised folder is the suspect.

    Args:
        dump: Dump of the engine.
        weights: Weights of the model that the engine is said to have run.
        ids: The tokens of all passes, as the user knows them.
        first_position: Position of the first of them.
        hashes: `RawDump.weights`.

    Raises:
        GuardFailed: Tokens, positions, layout, weights, norms or the run are not the declared ones.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of engines that went astray
        _require_ids(dump, weights, ids)
        _require_positions(dump, weights.config, first_position)
        _require_layout(dump, weights.config)
        notes, misread = check_weights(weights, hashes or {}, source=dump.source, dtype=dump.features.dtype)
        said = [f"weights: {misread.sentence}"] if misread else []
        notes = (*dump.notes, *notes, *said, *check_norms(dump, weights), *_check_run(dump))
        return replace(dump, notes=notes, misread=misread)


def require_read_rightly(dump: StageDump) -> StageDump:
    """Refuse (GuardFailed) a dump of an engine that read matrices of a quantised folder wrongly."""
    if dump.misread is not None:
        raise GuardFailed("weights", dump.misread.sentence, source=dump.source)
    return dump


def _require_ids(dump: StageDump, weights: Weights, ids: Sequence[int] | None) -> None:
    """Check the dump's token ids against the given ids and the dumped embeddings; raise GuardFailed if they differ."""
    said = [token for tokens in dump.passes for token in tokens.ids]
    if ids is not None and [*ids] != said:
        message = f"expected the given tokens {shown(ids)}, got a dump of {shown(said)}{parting([*ids], said)}"
        raise GuardFailed("ids", f"{message}; run the engine on the same tokens", source=dump.source)
    for number, tokens in enumerate(dump.passes):
        if (number, "embed") not in dump.dumped:
            continue
        dumped = dump.dumped[number, "embed"]
        rows, wanted = dumped.read(), [tokens.ids[token] for token in dumped_tokens(dump, number, dumped)]
        right = embedding(np.array(wanted), weights["embed_tokens"])
        is_known = relative_distance(rows, right) < _CLOSE or not np.isfinite(rows).all()
        found = None if is_known else ids_from_embedding(rows, weights)
        if found is None or _is_wrong_lookup(found, wanted, weights.config.vocab_size):
            continue
        raise GuardFailed(
            "ids",
            f"expected {shown(wanted)} in pass {number} (the ids in the dump), got embeddings of {shown(found)}"
            f"{parting(wanted, [*found])}; give the tokens that the engine ran",
            source=dump.source,
        )


def _is_wrong_lookup(found: Sequence[int], wanted: Sequence[int], n_rows: int) -> bool:
    """Tell if the right tokens were looked up with a constant offset of rows, or without their higher bytes."""
    steps = {(b - a) % n_rows for a, b in zip(found, wanted, strict=True)}
    return len(steps) == 1 or all(step % 256 == 0 for step in steps)


def _require_positions(dump: StageDump, config: ModelConfig, first_position: int | None) -> None:
    first, last = dump.passes[0], dump.passes[-1]
    if first_position not in (None, first.first_position):
        message = f"expected the first token at the given position {first_position}, got {first.first_position}"
        raise GuardFailed("positions", f"{message}; run the engine at the same positions", source=dump.source)
    require_one_after_the_other(dump.passes, dump.source)
    end = last.first_position + len(last.ids)
    if end > config.max_position_embeddings:
        message = f"expected at most the model's {config.max_position_embeddings}, got {end}; shorten the run"
        raise GuardFailed("positions", message, source=dump.source)


def _require_layout(dump: StageDump, config: ModelConfig) -> None:
    """Check that every array has the shape of its stage.

    A context of another length is accepted as a context with tokens that the dump hides.
    """
    known = {key: stage for key, stage, _ in keys(config)}
    n_context = dump.n_before or 0
    for number, tokens in enumerate(dump.passes):
        n_context += len(tokens.ids)
        for key, dumped in dump.of_pass(number):
            if key not in known:
                raise GuardFailed("layout", f"expected a stage of this model, got {key}", source=dump.source)
            stage, actual = known[key], dumped.read().shape
            seq = len(tokens.ids) if dumped.tokens is None else len(dumped.tokens)
            wanted = stage.shape(config, seq=seq, ctx=n_context if dumped.keys is None else dumped.keys)
            if actual != wanted:
                raise _wrong_shape(dump.source, f"{key} of pass {number}", stage, wanted, actual)


def _wrong_shape(source: str, where: str, stage: Stage, wanted: tuple, actual: tuple) -> GuardFailed:
    axes = stage.axes.split()
    expected = ", ".join(f"{axis}={size}" for axis, size in zip(axes, wanted, strict=True))
    differ = [axis for axis, a, b in zip(axes, wanted, actual, strict=False) if a != b]
    if len(actual) == len(wanted) and differ == ["ctx"]:
        hidden = "dump also the passes that filled the cache, and no later slot"
        return GuardFailed("positions", f"{where}: expected {expected}, got {actual}; {hidden}", source=source)
    advice = (
        "name the order of axes in a mapping, or read the dump with llorch.engines.dumps.stage_mapping, which finds it"
    )
    return GuardFailed("layout", f"{where}: expected {expected}, got {actual}; {advice}", source=source)


def _check_run(dump: StageDump) -> list[str]:
    """Compare logits of the production run, if the dump has them, with logits of the captured run."""
    notes = []
    for number, unwatched in dump.production.items():
        if (number, "logits") not in dump.dumped:
            continue
        captured, rows = (_by_token(dump, number, dumped) for dumped in (dump.dumped[number, "logits"], unwatched))
        for token in captured.keys() & rows.keys():
            apart = measure(captured[token], rows[token].astype(captured[token].dtype)).error
            if apart > _half_the_digits(dump, unwatched):
                raise GuardFailed("run", _another_run(number, token, apart, captured, rows[token]), source=dump.source)
            if apart:
                notes.append(f"run: logits of token {token} of pass {number} are {apart:.1e} from production's logits")
    return notes[:1]


def _by_token(dump: StageDump, number: int, dumped: DumpedArray) -> dict[int, np.ndarray]:
    return dict(zip(dumped_tokens(dump, number, dumped), dumped.read(), strict=True))


def _half_the_digits(dump: StageDump, dumped: DumpedArray) -> float:
    """Return the largest error that other kernels may cause: half the digits of the coarsest dtype of the run."""
    features = dump.features
    coarse = "bfloat16" if features.activations else "float16" if features.flash_attention else "float32"
    return max(FLOORS.get(dtype, 0.0) for dtype in (features.dtype, features.kv_cache, dumped.stored, coarse)) ** 0.5


def _another_run(number: int, token: int, apart: float, captured: Mapping[int, np.ndarray], row: np.ndarray) -> str:
    """Explain production logits that differ from the dump's; name the captured token that fits, if one does."""
    errors = {other: measure(mine, row.astype(mine.dtype)).error for other, mine in captured.items()}
    nearest = min(errors, key=errors.__getitem__)
    what = "the dump came from another kernel or another path of the engine"
    if nearest != token and errors[nearest] < _CLOSE:
        what = f"they fit captured token {nearest}, so one side counts from the first generated token"
    return (
        f"expected equal logits in dump and production (token {token}, pass {number}), got an error of {apart:.1e}: "
        f"{what}; dump the path that production runs"
    )

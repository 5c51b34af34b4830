"""Guards: check that the numbers of a dump can be compared with llorch's at all. `read_rows` reads such a dump.

Typical invalid comparisons use two prompts, a row before a norm and a row after it, or other weights. Guards do not
search for mistakes: an array counts as misnamed only if the arrays computed from it prove it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llorch.diagnosis.search.norm_places import check_norms, dumped_tokens, relative_distance
from llorch.diagnosis.weight_hashes import check_weights
from llorch.engines.dumps.batch import split_rows, without_padding
from llorch.engines.dumps.ids import ids_from_embedding, parting, require_one_after_the_other, shown
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.mapping import read_mapping
from llorch.engines.dumps.raw import with_earlier_pass
from llorch.engines.dumps.stage_dump import INT8_CACHES, DumpedArray, StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.ops.embedding import embedding
from llorch.runtime.errors import GuardFailed, UserError
from llorch.stages.comparison import FLOORS, measure
from llorch.stages.stage_ref import heads_axis
from llorch.stages.table import Stage, keys

_CLOSE = 0.1  # largest relative error of the same rows, whatever their dtype


def read_comparable(
    path: Path,
    weights: Weights,
    *,
    mapping: Path | None = None,
    ids: Sequence[int] | None = None,
    first_position: int | None = None,
) -> StageDump:
    """Read a dump of one row as stages of a model; see `read_rows`."""
    dump, *others = read_rows(path, weights, mapping=mapping, ids=ids, first_position=first_position)
    if others:
        message = (
            f"expected a dump of one row, got a batch of {len(others) + 1}; llorch diagnose and diff read each row"
        )
        raise UserError(f"{path}: {message}")
    return dump


def read_rows(
    path: Path,
    weights: Weights,
    *,
    mapping: Path | None = None,
    ids: Sequence[int] | None = None,
    first_position: int | None = None,
) -> list[StageDump]:
    """Read each row of a dump as stages of a model, and refuse numbers that cannot be compared with the model's.

    A dump has one row, unless it declares a batch: several texts that the engine ran at once, perhaps with padding.
    `mapping` is a file that maps the dump's names to stages. `ids` are the token ids of all passes, and of the tokens
    before them, from the user; None if the dump has them. The user may also give the position of the first token.

    Raises:
        FileNotFoundError: There is no dump, or no mapping.
        FormatError: The dump or the mapping cannot be read.
        GuardFailed: See `require_comparable`.
        UserError: The dump declares a batch, and the user gives tokens or a position.
    """
    raw = with_earlier_pass(open_raw(path), ids)
    names = None if mapping is None else read_mapping(mapping)
    if names is not None and names.batch:
        if raw.passes or raw.batch:
            raise UserError(f"{mapping}: expected no attention_mask, because {path} declares its tokens")
        raw = replace(raw, batch=names.batch)
    if raw.batch:
        if ids is not None or first_position is not None:
            raise UserError(f"{path}: expected no tokens and no first position, because the dump declares its rows")
        rows = (
            without_padding(stage_dump(row, weights.config, mapping=names, weights=weights), masks)
            for row, masks in split_rows(raw)
        )
        return [require_comparable(dump, weights, hashes=raw.weights) for dump in rows]
    needed = None if raw.passes else ids  # else `require_comparable` compares both
    dump = stage_dump(
        raw, weights.config, mapping=names, ids=needed, first_position=first_position or 0, weights=weights
    )
    return [require_comparable(dump, weights, ids=ids, first_position=first_position, hashes=raw.weights)]


def require_comparable(
    dump: StageDump,
    weights: Weights,
    *,
    ids: Sequence[int] | None = None,
    first_position: int | None = None,
    hashes: Mapping[str, str] | None = None,
) -> StageDump:
    """Refuse a dump that cannot be compared; else return it with oddities in its notes.

    Set `misread` if the engine probably decoded matrices of a quantised folder wrongly. `ids` (of all passes) and
    `first_position` come from the user. `hashes` are SHA-256 digests of the engine's weights, see `RawDump.weights`.

    Raises:
        GuardFailed: Tokens, positions, layout, weights, norms or the run are not the declared ones.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # numbers of a wrong engine may overflow
        _require_ids(dump, weights, ids)
        _require_positions(dump, weights.config, first_position)
        _require_layout(dump, weights.config)
        notes, misread = check_weights(weights, hashes or {}, source=dump.source, dtype=dump.features.dtype)
        misread_notes = [f"weights: {misread.sentence}"] if misread else []
        notes = (*dump.notes, *notes, *misread_notes, *check_norms(dump, weights), *_check_run(dump))
        return replace(dump, notes=notes, misread=misread)


def require_read_rightly(dump: StageDump) -> StageDump:
    """Refuse (GuardFailed) a dump of an engine that read matrices of a quantised folder wrongly."""
    if dump.misread is not None:
        raise GuardFailed("weights", dump.misread.sentence, source=dump.source)
    return dump


def _require_ids(dump: StageDump, weights: Weights, ids: Sequence[int] | None) -> None:
    """Compare the dump's token ids with the user's ids and with the dumped embeddings; GuardFailed if they differ."""
    dump_ids = [token for tokens in dump.passes for token in tokens.ids]
    if ids is not None and [*ids] != dump_ids:
        message = f"expected the given tokens {shown(ids)}, got a dump of {shown(dump_ids)}{parting([*ids], dump_ids)}"
        raise GuardFailed("ids", f"{message}; run the engine on the same tokens", source=dump.source)
    for n_pass, tokens in enumerate(dump.passes):
        if (n_pass, "embed") not in dump.dumped:
            continue
        dumped = dump.dumped[n_pass, "embed"]
        rows, expected = dumped.read(), [tokens.ids[token] for token in dumped_tokens(dump, n_pass, dumped)]
        expected_rows = embedding(np.array(expected), weights["embed_tokens"])
        is_known = relative_distance(rows, expected_rows) < _CLOSE or not np.isfinite(rows).all()
        actual = None if is_known else ids_from_embedding(rows, weights)
        if actual is None or _is_wrong_lookup(actual, expected, weights.config.vocab_size):
            continue
        raise GuardFailed(
            "ids",
            f"expected {shown(expected)} in pass {n_pass} (the ids in the dump), got embeddings of {shown(actual)}"
            f"{parting(expected, [*actual])}; give the tokens that the engine ran",
            source=dump.source,
        )


def _is_wrong_lookup(actual: Sequence[int], expected: Sequence[int], n_rows: int) -> bool:
    """Tell if the engine looked up the right tokens with a constant row offset, or without their higher bytes.

    Such an engine has a mistake to diagnose; it did not run other tokens.
    """
    offsets = {(b - a) % n_rows for a, b in zip(actual, expected, strict=True)}
    return len(offsets) == 1 or all(offset % 256 == 0 for offset in offsets)


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
    """Check that every array has the shape of its stage; a cache may lack earlier keys if the dump says so."""
    stages = {key: stage for key, stage, _ in keys(config)}
    n_context = dump.n_before or 0
    for n_pass, tokens in enumerate(dump.passes):
        n_context += len(tokens.ids)
        for key, dumped in dump.of_pass(n_pass):
            if key not in stages:
                raise GuardFailed("layout", f"expected a stage of this model, got {key}", source=dump.source)
            stage, actual = stages[key], dumped.read().shape
            seq = len(tokens.ids) if dumped.tokens is None else len(dumped.tokens)
            expected = stage.shape(config, seq=seq, ctx=n_context if dumped.keys is None else dumped.keys)
            if dumped.heads is not None and (axis := heads_axis(stage)) is not None:
                expected = (*expected[:axis], dumped.heads[1] - dumped.heads[0], *expected[axis + 1 :])
            if actual != expected:
                raise _wrong_shape(dump.source, f"{key} of pass {n_pass}", stage, expected, actual)


def _wrong_shape(source: str, array_name: str, stage: Stage, expected: tuple, actual: tuple) -> GuardFailed:
    """Make the error of a wrong shape: `positions` if only the context differs, else `layout`."""
    axes = stage.axes.split()
    axis_sizes = ", ".join(f"{axis}={size}" for axis, size in zip(axes, expected, strict=True))
    differ = [axis for axis, a, b in zip(axes, expected, actual, strict=False) if a != b]
    if len(actual) == len(expected) and differ == ["ctx"]:
        hint = "dump also the passes that filled the cache, and no later slot"
        return GuardFailed("positions", f"{array_name}: expected {axis_sizes}, got {actual}; {hint}", source=source)
    advice = (
        "name the order of axes in a mapping, or read the dump with llorch.engines.dumps.stage_mapping, which finds it"
    )
    return GuardFailed("layout", f"{array_name}: expected {axis_sizes}, got {actual}; {advice}", source=source)


def _check_run(dump: StageDump) -> list[str]:
    """Compare the dump's logits with those of an unobserved run of the same passes (production), if it has them.

    Return at most one note; GuardFailed if they differ by more than `_half_the_digits`.
    """
    notes = []
    for n_pass, unobserved in dump.production.items():
        if (n_pass, "logits") not in dump.dumped:
            continue
        captured, rows = (_by_token(dump, n_pass, dumped) for dumped in (dump.dumped[n_pass, "logits"], unobserved))
        for token in captured.keys() & rows.keys():
            error = measure(captured[token], rows[token].astype(captured[token].dtype)).error
            if error > _half_the_digits(dump, unobserved):
                raise GuardFailed(
                    "run", _describe_other_run(n_pass, token, error, captured, rows[token]), source=dump.source
                )
            if error:
                notes.append(f"run: logits of token {token} of pass {n_pass} are {error:.1e} from production's logits")
    return notes[:1]


def _by_token(dump: StageDump, n_pass: int, dumped: DumpedArray) -> dict[int, np.ndarray]:
    return dict(zip(dumped_tokens(dump, n_pass, dumped), dumped.read(), strict=True))


def _half_the_digits(dump: StageDump, dumped: DumpedArray) -> float:
    """Return the largest error that other kernels may cause: half the digits of the coarsest dtype of the run."""
    features = dump.features
    implied = "bfloat16" if features.activations else "float16" if features.flash_attention else "float32"
    cache = "bfloat16" if features.kv_cache in INT8_CACHES else features.kv_cache
    return max(FLOORS.get(dtype, 0.0) for dtype in (features.dtype, cache, dumped.stored, implied)) ** 0.5


def _describe_other_run(
    n_pass: int, token: int, error: float, captured: Mapping[int, np.ndarray], row: np.ndarray
) -> str:
    """Explain production logits that differ from the dump's; name the captured token that fits, if one does."""
    errors = {index: measure(rows, row.astype(rows.dtype)).error for index, rows in captured.items()}
    nearest = min(errors, key=errors.__getitem__)
    explanation = "the dump came from another kernel or another path of the engine"
    if nearest != token and errors[nearest] < _CLOSE:
        explanation = f"they fit captured token {nearest}, so one side counts from the first generated token"
    return (
        f"expected equal logits in dump and production (token {token}, pass {n_pass}), got an error of {error:.1e}: "
        f"{explanation}; dump the path that production runs"
    )

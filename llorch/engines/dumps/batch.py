"""Rows of a dump of a batch, the prompts that an engine runs at once. Each row becomes a dump of its own.

A pass line declares a batch by a list of token ids for each row:

    {"pass": 0, "ids": [[9, 4, 7], [0, 5, 6]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}

With `attention_mask` (0 for padding; of a longer mask, the last columns count) or with lists of equal length, arrays
have an axis of rows: the first axis, or the one declared as `batch`. They may also join rows and tokens in one axis.
Lists of different length without a mask are a ragged batch: arrays join the tokens of all rows in the first axis.

A row is read with its padding, so that its arrays have the shapes that the engine gave them, and then without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llorch.engines.dumps.raw import BatchPass, RawArray, RawDump
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME

_MAX_ID = 2**31


def read_batch_pass(line: Fields, earlier: Sequence[BatchPass]) -> BatchPass:
    """Read a pass line with ids of several rows; FormatError if lists do not fit each other or the earlier passes."""
    ids = _read_rows(line, "ids", _MAX_ID)
    masks = _read_rows(line, "attention_mask", 2) if line.has("attention_mask") else tuple((1,) * len(x) for x in ids)
    if earlier and len(ids) != len(earlier[0].ids):
        raise line.error("Inconsistent", "ids", f"the {len(earlier[0].ids)} rows of the earlier passes", len(ids))
    if line.has("attention_mask") and len({len(row) for row in ids}) > 1:
        raise line.error("Inconsistent", "ids", "rows of equal length, because attention_mask is given", list(ids))
    fits = len(masks) == len(ids) and all(len(mask) >= len(row) for mask, row in zip(masks, ids, strict=True))
    masks = tuple(mask[-len(row) :] for mask, row in zip(masks, ids, strict=False))
    if not fits or not all(map(any, masks)):
        expected = "a 1 for each token and a 0 for each padding, and a token in each row"
        raise line.error("Malformed", "attention_mask", expected, line.values.get("attention_mask"))
    ids = tuple(tuple(np.multiply(row, mask).tolist()) for row, mask in zip(ids, masks, strict=True))  # padding: 0
    ends = [sum(map(sum, (batch.masks[row] for batch in earlier))) for row in range(len(ids))]
    declared = line.values.get("first_position", 0)
    starts = [earlier[0].first_position + end for end in ends] if earlier else None
    if starts is not None and declared not in (0, starts) and starts != [declared] * len(ids):
        raise line.error("Inconsistent", "first_position", f"{starts}, after the earlier tokens, or nothing", declared)
    first = earlier[0].first_position if earlier else line.integer("first_position", default=0, low=0)
    return BatchPass(ids, masks, first)


def _read_rows(line: Fields, key: str, limit: int) -> tuple[tuple[int, ...], ...]:
    """Read a list of lists of integers from 0 to below `limit`, none empty."""
    rows = line.values.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows) or not rows:
        raise line.error("Malformed", key, "a list for each row", rows)
    if not all(type(entry) is int and 0 <= entry < limit for row in rows for entry in row):
        raise line.error("Malformed", key, f"integers from 0 to {limit - 1}", rows)
    return tuple(map(tuple, rows))


def split_rows(raw: RawDump) -> Iterator[tuple[RawDump, list[np.ndarray]]]:
    """Yield each row as a dump with its padding, and the mask of its tokens (False for padding) in each pass."""
    n_rows = len(raw.batch[0].ids)
    for row in range(n_rows):
        arrays = [(number, _row_of(array, raw.batch[number], row)) for number, array in raw.arrays]
        left_out = dict.fromkeys(
            array.name for (_, array), (_, part) in zip(raw.arrays, arrays, strict=True) if not part
        )
        notes = [f"llorch left out {', '.join(left_out)}: expected an axis of {n_rows} rows"] if left_out else []
        passes, first = [], raw.batch[0].first_position
        for batch in raw.batch:
            passes.append(Tokens(batch.ids[row], first))
            first += len(batch.ids[row])
        masks = [np.array(batch.masks[row], dtype=bool) for batch in raw.batch]
        dump = replace(
            raw, source=f"{raw.source}, row {row + 1} of {n_rows}", passes=tuple(passes), batch=(),
            arrays=tuple((number, part) for number, part in arrays if part), notes=(*raw.notes, *notes),
        )  # fmt: skip
        yield dump, masks


def _row_of(array: RawArray, batch: BatchPass, row: int) -> RawArray | None:
    """Select a row of an array; None if the array has no axis of rows."""
    lengths, shape = [len(ids) for ids in batch.ids], array.shape
    n_rows, total, offset = len(lengths), sum(lengths), sum(lengths[:row])
    if "batch" in array.axes and shape[axis := array.axes.index("batch")] == n_rows:
        axes = (*array.axes[:axis], *array.axes[axis + 1 :])
        selected_shape = (*shape[:axis], *shape[axis + 1 :])
        return replace(array, axes=axes, shape=selected_shape, read=lambda: array.read().take(row, axis=axis))
    if shape[:1] == (n_rows,) and not batch.is_ragged:
        return replace(array, shape=shape[1:] or (1,), read=lambda: array.read()[row].reshape(shape[1:] or (1,)))
    first = next((axis for axis, size in enumerate(shape) if size != 1), 0)  # after batch axes of size 1
    if shape and shape[first] == total:
        part = slice(offset, offset + lengths[row])
        selected_shape = (*shape[:first], lengths[row], *shape[first + 1 :])
        return replace(array, shape=selected_shape, read=lambda: array.read()[(*(slice(None),) * first, part)])
    return None


def without_padding(dump: StageDump, masks: Sequence[np.ndarray]) -> StageDump:
    """Remove the padding of a row from its passes and arrays."""
    passes, first = [], dump.passes[0].first_position
    for tokens, mask in zip(dump.passes, masks, strict=True):
        passes.append(Tokens(tuple(np.array(tokens.ids)[mask].tolist()), first))
        first += len(passes[-1].ids)
    dumped, production = (
        {key: part for key, array in arrays.items() if (part := _trim(key, array, masks)) is not None}
        for arrays in (dump.dumped, {(number, "logits"): array for number, array in dump.production.items()})
    )
    production = {number: array for (number, _), array in production.items()}
    return replace(dump, passes=tuple(passes), dumped=dumped, production=production)


def _trim(pass_key: tuple[int, str], dumped: DumpedArray, masks: Sequence[np.ndarray]) -> DumpedArray | None:
    """Remove the padding of one array; None if nothing remains. A single last row is that of the last token."""
    number, name = pass_key
    axes = BY_NAME[name.rpartition(".")[2]].axes.split()
    mask, numbers = masks[number], np.cumsum(masks[number]) - 1  # numbers of the tokens without padding
    is_key = np.concatenate(masks[: number + 1])
    columns = np.flatnonzero(is_key if dumped.keys is None else is_key[-dumped.keys :])
    rows, tokens = np.flatnonzero(mask), None
    if dumped.tokens is not None:
        indices = np.array(dumped.tokens)
        is_last = dumped.tokens == (len(mask) - 1,)
        rows = np.array([0]) if is_last else np.flatnonzero(mask[indices])
        tokens = tuple(numbers[indices[rows]].tolist())
        if not tokens:
            return None
    keep = {"seq": rows, "ctx": columns}

    def read() -> np.ndarray:
        array = dumped.read()
        for axis, axis_name in enumerate(axes):
            array = array.take(keep[axis_name], axis=axis) if axis_name in keep else array
        return array

    keys = None if len(columns) == is_key.sum() else len(columns)
    return replace(dumped, read=read, tokens=tokens, keys=keys)

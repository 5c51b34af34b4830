"""Lines that declare a batch: what fits is read, row by row; what does not is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch.engines.dumps.batch import split_rows, without_padding
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens

IDS = [[9, 4, 7], [0, 5, 6]]
MASK = [[1, 1, 1], [0, 1, 1]]


def opened(folder: Path, *passes: Mapping[str, Any], **arrays: tuple[np.ndarray, str]) -> RawDump:
    """Write a dump of passes, and of arrays of the first one with their axes."""
    lines: list[Mapping[str, Any]] = [{"llorch_dump": 1}]
    for number, line in enumerate(passes):
        lines.append({"pass": number, **line})
    for name, (array, axes) in (arrays or {"x": (np.zeros((2, 3), np.float32), "")}).items():
        (folder / name).write_bytes(array.tobytes())
        about = {"name": name, "pass": 0, "dtype": "f32", "shape": array.shape, "file": name}
        lines.append(about | ({"axes": axes} if axes else {}))
    (folder / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_raw(folder)


@pytest.mark.parametrize(
    ("passes", "about"),
    [
        ([{"ids": IDS, "attention_mask": [[1, 1, 1]]}], "attention_mask"),
        ([{"ids": IDS, "attention_mask": [[1, 1, 1], [0, 0, 0]]}], "attention_mask"),
        ([{"ids": IDS, "attention_mask": [[1, 1, 1], [1, 1]]}], "attention_mask"),
        ([{"ids": IDS, "attention_mask": [[1, 1, 2], [1, 1, 1]]}], "attention_mask"),
        ([{"ids": [[9, 4], [5]], "attention_mask": [[1, 1], [1, 1]]}], "ids"),
        ([{"ids": [[9, 4], []]}], "ids"),
        ([{"ids": [[9, 4], 5]}], "ids"),
        ([{"ids": [[9, 4], [2**31]]}], "ids"),
        ([{"ids": [9, 4], "attention_mask": [1, 1]}], "ids"),
        ([{"ids": IDS}, {"ids": [[5]]}], "ids"),
        ([{"ids": IDS}, {"ids": [5]}], "ids"),
        ([{"ids": [5]}, {"ids": IDS}], "ids"),
        ([{"ids": IDS, "attention_mask": MASK}, {"ids": [[5], [5]], "first_position": 3}], "first_position"),
    ],
)
def test_lines_that_do_not_fit_are_refused(passes: list[Mapping[str, Any]], about: str, tmp_path: Path):
    with pytest.raises(FormatError, match=about):
        opened(tmp_path, *passes)


@pytest.mark.parametrize("first", [0, [3, 2]])
def test_positions_of_a_later_pass_continue_each_row(first: object, tmp_path: Path):
    raw = opened(
        tmp_path, {"ids": [[9, 4, 7], [999999, 5, 6]], "attention_mask": MASK},
        {"ids": [[5], [8]], "attention_mask": [[1, 1, 1, 1], [0, 1, 1, 1]], "first_position": first},
    )  # fmt: skip
    assert raw.passes == ()
    rows = list(split_rows(raw))
    assert [row.source.rpartition(", ")[2] for row, _ in rows] == ["row 1 of 2", "row 2 of 2"]
    assert [[tokens.ids for tokens in row.passes] for row, _ in rows] == [[(9, 4, 7), (5,)], [(0, 5, 6), (8,)]]
    assert [mask.tolist() for mask in rows[1][1]] == [[False, True, True], [True]]


def test_rows_are_found_in_every_layout_of_the_batch_axis(tmp_path: Path):
    x = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    raw = opened(
        tmp_path, {"ids": IDS}, first=(x, ""), joined=(x.reshape(6, 5), ""), none=(x[0].reshape(15), ""),
        declared=(np.ascontiguousarray(x.swapaxes(0, 1)), "seq batch hidden"),
    )  # fmt: skip
    for number, (row, _) in enumerate(split_rows(raw)):
        arrays = {array.name: array for _, array in row.arrays}
        assert arrays.keys() == {"first", "joined", "declared"}
        assert arrays["declared"].axes == ("seq", "hidden")
        for array in arrays.values():
            assert array.shape == array.read().shape == (3, 5)
            np.testing.assert_array_equal(array.read(), x[number])
        assert "left out none" in row.notes[-1]


def test_rows_of_a_ragged_batch_are_parts_of_the_first_axis(tmp_path: Path):
    x = np.arange(25, dtype=np.float32).reshape(1, 5, 5)
    raw = opened(tmp_path, {"ids": [[9, 4, 7], [5, 6]]}, x=(x, ""))
    parts = [row.arrays[0][1].read() for row, _ in split_rows(raw)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), x)
    assert [part.shape for part in parts] == [(1, 3, 5), (1, 2, 5)]


@pytest.mark.parametrize(
    ("mask", "tokens", "expected"),
    [
        ([1, 1, 0], None, ((0, 1), None)),
        ([0, 1, 1], None, ((1, 2), None)),
        ([1, 1, 0], (2,), ((2,), (1,))),  # the only row is that of the last token, wherever the padding is
        ([0, 1, 1], (2,), ((2,), (1,))),
        ([1, 1, 0], (0, 2), ((0,), (0,))),
        ([1, 1, 0, 0], (2,), None),
    ],
)
def test_padding_is_removed_from_rows(mask: list[int], tokens: tuple[int, ...] | None, expected: Any):
    x = np.arange(len(mask), dtype=np.float32)[:, None]
    dumped = DumpedArray("logits", "float32", lambda: x if tokens is None else x[list(tokens)], tokens)
    dump = without_padding(
        StageDump("x", (Tokens((5,) * len(mask), 2),), {(0, "logits"): dumped}), [np.array(mask) == 1]
    )
    assert dump.passes == (Tokens((5, 5), 2),)
    part = dump.dumped.get((0, "logits"))
    assert (part and (tuple(part.read()[:, 0]), part.tokens)) == expected


@pytest.mark.parametrize(("keys", "expected"), [(None, ([0, 2, 3], None)), (3, ([2, 3], 2)), (1, ([3], 1))])
def test_padding_is_removed_from_the_keys_of_earlier_passes(keys: int | None, expected: Any):
    cache = np.arange(4, dtype=np.float32)[None, -(keys or 4) :, None]
    dumped = {(1, "l0.k_cache"): DumpedArray("k", "float32", lambda: cache, keys=keys)}
    dump = StageDump("x", (Tokens((5, 0, 5)), Tokens((5,), 3)), dumped)
    part = without_padding(dump, [np.array([True, False, True]), np.array([True])]).dumped[1, "l0.k_cache"]
    assert (part.read()[0, :, 0].tolist(), part.keys) == expected

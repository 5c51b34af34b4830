"""Convert an array to the shape of its stage in `stages.table`: order of axes, joined heads, batch axis, padding.

A dump may declare the axes of an array. Otherwise, every order of axes that fits the shape is a candidate, and usually
only one fits. If several fit (as many heads as tokens), values decide, but only if one candidate is far nearer to
llorch's run than all others; else the table's order is used. Only the order of axes is detected this way. A factor or a
missing mask count as errors of the engine unless they are declared. `diagnosis.search.file_orders` detects permutations
of GGUF files, `widths` arrays of another width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files.tensor_names import undo_interleave
from llorch.files.tensor_storage import TiledValues
from llorch.runtime.errors import FormatError, suggestion
from llorch.stages.table import Stage

Candidate = TypeVar("Candidate")
JOINED: Mapping[str, tuple[str, ...]] = {
    "q_width": ("heads", "head_dim"), "kv_width": ("kv_heads", "head_dim"), "value_width": ("v_heads", "value_dim"),
}  # fmt: skip
HEAD_DIMS = ("head_dim", "key_dim", "value_dim")
# Stages whose pairs RoPE rotates.
PAIRED = (
    "q_proj", "k_proj", "q_norm", "k_norm", "q_rope", "k_rope", "q_head_norm", "k_head_norm", "q_tempered", "k_cache",
)  # fmt: skip
# Stages with value heads of a delta net -> the axis of the heads, or of heads and channels.
VALUE_HEADS = {
    "qkv_in": -1, "z_in": -1, "b_in": -1, "a_in": -1, "conv_state": -1, "conv_out": -1, "beta": -1, "log_decay": -1,
    "delta_state": 0, "delta_out": 1, "gated_norm": -1,
}  # fmt: skip
FUSED_ORDERS = ("stacked", "groups", "alternating")  # see `split_fused`
FAR_NEARER = 5.0  # a candidate is chosen if all others are this factor farther from llorch's run
PADDED = ("ctx", "vocab")  # axes that an engine may pad
AS_GOOD_AS_MASKED = -9000.0  # exp of this is 0 in every float type; -1e4 in bfloat16 is -9984
_LARGEST_DISTANCE = 0.5  # `sine_distance` from llorch's run beyond which a candidate is never chosen


@dataclass(frozen=True)
class DumpLayout:
    """Declared layout of an array.

    Attributes:
        axes: Names of the axes, of `Stage.axes` or `batch`; empty to detect them.
        permuted: True if RoPE rotates neighbouring pairs in a head, as in Llama GGUF files.
        times: Factor by which the dumped values are larger than the stage.
        masked: True if keys after the query are masked; otherwise llorch masks them.
        fused: Order of the rows of several projections in one array, one of `FUSED_ORDERS`.
        tiled: True if value head t of a delta net reads key head t % n_key_heads, as in GGUF files of Qwen3.5.
    """

    axes: tuple[str, ...] = ()
    permuted: bool = False
    times: float = 1.0
    masked: bool = True
    fused: str = "stacked"
    tiled: bool = False


@dataclass(frozen=True)
class Form:
    """Candidate layout of an array in memory: its axes in order, and their sizes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def arrange(self, array: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
        """Reshape an array of this form, transpose it to these axes, and cut padded axes to their sizes."""
        array = array.reshape(self.sizes).transpose([self.axes.index(axis) for axis in axes])
        return array[tuple(slice(sizes[axis]) for axis in axes)]

    def differs_from(self, table: Sequence[str]) -> bool:
        """Check if the axes, except axes of size 1, have another order than the table's."""
        axes = [axis for axis, size in zip(self.axes, self.sizes, strict=True) if size != 1]
        return axes != [axis for axis in single_axes(table) if axis in axes]

    def __str__(self) -> str:
        return " ".join(self.axes)


def single_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Split axes of joined heads into heads and dimensions."""
    return tuple(single for axis in axes for single in JOINED.get(axis, (axis,)))


def declared_form(
    declared: Sequence[str], table: Sequence[str], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Form:
    """Build the form of declared axes; FormatError if they are not the table's, or do not fit the shape.

    `sizes` has the size of every axis in the run; only a padded context or vocabulary may be longer.
    """
    axes, table_axes = single_axes([axis for axis in declared if axis != "batch"]), single_axes(table)
    if sorted(axes) != sorted(table_axes):
        allowed = [*table_axes, *table, "batch"]
        unknown = next((axis for axis in declared if axis not in allowed), "")
        expected = f"{' '.join(dict.fromkeys([*table, *table_axes]))} and batch, in any order, heads joined or split"
        actual = f"{' '.join(declared)}{suggestion(unknown, allowed) if unknown else ''}"
        raise FormatError("Malformed", f"axes: expected {expected}, got {actual}")
    form = Form(axes, tuple(sizes[axis] for axis in axes))
    if math.prod(form.sizes) == math.prod(shape):
        return form
    inner = shape[max(0, len(shape) - len(declared)) :]  # without an undeclared batch axis
    without_batch = [size for axis, size in zip(declared, inner, strict=False) if axis != "batch" or size != 1]
    if len(without_batch) == len(axes):
        padded = Form(axes, tuple(without_batch))
        sizes_of_axes = zip(axes, padded.sizes, form.sizes, strict=True)
        if all(actual == size or (axis in PADDED and actual > size) for axis, actual, size in sizes_of_axes):
            return padded
    raise FormatError("Shape", f"expected {' '.join(declared)} to be {form.sizes}, got {shape}")


def list_forms(table: Sequence[str], shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Form]:
    """List all possible forms of an array of this shape, the table's order first; with padding if none fits.

    Forms that differ only in axes of size 1 count as one.
    """
    exact: dict[tuple, Form] = {}
    padded: dict[tuple, Form] = {}
    for groups in _groupings(table, sizes):
        form = _fit(groups, [size for size in shape if size != 1], sizes)
        if form is not None:
            nontrivial = tuple((axis, size) for axis, size in zip(form.axes, form.sizes, strict=True) if size != 1)
            is_padded = any(size != sizes[axis] for axis, size in nontrivial)
            (padded if is_padded else exact).setdefault(nontrivial, form)
    return [*exact.values()] or [*padded.values()]


def _groupings(table: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the orders of axes, in groups that are joined in memory: none joined, heads with their dimensions, or all.

    Some orders must be declared. If the table joins heads and dimensions, a flat array with other neighbours is not
    assumed: it would hide a known mistake, heads joined before the axes are transposed. Keys stay the last axis of
    scores if another axis has the same size. In a flat array the table's last axis stays last.
    """
    axes = single_axes(table)
    joined_in_table = axes != tuple(table)
    for order in permutations(axes):
        if axes[-1] == "ctx" != order[-1] and sizes["ctx"] in (sizes["seq"], sizes["heads"]):
            continue
        yield [(axis,) for axis in order]
        i = next((i for i, axis in enumerate(order) if axis in HEAD_DIMS), 0)
        is_adjacent = i > 0 and order[i - 1].endswith("heads")
        if is_adjacent:
            yield [*((a,) for a in order[: i - 1]), order[i - 1 : i + 1], *((a,) for a in order[i + 1 :])]
        if (is_adjacent or not joined_in_table) and order[-1] == axes[-1]:
            yield [order]


def _fit(groups: Sequence[tuple[str, ...]], shape: Sequence[int], sizes: Mapping[str, int]) -> Form | None:
    """Build the form of these axis groups; None if the shape, without axes of size 1, differs.

    Only a context or vocabulary axis that is not joined may be longer, because it may be padded.
    """
    remaining, sizes_found = [*shape], {}
    for group in groups:
        size = math.prod(sizes[axis] for axis in group)
        sizes_found |= {axis: sizes[axis] for axis in group}
        if remaining and len(group) == 1 and group[0] in PADDED and remaining[0] > size:
            sizes_found[group[0]] = remaining.pop(0)
        elif size != 1:
            if not remaining or remaining.pop(0) != size:
                return None
    axes = tuple(axis for group in groups for axis in group)
    return None if remaining else Form(axes, tuple(sizes_found[axis] for axis in axes))


def find_nearest_form(distances: Mapping[Candidate, float]) -> Candidate | None:
    """Return the form (or share of heads) that is far nearer to llorch's values than all others; None if none is."""
    best, second, *_ = sorted(distances, key=distances.__getitem__)
    return best if distances[best] < min(_LARGEST_DISTANCE, distances[second] / FAR_NEARER) else None


def sine_distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Measure the sine of the angle between two arrays where both are finite: 0 if equal up to a factor."""
    finite = np.isfinite(actual) & np.isfinite(expected)
    a, b = actual[finite].astype(np.float64), expected[finite].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size == 0:
        return 1.0
    return float(np.linalg.norm(a - b * (a @ b) / (b @ b)) / np.linalg.norm(a))


def to_half_split(heads: np.ndarray) -> np.ndarray:
    """Permute the last axis from neighbouring pairs, (2j, 2j+1), to Hugging Face's pairs, (j, j + half)."""
    return undo_interleave(heads.reshape(-1), heads.size // heads.shape[-1]).reshape(heads.shape)


def undo_pairs(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Permute an array of `PAIRED` stages from the order of Llama GGUF files to Hugging Face's."""
    return to_half_split(array.reshape(-1, config.head_dim)).reshape(array.shape)


def undo_tiles(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Permute an array of `VALUE_HEADS` stages from the tiled heads of Qwen3.5's GGUF files to Hugging Face's order."""
    net, axis = config.delta_net, VALUE_HEADS[stage.name]
    assert net is not None
    n_leading = 2 * net.key_width if "conv_width" in stage.axes.split() else 0  # queries and keys
    width = (array.shape[axis] - n_leading) // net.n_value_heads
    return array.take(TiledValues(net, width, n_leading).index(), axis=axis)


def split_fused(fused: np.ndarray, parts: Sequence[str], order: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """Split a fused array, (tokens, total width), into its projections `parts`: q, k and v, or gate and up.

    Columns: stacked, one projection after the other; alternating, one column of each in turn; groups, by key head.
    """
    widths = {"q_proj": config.q_width, "k_proj": config.kv_width, "v_proj": config.kv_width}
    part_widths = [widths.get(part, config.intermediate_size) for part in parts]
    if order == "alternating":
        return {part: fused.reshape(len(fused), -1, len(parts))[..., index] for index, part in enumerate(parts)}
    if order == "groups":  # for every key head: its query heads, its key, its value
        fused = fused.reshape(len(fused), config.n_kv_heads, -1)
        part_widths = [width // config.n_kv_heads for width in part_widths]
    pieces = np.split(fused, np.cumsum(part_widths)[:-1], axis=-1)
    return {part: piece.reshape(len(fused), -1) for part, piece in zip(parts, pieces, strict=True)}


def normalise(
    array: np.ndarray, stage: Stage, layout: DumpLayout, config: ModelConfig, hidden: np.ndarray
) -> np.ndarray:
    """Undo the declared layout of an array in the table's shape; `hidden`, (tokens, ctx), marks keys to mask."""
    if layout.permuted and stage.name in PAIRED:
        array = undo_pairs(array, stage, config)
    if layout.tiled and stage.name in VALUE_HEADS:
        array = undo_tiles(array, stage, config)
    if layout.times != 1:
        array = array / array.dtype.type(layout.times)
    if stage.masked:
        is_masked = hidden if not layout.masked else hidden & (array <= AS_GOOD_AS_MASKED)
        array = np.where(is_masked, array.dtype.type(-np.inf), array)
    return np.ascontiguousarray(array)

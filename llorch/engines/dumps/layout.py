"""Brings an array into the shape of the stage table: axes in another order, heads joined or split, batch, padding.

An engine may say which axes an array has. Where it does not, every order of the axes that fits the shape is a
candidate, and mostly one fits. Where several do (as many heads as tokens), values decide, and only when one is far
nearer to our own run than all others; else it is the table's order. Nothing but the order of axes is ever found this
way: a permutation inside of a head, a factor, a mask that is missing are the engine's own doing unless declared.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files.tensor_names import undo_interleave
from llorch.runtime.errors import FormatError, suggestion
from llorch.stages.table import Stage

JOINED: Mapping[str, tuple[str, ...]] = {
    "q_width": ("heads", "head_dim"), "kv_width": ("kv_heads", "head_dim"), "value_width": ("v_heads", "value_dim"),
}  # fmt: skip
OF_A_HEAD = ("head_dim", "key_dim", "value_dim")
PAIRED = ("q_proj", "k_proj", "q_norm", "k_norm", "q_rope", "k_rope", "k_cache")  # RoPE turns pairs of their heads
FUSED_ORDERS = ("stacked", "groups", "alternating")
FAR_NEARER = 5.0  # times less unlike our run than every other candidate
AS_GOOD_AS_MASKED = -9000.0  # its exponential is 0 in every float type; -1e4 in bfloat16 is -9984
_LEAST_UNLIKE = 0.5  # what is more unlike our run than this is not like it at all


@dataclass(frozen=True)
class DumpLayout:
    """What is declared of an array.

    Attributes:
        axes: Names of its axes, of `Stage.axes` or `batch`; none: found.
        permuted: Whether the pairs of a head that RoPE turns are neighbours, as in Llama GGUF files.
        times: The stage times this was written.
        masked: Whether later keys are masked; if not, our mask is laid on.
        fused: How the rows of several projections lie in one array, one of `FUSED_ORDERS`.
    """

    axes: tuple[str, ...] = ()
    permuted: bool = False
    times: float = 1.0
    masked: bool = True
    fused: str = "stacked"


@dataclass(frozen=True)
class Form:
    """One way in which the elements of an array may be those of a stage: axes in memory order, and their sizes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def arranged(self, array: np.ndarray, axes: Sequence[str], ctx: int) -> np.ndarray:
        """Arrange the array along these axes, and cut a padded context to `ctx` keys."""
        array = array.reshape(self.sizes).transpose([self.axes.index(axis) for axis in axes])
        return array[tuple(slice(ctx) if axis == "ctx" else slice(None) for axis in axes)]

    def differs_from(self, table: Sequence[str]) -> bool:
        """Check if the axes, without those of size 1, stand in another order than the table's."""
        told = [axis for axis, n in zip(self.axes, self.sizes, strict=True) if n != 1]
        return told != [axis for axis in single_axes(table) if axis in told]

    def __str__(self) -> str:
        return " ".join(self.axes)


def single_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Split the axes that are joined heads into heads and dimensions."""
    return tuple(single for axis in axes for single in JOINED.get(axis, (axis,)))


def declared_form(
    declared: Sequence[str], table: Sequence[str], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Form:
    """Build the form that declared axes mean.

    Raises:
        FormatError: The axes are not those of the stage, or do not fit the shape.
    """
    axes, wanted = single_axes([axis for axis in declared if axis != "batch"]), single_axes(table)
    if sorted(axes) != sorted(wanted):
        known = [*wanted, *table, "batch"]
        odd = next((axis for axis in declared if axis not in known), "")
        expected = f"{' '.join(dict.fromkeys([*table, *wanted]))} and batch, in any order, heads joined or split"
        actual = f"{' '.join(declared)}{suggestion(odd, known) if odd else ''}"
        raise FormatError("Malformed", f"axes: expected {expected}, got {actual}")
    form = Form(axes, tuple(sizes[axis] for axis in axes))
    if math.prod(form.sizes) == math.prod(shape):
        return form
    inner = shape[max(0, len(shape) - len(declared)) :]  # of a batch that is not declared
    without_batch = [n for axis, n in zip(declared, inner, strict=False) if axis != "batch" or n != 1]
    if "ctx" in axes and len(without_batch) == len(axes) and without_batch[axes.index("ctx")] > sizes["ctx"]:
        padded = Form(axes, tuple(without_batch))
        sizes_of_axes = zip(axes, padded.sizes, form.sizes, strict=True)
        if all(actual == size or axis == "ctx" for axis, actual, size in sizes_of_axes):
            return padded
    raise FormatError("Shape", f"expected {' '.join(declared)} to be {form.sizes}, got {shape}")


def fitting_forms(table: Sequence[str], shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Form]:
    """List every form that an array of this shape may have, the table's order first; padded forms if no other fits."""
    exact: dict[tuple, Form] = {}
    padded: dict[tuple, Form] = {}
    for groups in _groupings(table, sizes):
        form = _fit(groups, [n for n in shape if n != 1], sizes)
        if form is not None:
            told = tuple((axis, n) for axis, n in zip(form.axes, form.sizes, strict=True) if n != 1)
            is_padded = any(n != sizes[axis] for axis, n in told)
            (padded if is_padded else exact).setdefault(told, form)
    return [*exact.values()] or [*padded.values()]


def _groupings(table: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the orders of axes, in groups that are joined in memory: none joined, heads with their dimensions, or all.

    If the table joins heads and dimensions, they stay adjacent in an array that is joined to one axis. Otherwise the
    order would be that of a known mistake: heads joined before the axes are transposed. Keys stay the last axis of
    scores if another axis has as many elements. In an array of one axis the table's last axis stays last; other orders
    must be declared.
    """
    axes = single_axes(table)
    joined_in_table = axes != tuple(table)
    for order in permutations(axes):
        if axes[-1] == "ctx" != order[-1] and sizes["ctx"] in (sizes["seq"], sizes["heads"]):
            continue
        yield [(axis,) for axis in order]
        at = next((at for at, axis in enumerate(order) if axis in OF_A_HEAD), 0)
        together = at > 0 and order[at - 1].endswith("heads")
        if together:
            yield [*((a,) for a in order[: at - 1]), order[at - 1 : at + 1], *((a,) for a in order[at + 1 :])]
        if (together or not joined_in_table) and order[-1] == axes[-1]:
            yield [order]


def _fit(groups: Sequence[tuple[str, ...]], shape: Sequence[int], sizes: Mapping[str, int]) -> Form | None:
    """Build the form of these axis groups; None if the shape, without its axes of size 1, differs.

    Only a context that is a group alone may be longer.
    """
    left, found = [*shape], {}
    for group in groups:
        size = math.prod(sizes[axis] for axis in group)
        found |= {axis: sizes[axis] for axis in group}
        if left and group == ("ctx",) and left[0] > size:
            found["ctx"] = left.pop(0)
        elif size != 1:
            if not left or left.pop(0) != size:
                return None
    axes = tuple(axis for group in groups for axis in group)
    return None if left else Form(axes, tuple(found[axis] for axis in axes))


def far_nearest(distances: Mapping[Form, float]) -> Form | None:
    """Pick the form that is far nearer to llorch's values than all others; None if there is none."""
    best, second, *_ = sorted(distances, key=distances.__getitem__)
    return best if distances[best] < min(_LEAST_UNLIKE, distances[second] / FAR_NEARER) else None


def unlike(actual: np.ndarray, ours: np.ndarray) -> float:
    """Measure the sine of the angle between two arrays where both are finite; a common factor does not count."""
    finite = np.isfinite(actual) & np.isfinite(ours)
    a, b = actual[finite].astype(np.float64), ours[finite].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size == 0:
        return 1.0
    return float(np.linalg.norm(a - b * (a @ b) / (b @ b)) / np.linalg.norm(a))


def half_split(heads: np.ndarray) -> np.ndarray:
    """Bring the last axis from neighbouring pairs, (2j, 2j+1), to those of Hugging Face, (j, j + half)."""
    return undo_interleave(heads.reshape(-1), heads.size // heads.shape[-1]).reshape(heads.shape)


def cut(fused: np.ndarray, parts: Sequence[str], order: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """Split a fused array, (tokens, all rows), into its projections: q, k and v, or gate and up."""
    widths = {"q_proj": config.q_width, "k_proj": config.kv_width, "v_proj": config.kv_width}
    each = [widths.get(part, config.intermediate_size) for part in parts]
    if order == "alternating":
        return {part: fused.reshape(len(fused), -1, len(parts))[..., n] for n, part in enumerate(parts)}
    if order == "groups":  # of every key head: its query heads, its key, its value
        fused = fused.reshape(len(fused), config.n_kv_heads, -1)
        each = [width // config.n_kv_heads for width in each]
    pieces = np.split(fused, np.cumsum(each)[:-1], axis=-1)
    return {part: piece.reshape(len(fused), -1) for part, piece in zip(parts, pieces, strict=True)}


def finished(array: np.ndarray, stage: Stage, layout: DumpLayout, config: ModelConfig, later: np.ndarray) -> np.ndarray:
    """Undo the declared layout of an array in the table's shape; `later`, (tokens, ctx): the key is after the query."""
    if layout.permuted and stage.name in PAIRED:
        array = half_split(array.reshape(-1, config.head_dim)).reshape(array.shape)
    if layout.times != 1:
        array = array / array.dtype.type(layout.times)
    if stage.masked:
        hidden = later if not layout.masked else later & (array <= AS_GOOD_AS_MASKED)
        array = np.where(hidden, array.dtype.type(-np.inf), array)
    return np.ascontiguousarray(array)

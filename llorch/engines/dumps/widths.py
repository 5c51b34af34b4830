"""Arrays whose width is not that of their stage: a rank's share of the heads, repeated KV heads, padded logits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llorch.families.config import ModelConfig
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import heads_axis
from llorch.stages.table import Stage, axis_sizes


@dataclass(frozen=True)
class Share:
    """Heads of one rank of tensor parallelism: share `rank`, from 0, of `n` equal shares."""

    rank: int
    n: int

    def heads(self, stage: Stage, config: ModelConfig) -> tuple[int, int]:
        """Return the first head of the share and the one after its last; more ranks than KV heads share a KV head."""
        total = n_heads(stage, config)
        first = self.rank * total // self.n
        return first, first + max(1, total // self.n)

    def elements(self, stage: Stage, config: ModelConfig) -> tuple[int, int]:
        """Return `heads` as the first element and the one after the last on the stage's axis of heads."""
        axis = stage.axes.split()[heads_axis(stage) or 0]
        unit = axis_sizes(config, seq=1, ctx=1)[axis] // n_heads(stage, config)
        first, stop = self.heads(stage, config)
        return first * unit, stop * unit

    def overlaps(self, other: "Share") -> bool:
        """Check if one rank may have both shares."""
        return self.rank * other.n < (other.rank + 1) * self.n and other.rank * self.n < (self.rank + 1) * other.n


def n_heads(stage: Stage, config: ModelConfig) -> int:
    """Return the number of heads in an array of a stage with heads: of queries, or of keys and values."""
    return config.n_kv_heads if stage.axes.split()[heads_axis(stage) or 0].startswith("kv_") else config.n_heads


def other_heads(config: ModelConfig) -> Iterator[ModelConfig]:
    """Yield configurations with other numbers of heads: a KV head for each query head, and equal shares of all."""
    if config.group_size > 1:
        yield replace(config, n_kv_heads=config.n_heads)
    for n in range(2, config.n_heads + 1):
        if config.n_heads % n == 0 and (config.n_kv_heads % n == 0 or n % config.n_kv_heads == 0):
            yield replace(config, n_heads=config.n_heads // n, n_kv_heads=max(1, config.n_kv_heads // n))


def merge_copies(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Take one of the equal copies of each KV head; raise FormatError `Shape` if copies differ."""
    axis, n_kv, group = heads_axis(stage) or 0, config.n_kv_heads, config.group_size
    lead, tail = array.shape[:axis], array.shape[axis + 1 :]
    grouped, tiled = array.reshape(*lead, n_kv, group, -1), array.reshape(*lead, group, n_kv, -1)
    if not np.array_equal(grouped, np.broadcast_to(grouped[..., :1, :], grouped.shape), equal_nan=True):
        is_tiled = np.array_equal(tiled, np.broadcast_to(tiled[..., :1, :, :], tiled.shape), equal_nan=True)
        order = f"head i is KV head i % {n_kv}, but" if is_tiled else "copies of one KV head differ;"
        raise FormatError(
            "Shape", f"expected {n_kv} KV heads, got {n_kv * group}: {order} query head i reads KV head i // {group}"
        )
    return np.ascontiguousarray(grouped[..., 0, :]).reshape(*lead, array.shape[axis] // group, *tail)


def find_padding_maximum(rows: np.ndarray, n_columns: int) -> tuple[int, int, int] | None:
    """Find rows whose largest value is in the padding, the columns from `n_columns` on; None if there is none.

    Return the first such row, the column, and the number of such rows. NaN in the padding is never the largest.
    """
    wrong = np.flatnonzero(np.fmax.reduce(rows[:, n_columns:], axis=-1) > rows[:, :n_columns].max(axis=-1))
    if not wrong.size:
        return None
    row = int(wrong[0])
    return row, n_columns + int(np.nanargmax(rows[row, n_columns:])), int(wrong.size)

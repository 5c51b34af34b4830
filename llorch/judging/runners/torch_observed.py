"""One case run on the torch model for all to see: stage by stage, in one pass or several, alone or in a batch.

In a batch the judged sequence has a neighbour with other tokens, of another length where the context allows it, and
padding. Only what belongs to the judged tokens is shown and replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.judging.expert_selection import StageOverride, as_made
from llorch.pytorch.causal_lm import Keep, keep_nothing
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel, as_numpy
from llorch.runtime.errors import CheckpointMismatch
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME

MORE = 3  # tokens that the neighbour has more
PADDING = 2  # columns that are padding in every row
WIDENED = (  # at least float32 in every run
    "attn_scores", "attn_probs", "attn_gate", "q_l2", "k_l2", "beta", "log_decay", "delta_state", "delta_out",
    "router_probs", "shared_gate",
)  # fmt: skip

Trace = dict[str, np.ndarray]


@dataclass(frozen=True)
class Columns:
    """Where the judged tokens of a pass stand: always in the last row of the batch."""

    config: ModelConfig
    seq: slice
    ctx: slice
    width: int  # columns of the pass
    n_slots: int  # slots that attention looks at

    def of(self, name: str, stage: Tensor) -> Tensor:
        """Return a view of the judged part of a stage; all of the last row if the stage has a wrong shape."""
        row = BY_NAME[name.rpartition(".")[2]]
        if tuple(stage.shape[1:]) != row.shape(self.config, seq=self.width, ctx=self.n_slots):
            return stage[-1]
        parts = {"seq": self.seq, "ctx": self.ctx}
        return stage[(-1, *(parts.get(axis, slice(None)) for axis in row.axes.split()))]


class ObservedCase:
    """The tokens of a case and a cache.

    Attributes:
        n_cached: Judged tokens that are in the cache.
    """

    def __init__(self, model: TorchModel, this: Pass, *, in_batch: bool = False) -> None:
        """Start with an empty cache; `in_batch`: run the tokens in row 1 of 2, with padding."""
        self._model, self._first_position, self._ids = model, this.first_position, this.ids
        room = model.config.max_position_embeddings - this.first_position - len(this.ids)
        neighbour = (*reversed(this.ids), *this.ids[: min(MORE, room)])
        self._rows = [neighbour, this.ids] if in_batch else [this.ids]
        self._cache = model.new_cache(len(self._rows), max(len(row) for row in self._rows), this.first_position)
        self.n_cached = 0

    def fill_as_used(self) -> None:
        """Fill every slot and state with other numbers, as an earlier answer does, and forget the states."""
        drawn = torch.Generator(self._model.target.device).manual_seed(0)
        for tensor in self._cache.tensors:
            tensor.normal_(generator=drawn)
        self._cache.forget()

    @torch.inference_mode()
    def feed(
        self,
        stop: int,
        *,
        trace: Trace | None = None,
        golden: Mapping[str, np.ndarray] | None = None,
        last_only: bool = False,
        override: StageOverride = as_made,
    ) -> Float[np.ndarray, "rows vocab"]:
        """Run the judged tokens up to `stop`, and return their logits; with `last_only` those of the last token.

        `trace` is filled with every stage that the model shows. As soon as a stage was shown, the `golden` takes its
        place, or else what `override` returns. CheckpointMismatch: a stage has not the dtype or device that is judged.
        """
        new, device = [self._new(row, stop) for row in self._rows], self._model.target.device
        ids, positions, firsts = self._padded(new, last_only=last_only)
        seq, n_slots = slice(firsts[-1], firsts[-1] + len(new[-1])), max(part.stop for part in new)
        keep = keep_nothing
        if trace is not None or override is not as_made:
            where = Columns(self._model.config, seq, slice(0, stop), ids.shape[1], n_slots)
            goes_on = partial(_with_golden, golden or {}, override, new[-1].start)
            keep = observer({} if trace is None else trace, goes_on, where, self._model.target)
        place = self._cache.place(torch.from_numpy(positions).to(device), ctx=n_slots, causal=len(new) == 1)
        last_columns = [first + len(part) - 1 for first, part in zip(firsts, new, strict=True)]
        rows = torch.tensor(last_columns, device=device) if last_only else None
        logits = self._model.module(torch.from_numpy(ids).to(device), place, self._cache, keep=keep, rows=rows)
        self.n_cached = stop
        return as_numpy(logits[-1] if last_only else logits[-1, seq])

    def _padded(self, new: Sequence[range], *, last_only: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Lay out the new tokens of all rows: ids, positions (-1 in padding), and the first column of each row.

        Padding stands before the tokens; behind them for `last_only`.
        """
        width = max(len(part) for part in new) + (PADDING if len(new) > 1 else 0)
        firsts = [0 if last_only else width - len(part) for part in new]
        ids, positions = np.zeros((len(new), width), np.int64), np.full((len(new), width), -1)
        for row, (first, part) in enumerate(zip(firsts, new, strict=True)):
            columns = slice(first, first + len(part))
            ids[row, columns] = np.asarray(self._rows[row])[part]
            positions[row, columns] = self._first_position + np.asarray(part)
        return ids, positions, firsts

    def _new(self, row: tuple[int, ...], stop: int) -> range:
        """Return the tokens of a row that a pass adds.

        A longer neighbour stays ahead by the difference of the lengths.
        """
        ahead = len(row) - len(self._ids)
        return range(self.n_cached + ahead if self.n_cached else 0, stop + ahead)


def _with_golden(
    golden: Mapping[str, np.ndarray], override: StageOverride, start: int, name: str, array: np.ndarray
) -> np.ndarray:
    theirs = golden.get(name)
    return override(name, array, start) if theirs is None or theirs.shape != array.shape else theirs


def observer(trace: Trace, goes_on: Callable[[str, np.ndarray], np.ndarray], where: Columns, target: Target) -> Keep:
    """Build a `keep` that records the judged part of each stage in `trace`, and can replace that part.

    `goes_on` returns the array that the pass continues with, rounded to the dtype of the run; if it is the recorded
    array itself, the stage stays as it is. CheckpointMismatch: a stage is of another dtype or device than `target`.
    """

    def keep(name: str, stage: Tensor) -> Tensor:
        _require_target(name, stage, target)
        part = where.of(name, stage)
        trace[name] = as_numpy(part)
        instead = goes_on(name, trace[name])
        if instead is trace[name]:
            return stage
        stage = stage.clone()
        where.of(name, stage).copy_(torch.from_numpy(instead))
        return stage

    return keep


def _require_target(name: str, stage: Tensor, target: Target) -> None:
    short = name.rpartition(".")[2]
    dtype = torch.promote_types(target.dtype, torch.float32) if short in WIDENED else target.dtype
    if BY_NAME[short].is_choice:
        dtype = torch.int64
    if (stage.dtype, stage.device) != (dtype, target.device):
        message = f"expected {dtype} on {target.device}, got {stage.dtype} on {stage.device}"
        raise CheckpointMismatch(f"{name}: {message}; the run was not made for {target}")

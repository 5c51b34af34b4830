"""Observed runs of one case on the torch model: stage by stage, in one or several passes, single or in a batch.

In a batch, the observed sequence has padding and a second sequence, the neighbour, with other tokens. The neighbour has
another length if the context allows it. Only the entries of the observed tokens are recorded and replaced: by a golden
(array of a reference engine) or by an override.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from llorch.judging.expert_selection import StageOverride, identity
from llorch.pytorch.causal_lm import Keep, keep_nothing
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel, as_numpy
from llorch.runtime.errors import CheckpointMismatch
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME, axis_sizes

MORE = 3  # number of tokens by which the neighbour is longer
PADDING = 2  # number of columns that are padding in every row
WIDENED = (  # stages that are at least float32, also in half precision
    "attn_scores", "attn_probs", "attn_gate", "q_l2", "k_l2", "beta", "log_decay", "delta_state", "delta_out",
    "router_probs", "shared_gate",
)  # fmt: skip

Trace = dict[str, np.ndarray]


@dataclass(frozen=True)
class Columns:
    """Columns of the observed tokens, which are in the last row of the batch."""

    sizes: Mapping[str, int]  # of every axis of the pass, with all columns and all cache slots that attention reads
    seq: slice
    ctx: slice

    def of(self, name: str, stage: Tensor) -> Tensor:
        """Return a view of the observed entries of a stage; of the whole last row if the shape is wrong."""
        axes = BY_NAME[name.rpartition(".")[2]].axes.split()
        if tuple(stage.shape[1:]) != tuple(self.sizes[axis] for axis in axes):
            return stage[-1]
        parts = {"seq": self.seq, "ctx": self.ctx}
        return stage[(-1, *(parts.get(axis, slice(None)) for axis in axes))]


class ObservedCase:
    """Tokens of a case with a cache.

    Attributes:
        n_cached: Number of observed tokens in the cache.
    """

    def __init__(self, model: TorchModel, inputs: Pass, *, in_batch: bool = False) -> None:
        """Create an empty cache; `in_batch`: run the tokens in row 1 of 2, with padding."""
        self._model, self._first_position, self._ids = model, inputs.first_position, inputs.ids
        n_free = model.config.max_position_embeddings - inputs.first_position - len(inputs.ids)
        neighbour = (*reversed(inputs.ids), *inputs.ids[: min(MORE, n_free)])
        self._rows = [neighbour, inputs.ids] if in_batch else [inputs.ids]
        self._cache = model.new_cache(len(self._rows), max(len(row) for row in self._rows), inputs.first_position)
        self.n_cached = 0

    def fill_and_clear(self) -> None:
        """Fill the cache with random numbers, like an earlier answer, and reset it as a new answer does."""
        generator = torch.Generator(self._model.target.device).manual_seed(0)
        for tensor in self._cache.tensors:
            tensor.normal_(generator=generator)
        self._cache.forget()

    @torch.inference_mode()
    def feed(
        self,
        stop: int,
        *,
        trace: Trace | None = None,
        n_traced: int | None = None,
        golden: Mapping[str, np.ndarray] | None = None,
        last_only: bool = False,
        override: StageOverride = identity,
    ) -> Float[np.ndarray, "rows vocab"]:
        """Run the observed tokens up to `stop` and return their logits; with `last_only`, those of the last token.

        Every stage that the model exposes is added to `trace`, for at most `n_traced` tokens, the last ones. Then the
        `golden` replaces it, or the return value of `override` if there is no golden. Raise CheckpointMismatch if a
        stage's dtype or device is not the target's.
        """
        new_tokens, device = [self._new_tokens(row, stop) for row in self._rows], self._model.target.device
        ids, positions, firsts = self._lay_out(new_tokens, last_only=last_only)
        seq, n_slots = slice(firsts[-1], firsts[-1] + len(new_tokens[-1])), max(tokens.stop for tokens in new_tokens)
        keep = keep_nothing
        if trace is not None or override is not identity:
            n_traced = n_traced or stop
            traced = slice(max(seq.start, seq.stop - n_traced), seq.stop)
            sizes = axis_sizes(self._model.config, seq=ids.shape[1], ctx=n_slots)
            columns = Columns(sizes, traced, slice(max(0, stop - n_traced), stop))
            replace_stage = partial(_with_golden, golden or {}, override, new_tokens[-1].start)
            keep = make_observer({} if trace is None else trace, replace_stage, columns, self._model.target)
        placement = self._cache.place(torch.from_numpy(positions).to(device), ctx=n_slots, causal=len(new_tokens) == 1)
        last_columns = [first + len(tokens) - 1 for first, tokens in zip(firsts, new_tokens, strict=True)]
        rows = torch.tensor(last_columns, device=device) if last_only else None
        logits = self._model.module(torch.from_numpy(ids).to(device), placement, self._cache, keep=keep, rows=rows)
        self.n_cached = stop
        return as_numpy(logits[-1] if last_only else logits[-1, seq])

    def _lay_out(self, new_tokens: Sequence[range], *, last_only: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return ids, positions (-1: padding, left of tokens or, for `last_only`, right), first column of each row."""
        width = max(len(tokens) for tokens in new_tokens) + (PADDING if len(new_tokens) > 1 else 0)
        firsts = [0 if last_only else width - len(tokens) for tokens in new_tokens]
        ids, positions = np.zeros((len(new_tokens), width), np.int64), np.full((len(new_tokens), width), -1)
        for row, (first, tokens) in enumerate(zip(firsts, new_tokens, strict=True)):
            columns = slice(first, first + len(tokens))
            ids[row, columns] = np.asarray(self._rows[row])[tokens]
            positions[row, columns] = self._first_position + np.asarray(tokens)
        return ids, positions, firsts

    def _new_tokens(self, row: tuple[int, ...], stop: int) -> range:
        """Return the token indices of a row that a pass adds; a longer neighbour stays ahead by the extra tokens."""
        lead = len(row) - len(self._ids)
        return range(self.n_cached + lead if self.n_cached else 0, stop + lead)


def _with_golden(
    golden: Mapping[str, np.ndarray], override: StageOverride, start: int, name: str, array: np.ndarray
) -> np.ndarray:
    golden_stage = golden.get(name)
    return override(name, array, start) if golden_stage is None or golden_stage.shape != array.shape else golden_stage


def make_observer(
    trace: Trace, replace_stage: Callable[[str, np.ndarray], np.ndarray], columns: Columns, target: Target
) -> Keep:
    """Build a `keep` that records the observed part of each stage in `trace`, and can replace that part.

    `replace_stage` returns the array with which the pass continues, in the dtype of the run. If it returns the recorded
    array itself, the stage is unchanged. Raise CheckpointMismatch if a stage's dtype or device is not `target`'s.
    """

    def keep(name: str, stage: Tensor) -> Tensor:
        _require_target(name, stage, target)
        part = columns.of(name, stage)
        trace[name] = as_numpy(part)
        replacement = replace_stage(name, trace[name])
        if replacement is trace[name]:
            return stage
        stage = stage.clone()
        columns.of(name, stage).copy_(torch.from_numpy(replacement))
        return stage

    return keep


def _require_target(name: str, stage: Tensor, target: Target) -> None:
    short = name.rpartition(".")[2]
    dtype = torch.promote_types(target.dtype, torch.float32) if short in WIDENED else target.dtype
    if BY_NAME[short].is_selection:
        dtype = torch.int64
    if (stage.dtype, stage.device) != (dtype, target.device):
        message = f"expected {dtype} on {target.device}, got {stage.dtype} on {stage.device}"
        raise CheckpointMismatch(f"{name}: {message}; the run was not made for {target}")

"""Decoding of a batch: prefill, then decode steps of one token per sequence.

All tensors that a step reads or writes have fixed addresses, and a token is passed to the next step on the device. So
a step can be recorded once and replayed, see `kernels.triton.graph`; the host only reads the sampled tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import CausalLM, keep_nothing
from llorch.pytorch.sampling import BatchSettings, Needs, choose, seen_tokens, uniforms

SMALLEST = 256  # slots of the smallest `size_class`; reading fewer saves nothing compared to the weights

Ids = Int[Tensor, "batch seq"]
Forward = Callable[[Tensor, PassPlacement, Cache], Tensor]  # (ids, placement, cache) -> logits
Replay = Callable[["Decoding", int], None]  # (decoding, number of slots to read)
Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (tokens, log probabilities) -> those that all ranks take


class Decoding:
    """State of a batch, and the step that advances it by one token."""

    def __init__(self, module: CausalLM, cache: Cache, needs: Needs, *, n_end_ids: int) -> None:
        """Allocate all tensors; a cache row is a sequence, `needs` are the filters of the sampling step."""
        batch, device = cache.keys[0].shape[0], cache.keys[0].device
        ints = {"dtype": torch.int64, "device": device}
        floats = {"dtype": torch.float64, "device": device}
        self.cache, self.needs, self.module = cache, needs, module
        self.forward: Forward = module  # or its compiled version
        self.ids = torch.zeros(batch, 1, **ints)  # last token of each sequence
        self.positions = torch.full((batch, 1), -1, **ints)  # of these tokens; -1 for a finished sequence
        self.limits = torch.zeros(batch, 1, **ints)  # `max_tokens`
        self.end_ids = torch.full((batch, max(n_end_ids, 1)), -1, **ints)  # EOS ids; -1, which is no id, fills rows
        self.n = torch.zeros(1, **ints)  # sampled tokens per sequence, as `n_done`, but on the device
        self.tokens = torch.zeros(batch, cache.n_slots, **ints)
        self.logprobs = torch.zeros(batch, cache.n_slots, **floats)
        self.uniforms = torch.zeros(batch, cache.n_slots, **floats)
        self.seen = torch.zeros(batch, module.config.vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros_like(self.seen, dtype=torch.int32)  # token counts of the answer
        self.settings = BatchSettings.of([SamplingSettings()] * batch, device)
        self.filled = [0] * batch  # filled slots per sequence; the host also counts steps after its end
        self.n_done = 0  # sampled tokens per sequence, with those after its end
        self.adapters: Sequence[str | None] = [None] * batch
        self.replay: Replay | None = None  # replays a recorded step, if there is one
        self.agree: Agree = lambda token, logprob: (token, logprob)  # a single process takes its own tokens

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Tensors that a step changes, without cache slots, which a repeated step writes again."""
        step_tensors = self.ids, self.positions, self.n, self.tokens, self.logprobs, self.seen, self.counts
        return *step_tensors, *self.cache.state_tensors

    def fits(self, jobs: Sequence[Job], needs: Needs, module: CausalLM) -> bool:
        """Tell if these jobs can start here, with the same module."""
        fits = max(len(job.end_ids) for job in jobs) <= self.end_ids.shape[1] and n_slots(jobs) <= self.cache.n_slots
        return fits and self.needs == needs and self.batch == len(jobs) and self.module is module

    @torch.no_grad()
    def begin(self, jobs: Sequence[Job], *, chunk: int) -> None:
        """Prefill the prompts (none empty), `chunk` tokens per pass, and sample the first token of each."""
        device = self.ids.device
        self.cache.clear()
        self._assign(jobs)
        ids, positions = (torch.from_numpy(array).to(device) for array in left_padded([job.ids for job in jobs]))
        self.filled = [len(job.ids) for job in jobs]
        has_no_padding = len(set(self.filled)) == 1
        self._choose(read_prompts(self.module, ids, positions, self.cache, causal=has_no_padding, chunk=chunk))
        self.n_done = 1

    def _assign(self, jobs: Sequence[Job]) -> None:
        """Set the state for new jobs: settings, random numbers, seen tokens, limits and EOS ids."""
        self.adapters = [job.adapter for job in jobs]
        settings, n_draws = [job.settings for job in jobs], max(job.max_tokens for job in jobs)
        self.settings.assign(BatchSettings.of(settings, self.ids.device))
        self.uniforms[:, :n_draws] = torch.from_numpy(uniforms(settings, n_draws)).to(self.uniforms)
        self.seen.copy_(torch.from_numpy(seen_tokens([job.ids for job in jobs], self.seen.shape[1])))
        self.counts.zero_()
        self.limits.copy_(torch.tensor([[job.max_tokens] for job in jobs]))
        self.positions.copy_(torch.tensor([[len(job.ids) - 1] for job in jobs]))
        width = self.end_ids.shape[1]
        self.end_ids.copy_(torch.tensor([[*job.end_ids, *[-1] * (width - len(job.end_ids))] for job in jobs]))
        self.n.zero_()

    @torch.no_grad()
    def step(self, ctx: int, *, causal: bool = False) -> None:
        """Process the last token of each sequence and sample the next; a finished sequence is treated as padding.

        `ctx` is the number of slots to read: all filled slots and the new one. `causal` promises that the new tokens
        are in the last slot and no sequence has finished.
        """
        place = self.cache.place(self.positions, ctx=ctx, causal=causal)
        self._choose(self.forward(self.ids, place, self.cache)[:, 0])

    def advance(self) -> None:
        """Compute one step, with no more slots than needed: replayed if a recorded step exists."""
        self.n_done += 1
        self.filled = [min(n + 1, self.cache.n_slots) for n in self.filled]
        if self.replay is not None:
            self.replay(self, max(self.filled))
        else:
            self.step(max(self.filled), causal=self.batch == 1)

    def _choose(self, logits: Float[Tensor, "batch vocab"]) -> None:
        """Sample and record the next token of each sequence; a finished one gets position -1."""
        u = self.uniforms.index_select(1, self.n)
        token, logprob = self.agree(*choose(logits, self.settings, self.needs, self.seen, self.counts, u))
        self.tokens.index_copy_(1, self.n, token)
        self.logprobs.index_copy_(1, self.n, logprob)
        self.seen.scatter_(1, token, True)
        self.counts.scatter_add_(1, token, torch.ones_like(token, dtype=torch.int32))
        self.n.add_(1)
        is_finished = (token == self.end_ids).any(-1, keepdim=True) | (self.n >= self.limits) | (self.positions < 0)
        self.positions.copy_(torch.where(is_finished, -1, self.positions + 1))
        self.ids.copy_(token)

    @torch.no_grad()
    def narrowed(self, rows: Sequence[int], cache: Cache, module: CausalLM) -> "Decoding":
        """Copy some sequences into `cache`, which is empty, has one row per sequence and as many slots as this one."""
        row_index = torch.tensor(rows, device=self.ids.device)
        small = Decoding(module, cache, self.needs, n_end_ids=self.end_ids.shape[1])
        small.filled, small.n_done = [self.filled[row] for row in rows], self.n_done
        small.adapters = [self.adapters[row] for row in rows]
        for name in ("ids", "positions", "limits", "end_ids", "tokens", "logprobs", "uniforms", "seen", "counts"):
            getattr(small, name).copy_(getattr(self, name)[row_index])
        small.n.copy_(self.n)
        small.settings.assign(self.settings.rows(row_index))
        for old, new in zip(self.cache.tensors, cache.tensors, strict=True):
            new.copy_(old[row_index])
        return small


def n_slots(jobs: Sequence[Job]) -> int:
    """Return the number of slots per sequence that a batch needs."""
    return max(job.n_slots for job in jobs)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"]]:
    """Pad ids with 0 and positions with -1 on the left, so that all prompts end in the last column."""
    width = max(len(ids) for ids in prompts)
    ids, positions = np.zeros((len(prompts), width), np.int64), np.full((len(prompts), width), -1)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        positions[row, width - len(prompt) :] = np.arange(len(prompt))
    return ids, positions


def read_prompts(
    module: CausalLM, ids: Ids, positions: Ids, cache: Cache, *, causal: bool, chunk: int
) -> Float[Tensor, "batch vocab"]:
    """Prefill an empty cache, `chunk` columns per pass to bound activations; return the last column's logits."""
    last_start = (ids.shape[1] - 1) // chunk * chunk
    for start in range(0, last_start, chunk):
        place = cache.place(positions[:, start : start + chunk], ctx=start + chunk, causal=causal)
        module.model(ids[:, start : start + chunk], place, cache, keep_nothing)
    place = cache.place(positions[:, last_start:], ctx=ids.shape[1], causal=causal)
    rows = torch.full((len(ids),), ids.shape[1] - last_start - 1, device=ids.device)
    return module(ids[:, last_start:], place, cache, rows=rows)[:, 0]


def size_class(ctx: int, n_slots: int) -> int:
    """Return the slots that a recorded step reads: the first of 256, 384, 512, 768, ... >= `ctx`, at most `n_slots`."""
    size = SMALLEST
    while size < ctx:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, n_slots)


def recordable(module: nn.Module) -> bool:
    """Tell if no module reads values back to the host in a step, which a CUDA graph does not allow."""
    return not any(getattr(part, "reads_back", False) for part in module.modules())


def compiled_forward(module: nn.Module, *, growing: bool) -> Forward:
    """Compile the forward pass of a decode step; `growing`: the number of slots grows, so its shape is dynamic."""
    return torch.compile(module, dynamic=True if growing else None)

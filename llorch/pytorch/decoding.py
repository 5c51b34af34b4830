"""A batch that is being continued: read the prompts, then one token of every sequence per step.

Whatever a step reads or writes lies in tensors that keep their place, and the token goes from a step to the next on the
device. So a step can be recorded once and replayed, see `kernels.triton.graph`; the host only looks at the tokens
that were written.
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

SMALLEST = 256  # slots of the smallest class; below, looking at all of them costs nothing beside the weights

Ids = Int[Tensor, "batch seq"]
Forward = Callable[[Tensor, PassPlacement, Cache], Tensor]  # ids, where they stand, cache -> logits of each
Replay = Callable[["Decoding", int], None]  # slots to look at
Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens and log probabilities, as all ranks take them


class Decoding:
    """The state of a batch, and the step that moves it on by a token."""

    def __init__(self, module: CausalLM, cache: Cache, needs: Needs, *, n_end_ids: int) -> None:
        """Reserve everything; a row of the cache is a sequence, `needs` the filters that a step has to have."""
        batch, device = cache.keys[0].shape[0], cache.keys[0].device
        ints = {"dtype": torch.int64, "device": device}
        wide = {"dtype": torch.float64, "device": device}
        self.cache, self.needs, self.module = cache, needs, module
        self.forward: Forward = module  # or what is compiled
        self.ids = torch.zeros(batch, 1, **ints)
        self.positions = torch.full((batch, 1), -1, **ints)
        self.limits = torch.zeros(batch, 1, **ints)
        self.end_ids = torch.full((batch, max(n_end_ids, 1)), -1, **ints)
        self.n = torch.zeros(1, **ints)
        self.tokens = torch.zeros(batch, cache.n_slots, **ints)
        self.logprobs = torch.zeros(batch, cache.n_slots, **wide)
        self.uniforms = torch.zeros(batch, cache.n_slots, **wide)
        self.seen = torch.zeros(batch, module.config.vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros_like(self.seen, dtype=torch.int32)  # of each token in the answer
        self.settings = BatchSettings.of([SamplingSettings()] * batch, device)
        self.filled = [0] * batch  # slots that each sequence has filled, or would have, had it not ended
        self.n_done = 0  # tokens per sequence that were made
        self.adapters: Sequence[str | None] = [None] * batch
        self.replay: Replay | None = None  # of a recorded step, where there is one
        self.agree: Agree = lambda token, logprob: (token, logprob)  # of one process: what it has chosen

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Tensors that a step changes, but for slots of the cache, which a second try of the same step writes again."""
        own = self.ids, self.positions, self.n, self.tokens, self.logprobs, self.seen, self.counts
        return *own, *self.cache.state_tensors

    def fits(self, jobs: Sequence[Job], needs: Needs, module: CausalLM) -> bool:
        """Return whether these jobs can be begun here, with this very model."""
        room = max(len(job.end_ids) for job in jobs) <= self.end_ids.shape[1] and n_slots(jobs) <= self.cache.n_slots
        return room and self.needs == needs and self.batch == len(jobs) and self.module is module

    @torch.no_grad()
    def begin(self, jobs: Sequence[Job], *, chunk: int) -> None:
        """Read the prompts, none of them empty, `chunk` tokens per pass, and choose the first token of each."""
        device = self.ids.device
        self.cache.clear()
        self._assign(jobs)
        ids, positions = (torch.from_numpy(array).to(device) for array in left_padded([job.ids for job in jobs]))
        self.filled = [len(job.ids) for job in jobs]
        even = len(set(self.filled)) == 1
        self._choose(read_prompts(self.module, ids, positions, self.cache, causal=even, chunk=chunk))
        self.n_done = 1

    def _assign(self, jobs: Sequence[Job]) -> None:
        """Set up all state for new jobs: settings, random numbers, seen tokens, limits and end ids."""
        self.adapters = [job.adapter for job in jobs]
        settings, most = [job.settings for job in jobs], max(job.max_tokens for job in jobs)
        self.settings.assign(BatchSettings.of(settings, self.ids.device))
        self.uniforms[:, :most] = torch.from_numpy(uniforms(settings, most)).to(self.uniforms)
        self.seen.copy_(torch.from_numpy(seen_tokens([job.ids for job in jobs], self.seen.shape[1])))
        self.counts.zero_()
        self.limits.copy_(torch.tensor([[job.max_tokens] for job in jobs]))
        self.positions.copy_(torch.tensor([[len(job.ids) - 1] for job in jobs]))
        width = self.end_ids.shape[1]
        self.end_ids.copy_(torch.tensor([[*job.end_ids, *[-1] * (width - len(job.end_ids))] for job in jobs]))
        self.n.zero_()

    @torch.no_grad()
    def step(self, ctx: int, *, causal: bool = False) -> None:
        """Feed the last tokens and choose the next ones; sequences that ended stand still.

        `ctx` are the slots to look at: all that are filled, and the new one. `causal` promises that the new tokens
        stand in the last of them and none has ended.
        """
        place = self.cache.place(self.positions, ctx=ctx, causal=causal)
        self._choose(self.forward(self.ids, place, self.cache)[:, 0])

    def advance(self) -> None:
        """Compute one step that reads no more slots than it needs."""
        self.n_done += 1
        self.filled = [min(n + 1, self.cache.n_slots) for n in self.filled]
        if self.replay is not None:
            self.replay(self, max(self.filled))
        else:
            self.step(max(self.filled), causal=self.batch == 1)

    def _choose(self, logits: Float[Tensor, "batch vocab"]) -> None:
        """Choose the next token of each sequence and record it; an ended one gets position -1."""
        u = self.uniforms.index_select(1, self.n)
        token, logprob = self.agree(*choose(logits, self.settings, self.needs, self.seen, self.counts, u))
        self.tokens.index_copy_(1, self.n, token)
        self.logprobs.index_copy_(1, self.n, logprob)
        self.seen.scatter_(1, token, True)
        self.counts.scatter_add_(1, token, torch.ones_like(token, dtype=torch.int32))
        self.n.add_(1)
        ended = (token == self.end_ids).any(-1, keepdim=True) | (self.n >= self.limits) | (self.positions < 0)
        self.positions.copy_(torch.where(ended, -1, self.positions + 1))
        self.ids.copy_(token)

    @torch.no_grad()
    def narrowed(self, rows: Sequence[int], cache: Cache, module: CausalLM) -> "Decoding":
        """Copy some of the sequences into `cache`, which is empty, with one row for each and as many slots."""
        kept = torch.tensor(rows, device=self.ids.device)
        small = Decoding(module, cache, self.needs, n_end_ids=self.end_ids.shape[1])
        small.filled, small.n_done = [self.filled[row] for row in rows], self.n_done
        small.adapters = [self.adapters[row] for row in rows]
        for name in ("ids", "positions", "limits", "end_ids", "tokens", "logprobs", "uniforms", "seen", "counts"):
            getattr(small, name).copy_(getattr(self, name)[kept])
        small.n.copy_(self.n)
        small.settings.assign(self.settings.rows(kept))
        for old, new in zip(self.cache.tensors, cache.tensors, strict=True):
            new.copy_(old[kept])
        return small


def n_slots(jobs: Sequence[Job]) -> int:
    """Count the slots that a batch needs per sequence."""
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
    """Fill an empty cache, `chunk` columns per pass to bound the activations; logits of the last column."""
    last = (ids.shape[1] - 1) // chunk * chunk
    for start in range(0, last, chunk):
        place = cache.place(positions[:, start : start + chunk], ctx=start + chunk, causal=causal)
        module.model(ids[:, start : start + chunk], place, cache, keep_nothing)
    place = cache.place(positions[:, last:], ctx=ids.shape[1], causal=causal)
    rows = torch.full((len(ids),), ids.shape[1] - last - 1, device=ids.device)
    return module(ids[:, last:], place, cache, rows=rows)[:, 0]


def size_class(ctx: int, n_slots: int) -> int:
    """Return the first of 256, 384, 512, 768, 1024, ... slots that holds `ctx`, at most `n_slots`: that of a graph."""
    size = SMALLEST
    while size < ctx:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, n_slots)


def recordable(module: nn.Module) -> bool:
    """Return whether no part asks the device for a value in a step, as a recorded step cannot."""
    return not any(getattr(part, "reads_back", False) for part in module.modules())


def compiled_forward(module: nn.Module, *, growing: bool) -> Forward:
    """Compile the forward pass of a step, all layers as one; `growing`: for steps that look at more and more slots."""
    return torch.compile(module, dynamic=True if growing else None)

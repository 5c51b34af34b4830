"""Many prompts in one batch: prompts of any lengths, each with its own settings and end, with tokens streamed.

A row of the decoding is a sequence. On CUDA the host launches the next group of steps before it reads the tokens of the
previous group, so the device never waits for the host.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from llorch.model.generate import Answer, Job, Token
from llorch.pytorch.decoding import Decoding
from llorch.runtime.errors import UserError

GROUP = 8  # steps of a group on CUDA


def positions_of(attention_mask: Int[Tensor, "batch seq"] | Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Convert a mask of transformers' tokenizers to positions for `Cache.place`, -1 for padding."""
    mask = attention_mask.to(torch.int64)
    return torch.where(mask == 1, mask.cumsum(-1) - 1, -1)


@dataclass(frozen=True)
class HostCopy:
    """Asynchronous copy of tokens to the host."""

    tokens: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event | None  # reached when the copy is complete; None on the CPU, where nothing is copied

    @classmethod
    def of(cls, decoding: Decoding, start: int) -> "HostCopy":
        """Start copying the tokens from step `start` on; the host does not wait."""
        new_steps = slice(start, decoding.n_done)
        if decoding.ids.device.type != "cuda":
            return cls(decoding.tokens[:, new_steps], decoding.logprobs[:, new_steps], None)
        tokens, logprobs = _copy_async(decoding.tokens[:, new_steps]), _copy_async(decoding.logprobs[:, new_steps])
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(decoding.ids.device))
        return cls(tokens, logprobs, arrived)

    def columns(self) -> list[tuple[list[int], list[float]]]:
        """Wait for the copy, and return ids and log probabilities of every sequence, step by step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(zip(self.tokens.T.tolist(), self.logprobs.T.tolist(), strict=True))


def _copy_async(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory and return it; it completes later."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class RunningBatch:
    """Iterator of a batch: launches steps, yields tokens, drops finished sequences."""

    def __init__(
        self, decoding: Decoding, jobs: Sequence[Job], answers: Sequence[Answer], *, narrow: Callable[..., Decoding]
    ) -> None:
        """Take over a decoding after `begin`; `narrow(decoding, rows)` makes a decoding of some of its rows."""
        self.decoding = decoding
        self._answers, self._narrow = answers, narrow
        self._rows = list(range(len(jobs)))  # sequence of each row of the decoding
        self._total = max(job.max_tokens for job in jobs)
        on_cuda = decoding.ids.device.type == "cuda"
        self._group, self._ahead = (GROUP, 1) if on_cuda else (1, 0)
        self._pending: deque[tuple[list[int], HostCopy]] = deque()

    def __iter__(self) -> Iterator[tuple[int, Token]]:
        """Yield (sequence, token), in order for each sequence."""
        yield from self._yield_tokens(self._rows, HostCopy.of(self.decoding, 0))  # before further steps are launched
        while self._has_open_sequences():
            self._launch_steps()
            if len(self._pending) > self._ahead or self.decoding.n_done >= self._total:
                yield from self._yield_tokens(*self._pending.popleft())

    def _has_open_sequences(self) -> bool:
        """Tell if any sequence is unfinished; if at most half are, drop the others from the decoding first."""
        rows = [row for row, sequence in enumerate(self._rows) if self._answers[sequence].finish is None]
        if 0 < len(rows) <= len(self._rows) // 2:
            self.decoding = self._narrow(self.decoding, rows)
            self._rows = [self._rows[row] for row in rows]
        return bool(rows)

    def _launch_steps(self) -> None:
        """Launch a group of steps and the copy of their tokens; nothing after `max_tokens` of the longest job."""
        start = self.decoding.n_done
        stop = min(start + self._group, self._total)
        for _ in range(start, stop):
            self.decoding.advance()
        if stop > start:
            self._pending.append((self._rows, HostCopy.of(self.decoding, start)))

    def _yield_tokens(self, rows: list[int], host_copy: HostCopy) -> Iterator[tuple[int, Token]]:
        for ids, logprobs in host_copy.columns():
            for sequence, token_id, logprob in zip(rows, ids, logprobs, strict=True):
                if self._answers[sequence].finish is None:
                    yield sequence, self._answers[sequence].take(token_id, logprob)


def one_each(value: object, n: int, *, name: str) -> list:
    """Return n settings, from one for all or from a sequence of n; UserError for another length."""
    choices = list(value) if isinstance(value, Sequence) else [value] * n
    if len(choices) != n:
        raise UserError(f"generate_batch: expected 1 {name} for all prompts or {n}, one per prompt, got {len(choices)}")
    return choices

"""Many prompts at once: ragged, each with its own settings and end, tokens handed out as they come."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from llorch.model.generate import Answer, Job, Token
from llorch.pytorch.decoding import Decoding
from llorch.runtime.errors import UserError

GROUP = 8  # on CUDA, steps that are launched before the host looks at the tokens of the group before


def positions_of(attention_mask: Int[Tensor, "batch seq"] | Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Convert a mask of transformers' tokenizers to positions for `Cache.place`, -1 for padding."""
    mask = attention_mask.to(torch.int64)
    return torch.where(mask == 1, mask.cumsum(-1) - 1, -1)


@dataclass(frozen=True)
class HostCopy:
    """Tokens on their way to the host."""

    tokens: Tensor
    logprobs: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, decoding: Decoding, start: int) -> "HostCopy":
        """Fetch the tokens from step `start` on; the host does not wait."""
        new = slice(start, decoding.n_done)
        if decoding.ids.device.type != "cuda":
            return cls(decoding.tokens[:, new], decoding.logprobs[:, new], None)
        tokens, logprobs = _on_its_way(decoding.tokens[:, new]), _on_its_way(decoding.logprobs[:, new])
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(decoding.ids.device))
        return cls(tokens, logprobs, arrived)

    def columns(self) -> list[tuple[list[int], list[float]]]:
        """Wait for the copy, and return ids and log probabilities of every sequence, step by step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(zip(self.tokens.T.tolist(), self.logprobs.T.tolist(), strict=True))


def _on_its_way(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory and return it; it is complete later."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class RunningBatch:
    """A batch on its way: launches steps, hands out tokens, drops sequences that ended."""

    def __init__(
        self, decoding: Decoding, jobs: Sequence[Job], answers: Sequence[Answer], *, narrow: Callable[..., Decoding]
    ) -> None:
        """Take over a decoding whose first tokens are chosen; `narrow` makes one of some of its rows."""
        self.decoding = decoding
        self._answers, self._narrow = answers, narrow
        self._rows = list(range(len(jobs)))  # which sequence each row of the decoding is
        self._total = max(job.max_tokens for job in jobs)
        on_cuda = decoding.ids.device.type == "cuda"
        self._group, self._ahead = (GROUP, 1) if on_cuda else (1, 0)
        self._waiting: deque[tuple[list[int], HostCopy]] = deque()

    def __iter__(self) -> Iterator[tuple[int, Token]]:
        """Yield sequence and token, for each sequence in order."""
        yield from self._hand_out(self._rows, HostCopy.of(self.decoding, 0))  # before the next steps are launched
        while self._some_are_open():
            self._go_on()
            if len(self._waiting) > self._ahead or self.decoding.n_done >= self._total:
                yield from self._hand_out(*self._waiting.popleft())

    def _some_are_open(self) -> bool:
        """Return whether there is more to do; a batch in which half of the sequences ended goes on without them."""
        rows = [row for row, at in enumerate(self._rows) if self._answers[at].finish is None]
        if 0 < len(rows) <= len(self._rows) // 2:
            self.decoding = self._narrow(self.decoding, rows)
            self._rows = [self._rows[row] for row in rows]
        return bool(rows)

    def _go_on(self) -> None:
        start = self.decoding.n_done
        stop = min(start + self._group, self._total)
        for _ in range(start, stop):
            self.decoding.advance()
        if stop > start:
            self._waiting.append((self._rows, HostCopy.of(self.decoding, start)))

    def _hand_out(self, rows: list[int], read: HostCopy) -> Iterator[tuple[int, Token]]:
        for ids, logprobs in read.columns():
            for at, token_id, logprob in zip(rows, ids, logprobs, strict=True):
                if self._answers[at].finish is None:
                    yield at, self._answers[at].take(token_id, logprob)


def one_each(value: object, n: int, *, name: str) -> list:
    """Return a list of n settings, from one for all or a sequence of n; UserError for another length."""
    values = list(value) if isinstance(value, Sequence) else [value] * n
    if len(values) != n:
        raise UserError(f"generate_batch: expected 1 {name} for all prompts or {n}, one per prompt, got {len(values)}")
    return values

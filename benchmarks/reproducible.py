"""Bit equality of logits in reproducible mode, and in fast mode; `speed.py` measures the cost.

    python benchmarks/reproducible.py                      story, float32, 2 threads
    python benchmarks/reproducible.py --dtype bfloat16 --threads 1

The model itself generates the prompts. Each is run alone in one pass; then in batches of 1 to 16, in several orders,
padded on the left; then in two chunks and, from its middle on, token by token. Every logit is compared with that of the
run alone, bit by bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import numpy as np
import torch

from llorch.apps.bench.measure import processor
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.decoding import left_padded
from llorch.pytorch.model import TorchModel, load_torch

BATCHES = (1, 2, 4, 8, 16)
Prompts = Sequence[Sequence[int]]


@dataclass
class Differences:
    """Differences of a prompt's logits alone from its logits in batches, chunks and decoding."""

    rows: int = 0  # rows of logits compared
    changed: int = 0  # rows in which a bit differs
    tokens: int = 0  # rows whose most likely token differs
    largest: float = 0.0  # largest difference of two logits

    def add(self, single: torch.Tensor, batched: torch.Tensor) -> None:
        """Compare the logits of one prompt."""
        self.rows += len(single)
        self.changed += int((single != batched).any(-1).sum())
        self.tokens += int((single.argmax(-1) != batched.argmax(-1)).sum())
        self.largest = max(self.largest, float((single.double() - batched.double()).abs().max()))

    def __str__(self) -> str:
        """Write the result in one line."""
        verdict = "bit-equal" if self.changed == 0 else "NOT bit-equal"
        return (
            f"{verdict}: {self.changed} of {self.rows} rows of logits differ, by at most {self.largest:.2e}; "
            f"{self.tokens} greedy tokens differ"
        )


def make_prompts(model: TorchModel, n: int) -> list[list[int]]:
    """Generate prompts of 5 to 100 tokens, ragged."""
    prompts = []
    for seed in range(n):
        settings = SamplingSettings(temperature=1.0, seed=seed)
        start = model.tokenizer.encode("Once upon a time")
        generated = model.generate(start, max_tokens=1 + seed * 37 % 96, settings=settings, ignore_eos=True)
        prompts.append([*start, *(token.id for token in generated)])
    return prompts


@torch.no_grad()
def logits_in_batch(model: TorchModel, prompts: Prompts) -> list[torch.Tensor]:
    """Compute the logits of each prompt, all in one batch."""
    ids, positions = (torch.from_numpy(array).to(model.target.device) for array in left_padded(prompts))
    cache = model.new_cache(len(prompts), ids.shape[1])
    logits = model.module(ids, cache.place(positions, ctx=ids.shape[1]), cache)
    return [row[ids.shape[1] - len(prompt) :] for row, prompt in zip(logits, prompts, strict=True)]


@torch.no_grad()
def logits_in_passes(model: TorchModel, prompt: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """Compute the logits of a prompt that is split at `ends`."""
    cache, start, logits = model.new_cache(1, len(prompt)), 0, []
    for end in ends:
        positions = torch.arange(start, end, device=model.target.device)[None]
        ids = torch.tensor([prompt[start:end]], device=model.target.device)
        logits.append(model.module(ids, cache.place(positions, ctx=end, causal=True), cache)[0])
        start = end
    return torch.cat(logits)


def in_batches(model: TorchModel, prompts: Prompts, orders: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index and the logits of every prompt, in every batch size and order."""
    for size in BATCHES:
        for order in range(orders):
            click.echo(f"batch {size}, order {order + 1} of {orders}", err=True)
            members = np.random.default_rng(order).permutation(len(prompts)).tolist()
            for start in range(0, len(prompts), size):
                batch = members[start : start + size]
                yield from zip(batch, logits_in_batch(model, [prompts[index] for index in batch]), strict=True)


def cut(model: TorchModel, prompts: Prompts) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index and the logits of every prompt, in two chunks, and with its second half token by token."""
    for index, prompt in enumerate(prompts):
        middle = len(prompt) // 2
        yield index, logits_in_passes(model, prompt, (middle, len(prompt)))
        yield index, logits_in_passes(model, prompt, range(middle, len(prompt) + 1))


@click.command(help=__doc__)
@click.option("--model", "path", default="story", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompts", "n_prompts", default=50, show_default=True)
@click.option("--orders", default=5, show_default=True)
def main(path: str, device: str, dtype: str, threads: int, n_prompts: int, orders: int) -> None:
    """Entry point."""
    torch.set_num_threads(threads)
    print(f"{path}, {device}, {dtype}; {processor()}, {threads} threads; torch {torch.__version__}")
    prompts = None
    for mode in ("fast", "reproducible"):
        model = load_torch(path, device=device, dtype=dtype, mode=mode)
        prompts = prompts or make_prompts(model, n_prompts)
        single_logits = [logits_in_passes(model, prompt, (len(prompt),)) for prompt in prompts]
        for name, runs in (("batches", in_batches(model, prompts, orders)), ("chunks and decode", cut(model, prompts))):
            differences = Differences()
            for index, logits in runs:
                differences.add(single_logits[index], logits)
            print(f"{mode}, {name}: {differences}")


if __name__ == "__main__":
    main()

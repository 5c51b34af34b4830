"""Runs of a reproducible model in many companies, and the hashes of what came out."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")
LENGTHS = (1, 9, 23, 40, 3, 17, 30, 12, 5, 33, 8, 2, 26, 14, 20, 7)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Runner:
    """A model of a dtype and device, run pass by pass."""

    model: Any
    dtype: torch.dtype
    device: torch.device = CPU

    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, self.model.config.vocab_size, n).tolist() for n in LENGTHS]

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], side: str, n_extra_slots: int = 0) -> list[torch.Tensor]:
        """Logits of each prompt, run together, padded on one side, with `more` slots than are needed."""
        width = max(map(len, prompts))
        ids, positions = torch.zeros(len(prompts), width, dtype=torch.long), torch.full((len(prompts), width), -1)
        own = [slice(width - len(p), width) if side == "left" else slice(0, len(p)) for p in prompts]
        for row, (prompt, place) in enumerate(zip(prompts, own, strict=True)):
            ids[row, place], positions[row, place] = torch.tensor(prompt), torch.arange(len(prompt))
        cache = self._cache(len(prompts), width + n_extra_slots)
        place = cache.place(positions.to(self.device), ctx=width + n_extra_slots)
        logits = self.model(ids.to(self.device), place, cache)
        return [logits[row, place] for row, place in enumerate(own)]

    @torch.inference_mode()
    def passes(self, prompt: list[int], *sizes: int) -> torch.Tensor:
        """Logits of one prompt run in passes of these sizes, then token by token."""
        cache, made, done = self._cache(1, len(prompt)), [], 0
        for size in (*sizes, *[1] * (len(prompt) - sum(sizes))):
            new = torch.tensor([prompt[done : done + size]], device=self.device)
            positions = torch.arange(done, done + size, device=self.device)[None]
            done += size
            made.append(self.model(new, cache.place(positions, ctx=done, causal=True), cache)[0])
        return torch.cat(made)

    def _cache(self, batch: int, n_slots: int) -> Any:
        from llorch.pytorch.cache import Cache

        return Cache(self.model.config, batch=batch, n_slots=n_slots, dtype=self.dtype, device=self.device)


def sha256(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def runner(
    name: str = "micro-qwen2", dtype: torch.dtype = torch.float32, *, fixed: bool = True, own_kernels: bool = True
) -> Runner:
    from llorch.files import open_weights
    from llorch.pytorch.batch_invariant.reproducible import make_reproducible
    from llorch.pytorch.load import load_dense
    from llorch.runtime.builtin import builtin_path

    model = load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)
    if fixed:
        make_reproducible(model, own=own_kernels)
    return Runner(model, dtype)


def hashes_in_company(run: Runner) -> list[set[str]]:
    """For each prompt the hashes of its logits in batches of 1 to 16, in two orders, padded left and right."""
    prompts = run.prompts()
    found: list[set[str]] = [set() for _ in prompts]
    for size in (1, 2, 4, 8, 16):
        for order in (range(len(prompts)), np.random.default_rng(size).permutation(len(prompts))):
            for start in range(0, len(prompts), size):
                members = [int(i) for i in order[start : start + size]]
                side = "left" if start // size % 2 == 0 else "right"
                logits = run.batch([prompts[i] for i in members], side, n_extra_slots=size)
                for i, own in zip(members, logits, strict=True):
                    found[i].add(sha256(own))
    return found


def hashes_when_cut(run: Runner, prompt: list[int]) -> set[str]:
    """Hashes of the logits of a prompt run whole, in chunks, and with its last tokens one by one."""
    n = len(prompt)
    cuts = [(n,), (1, n - 1), (n // 2, n - n // 2), (n - 3,), (7, 1, n - 9)]
    return {sha256(run.passes(prompt, *sizes)) for sizes in cuts}


def verdict(dtype: str, name: str, *, own_kernels: bool = True) -> tuple[int, int, str]:
    """How many different logits the prompts got in company, and one long prompt that was cut: 16 and 1 when sound.

    And a hash of the latter.
    """
    run = runner(name, DTYPES[dtype], own_kernels=own_kernels)
    prompt = (run.prompts()[3] * 4)[:140]  # three blocks of keys, more rows than a wide tile
    alone = {sha256(run.batch([run.prompts()[1], prompt], "left")[1])}
    cut = alone | hashes_when_cut(run, prompt)
    return sum(map(len, hashes_in_company(run))), len(cut), max(cut)

"""Jobs put through a batch that they join and leave while others run, and what each of them makes alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.model import TorchModel
from llorch.pytorch.serving.batch import ContinuousBatch

Made = list[tuple[int, float]]  # ids and log probabilities
VARIED = (
    SamplingSettings(),
    SamplingSettings(temperature=1.0, seed=3),
    SamplingSettings(repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingSettings(temperature=0.8, top_k=9, top_p=0.9, presence_penalty=1.0, seed=5),
    SamplingSettings(temperature=1.2, min_p=0.05, seed=6),
)


def some_ids(model: TorchModel, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, n).tolist()


def job(ids: Sequence[int], n: int, settings: SamplingSettings | None = None, **fields: Any) -> Job:
    return Job(ids, n, settings or SamplingSettings(), frozenset(), **fields)


def varied_jobs(model: TorchModel, adapters: Sequence[str | None] = (None,)) -> list[Job]:
    """Prompts that begin alike and not, of lengths around whole pages, with settings of every kind."""
    common = some_ids(model, 140)
    lengths = [(0, 5, 6), (130, 3, 5), (129, 0, 3), (100, 24, 8), (128, 0, 3), (65, 0, 2)]
    prompts = [[*common[:begin], *some_ids(model, rest, at)] for at, (begin, rest, _) in enumerate(lengths)]
    return [
        job(prompts[at], n, VARIED[at % len(VARIED)], adapter=adapters[at % len(adapters)])
        for at, (_, _, n) in enumerate(lengths)
    ]


def run_together(
    batch: ContinuousBatch, jobs: Sequence[Job], *, joining: Mapping[int, int] | None = None
) -> list[Made]:
    """Let jobs join as soon as there is room, or not before some step, and leave when they have their tokens."""
    waiting, tickets = list(range(len(jobs))), dict[int, int]()
    made: list[Made] = [[] for _ in jobs]
    for n_steps in range(10_000):
        while waiting and (joining or {}).get(waiting[0], 0) <= n_steps:
            ticket = batch.join(jobs[waiting[0]])
            if ticket is None:
                break
            tickets[ticket] = waiting.pop(0)
        for ticket, one in batch.step().items():
            if isinstance(one, Exception):
                raise one
            at = tickets[ticket]
            made[at].append((one.id, one.logprob))
            if len(made[at]) == jobs[at].max_tokens:
                batch.leave(ticket)
                del tickets[ticket]
        if not waiting and not tickets:
            return made
    raise AssertionError(f"no end: {waiting=} {tickets=}")


def run_alone(model: TorchModel, single_job: Job) -> Made:
    how: dict[str, Any] = {
        "max_tokens": single_job.max_tokens,
        "settings": single_job.settings,
        "adapter": single_job.adapter,
    }
    return [(token.id, token.logprob) for token in model.generate(list(single_job.ids), ignore_eos=True, **how)]


def n_free(batch: ContinuousBatch) -> int:
    return batch._pages.n_available

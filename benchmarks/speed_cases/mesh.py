"""Case `mesh`: memory of a rank, messages of a step and seconds of LoRA training on a mesh, beside the formulas.

The measured model has random weights, in as many processes of one thread as a mesh has ranks, one mesh at a time.
Weights, adapters and moments count in bytes of their storages, every collective by the bytes it is given. On the CPU,
the peak is that of resident memory, less the memory before the model was made; on a GPU, torch's allocations.
"""

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from llorch.families.real_shapes import SHAPES

from .mesh_model import Job, Machine, memory, messages, step_time
from .rounds import Engine, Results

MEASURED = ((1, 1), (2, 1), (1, 2), (2, 2))  # dp x tp
PAPER = ((1, 1), (8, 1), (4, 2), (1, 8), (64, 1), (32, 2), (8, 8), (1024, 1), (512, 2), (256, 4), (128, 8))
GB, MB = 1e9, 1e6
RANK, FORMULA = Engine("rank 0"), Engine("formula", reference=True)


def run(
    results: Results, *, shape: str, dtype: str, rows: int, tokens: int, recomputed: bool, device: str, rounds: int,
    **_: object,
) -> None:  # fmt: skip
    """Measure all ranks of each mesh; a round is a step, and every rank has one thread."""
    import torch

    from llorch.pytorch.distributed.launch import on_ranks

    from .mesh_ranks import measured

    job = Job(SHAPES[shape], 1, 1, rows, tokens, width={"bfloat16": 2, "float32": 4}[dtype], recomputed=recomputed)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"  # glibc returns large arrays at once, so peaks are exact
    n_devices = torch.cuda.device_count() if device == "cuda" else 4
    for dp, tp in MEASURED:
        results.model = f"dp x tp = {dp} x {tp}"
        if dp * tp > n_devices:
            results.skip("", f"torch {torch.__version__} finds {n_devices} CUDA devices")
            continue
        click.echo(results.model, err=True)
        mesh_job = replace(job, dp=dp, tp=tp)
        add(results, mesh_job, on_ranks(dp * tp, measured, mesh_job, device, rounds, True))


def add(results: Results, job: Job, ranks: Sequence[Any]) -> None:
    """Add the rows of a mesh: what its rank 0 needs and sends, and the seconds of its slowest rank."""
    expected, actual = memory(job), ranks[0]
    sent, counted = volumes(job), sum_messages(actual.messages)
    between_steps = {"kept between steps": (expected.between_steps / MB, sum(actual.kept.values()) / MB)}
    sizes = between_steps | {
        f"messages of a step: {' '.join(key)}": (sent[key] / MB, counted[key] / MB)
        for key in sorted(sent.keys() | counted.keys())
    }
    tensors = {"all tensors at the peak": (expected.peak / GB, actual.held / GB)}
    for unit, pairs in (("MB", sizes), ("GB", tensors)):
        samples = {
            engine.title: {what: [(pair[index], 0.0)] for what, pair in pairs.items()}
            for index, engine in enumerate((FORMULA, RANK))
        }
        results.add((RANK, FORMULA), samples, dict.fromkeys(pairs, unit))
    slowest = [(max(seconds), 0.0) for seconds in zip(*(cost.seconds for cost in ranks), strict=True)]
    cpu = statistics.median(sum(seconds) for seconds in zip(*(cost.cpu for cost in ranks), strict=True))
    rest = {"resident memory beside them": [((actual.peak - actual.held) / GB, 0.0)], "step": slowest}
    units = {"resident memory beside them": "GB", "step": "s", "processor time of all ranks": "s"}
    results.add([RANK], {RANK.title: rest | {"processor time of all ranks": [(cpu, 0.0)]}}, units)


def volumes(job: Job) -> Counter[tuple[str, str]]:
    """Sum the bytes of a step's messages by axis and kind, as the formulas say."""
    total: Counter[tuple[str, str]] = Counter()
    for message in messages(job):
        total[message.axis, message.kind] += message.volume
    return total


def sum_messages(counts: dict[tuple[str, str, int], int]) -> Counter[tuple[str, str]]:
    """Sum counted bytes by axis and kind."""
    total: Counter[tuple[str, str]] = Counter()
    for (axis, kind, size), count in counts.items():
        total[axis, kind] += size * count
    return total


def paper() -> str:
    """Write 8B in bfloat16 on paper, as the table in checkpoints/mesh/README.md."""
    heads = "| dp x tp | GPUs | GB of a rank | GB sent: tp | dp | s: computing | tp | dp | overlapped | tokens/s |"
    jobs = [Job(SHAPES["llama-3-8b"], dp, tp, rows=dp, tokens=4096, r=16, recomputed=True) for dp, tp in PAPER]
    return "\n".join([
        "A MODEL, NOT MEASURED: 8B in bfloat16, r=16 on all matrices, 4096 tokens on each rank of dp; a step with",
        f"--gradient-checkpointing (in brackets memory without), from {Machine()}",
        heads, "|---" * 10 + "|", *map(_row, jobs),
    ])  # fmt: skip


def _row(job: Job) -> str:
    tp, dp = (
        sum(message.moved(n_ranks) for message in messages(job) if message.axis == axis) / GB
        for axis, n_ranks in (("tp", job.tp), ("dp", job.dp))
    )
    without, time = memory(replace(job, recomputed=False)).peak / GB, step_time(job, Machine())
    cells = [
        f"{job.dp} x {job.tp}", f"{job.dp * job.tp}", f"{memory(job).peak / GB:.1f} ({without:.1f})", f"{tp:.1f}",
        f"{dp:.1f}", f"{time.compute:.3f}", f"{time.tp:.3f}", f"{time.dp:.3f}", f"{time.overlapped:.3f}",
        f"{job.dp * job.tokens / time.overlapped:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"

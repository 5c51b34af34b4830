"""Cost of LoRA training on a mesh: memory of a rank, messages of a step, seconds, predicted and measured.

    python benchmarks/mesh.py                       everything, on the processors of this machine
    python benchmarks/mesh.py --part model          what needs no measurement: 8B, on paper to 1024 GPUs
    python benchmarks/mesh.py --device cuda         the same measurements on the GPUs of this machine

The measured model has the Qwen2.5-0.5B shape and random weights, in as many processes as a mesh has ranks, one mesh
at a time. Weights, adapters and moments count in bytes of their storages; every collective by the bytes it is given. On
the CPU, the peak is that of resident memory, less the memory before the model was made; on a GPU, torch's allocations.
A part that cannot run says NOT RUN and why, and the command ends with 3.
"""

import json
import os
import statistics
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from mesh_model import Job, Machine, StepTime, memory, messages, step_time
from rounds import processor

from llorch.families.real_shapes import SHAPES

PARTS = ("memory", "messages", "seconds", "model")
MEASURED = ((1, 1), (2, 1), (1, 2), (2, 2))  # dp x tp
PAPER = ((1, 1), (8, 1), (4, 2), (1, 8), (64, 1), (32, 2), (8, 8), (1024, 1), (512, 2), (256, 4), (128, 8))
GB, MB = 1e9, 1e6


@click.command(help=__doc__)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, help="All, if none is given.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-0.5b", show_default=True)
@click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16", show_default=True)
@click.option("--rows", default=4, show_default=True, help="Of a forward pass, on all ranks together.")
@click.option("--tokens", default=64, show_default=True, help="In each row.")
@click.option("--steps", default=3, show_default=True, help="Measured after one that warms up.")
@click.option("--gradient-checkpointing", "recomputed", is_flag=True)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all figures here.")
def main(
    parts: tuple[str, ...], shape: str, dtype: str, rows: int, tokens: int, steps: int, recomputed: bool, device: str,
    output: Path | None,
) -> None:  # fmt: skip
    """Entry point."""
    width = {"bfloat16": 2, "float32": 4}[dtype]
    job = Job(SHAPES[shape], 1, 1, rows, tokens, width=width, recomputed=recomputed)
    record: dict[str, Any] = {"machine": processor(), "shape": shape, "dtype": dtype, "rows": rows, "tokens": tokens}
    print(
        f"{processor()}, {os.cpu_count()} cores; {shape}, {dtype}, {rows} x {tokens} tokens, r={job.r} on all matrices"
    )
    complete = True
    if measurements := [part for part in parts if part != "model"]:
        costs, complete = measured(job, device, steps, "memory" in parts)
        record["measured"] = {name: [_cost_record(cost) for cost in ranks] for name, (_, ranks) in costs.items()}
        for part in measurements:
            {"memory": show_memory, "messages": show_messages, "seconds": show_seconds}[part](costs)
    if "model" in parts:
        record["model"] = show_model()
    if output is not None:
        output.write_text(json.dumps(record, indent=1))
    sys.exit(0 if complete else 3)


def _cost_record(cost: Any) -> dict[str, Any]:
    return asdict(cost) | {"messages": [[*key, count] for key, count in sorted(cost.messages.items())]}


def measured(job: Job, device: str, steps: int, weighed: bool) -> tuple[dict[str, tuple[Job, Any]], bool]:
    """Measure all ranks of each mesh; return the costs by mesh, and True if all meshes ran."""
    import torch
    from mesh_ranks import measured as measure_rank

    from llorch.pytorch.distributed.launch import on_ranks

    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"  # glibc returns large arrays at once, so peaks are exact
    n_devices = torch.cuda.device_count() if device == "cuda" else 4
    costs: dict[str, tuple[Job, Any]] = {}
    for dp, tp in MEASURED:
        if dp * tp > n_devices:
            print(f"NOT RUN: dp={dp} tp={tp}: torch {torch.__version__} finds {n_devices} CUDA devices")
            continue
        click.echo(f"dp={dp} tp={tp}", err=True)
        mesh_job = replace(job, dp=dp, tp=tp)
        costs[f"{dp}x{tp}"] = mesh_job, on_ranks(dp * tp, measure_rank, mesh_job, device, steps, weighed)
    return costs, len(costs) == len(MEASURED)


def show_memory(costs: dict[str, tuple[Job, Any]]) -> None:
    """Print bytes of rank 0: kept between steps, all tensors at the peak, and resident memory of the process."""
    print("\nmemory of rank 0, GB: predicted, measured")
    for name, (job, ranks) in costs.items():
        expected, actual = memory(job), ranks[0]
        kept_bytes, peak = sum(actual.kept.values()), actual.peak / GB
        print(
            f"dp x tp = {name}: kept {expected.between_steps / GB:.6f} {kept_bytes / GB:.6f}; tensors at the peak"
            f" {expected.peak / GB:.3f}"
            f" {actual.held / GB:.3f} ({actual.held / expected.peak - 1:+.1%}); resident {peak:.3f},"
            f" {peak - actual.held / GB:.3f} more"
        )


def show_messages(costs: dict[str, tuple[Job, Any]]) -> None:
    """Print the bytes of the collectives that a rank calls in a step."""
    print("\nmessages of a step, MB of rank 0; what the formulas say, and what was counted")
    for name, (job, ranks) in costs.items():
        expected, actual = _volumes(job), _sum_messages(ranks[0].messages)
        for key in sorted(expected.keys() | actual.keys()):
            verdict = "equal" if expected[key] == actual[key] else "DIFFERENT"
            print(f"dp x tp = {name} {' '.join(key):<20} {expected[key] / MB:12.6f} {actual[key] / MB:12.6f} {verdict}")


def _volumes(job: Job) -> Counter[tuple[str, str]]:
    volumes: Counter[tuple[str, str]] = Counter()
    for message in messages(job):
        volumes[message.axis, message.kind] += message.volume
    return volumes


def _sum_messages(counts: dict[tuple[str, str, int], int]) -> Counter[tuple[str, str]]:
    volumes: Counter[tuple[str, str]] = Counter()
    for (axis, kind, size), count in counts.items():
        volumes[axis, kind] += size * count
    return volumes


def show_seconds(costs: dict[str, tuple[Job, Any]]) -> None:
    """Print medians of the slowest rank; the processes share the processor, so more of them are no faster."""
    print("\nseconds of a step, median and range; of the processor, of all ranks; all processes share this machine")
    for name, (_, ranks) in costs.items():
        slowest = [max(times) for times in zip(*(cost.seconds for cost in ranks), strict=True)]
        cpu = statistics.median(sum(times) for times in zip(*(cost.cpu for cost in ranks), strict=True))
        median = statistics.median(slowest)
        print(f"dp x tp = {name} {median:8.3f} ({min(slowest):.3f}-{max(slowest):.3f}), processor {cpu:.3f}")


def show_model() -> dict[str, Any]:
    """Print 8B in bfloat16 on paper, as rows of a table in checkpoints/mesh/README.md."""
    machine = Machine()
    print("\nA MODEL, NOT MEASURED: 8B in bfloat16, r=16 on all matrices, 4096 tokens on each rank of dp; a step with")
    print(f"--gradient-checkpointing (in brackets memory without), from {machine}")
    print("| dp x tp | GPUs | GB of a rank | GB sent: tp | dp | s: computing | tp | dp | overlapped | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    meshes = {}
    for dp, tp in PAPER:
        job = Job(SHAPES["llama-3-8b"], dp, tp, rows=dp, tokens=4096, r=16, recomputed=True)
        time = step_time(job, machine)
        print(_row(job, time))
        meshes[f"{dp}x{tp}"] = {"memory": asdict(memory(job)), "seconds": asdict(time)}
    return {"machine": asdict(machine), "meshes": meshes}


def _row(job: Job, time: StepTime) -> str:
    tp, dp = (
        sum(message.moved(n_ranks) for message in messages(job) if message.axis == axis) / GB
        for axis, n_ranks in (("tp", job.tp), ("dp", job.dp))
    )
    without = memory(replace(job, recomputed=False)).peak / GB
    cells = [
        f"{job.dp} x {job.tp}", f"{job.dp * job.tp}", f"{memory(job).peak / GB:.1f} ({without:.1f})", f"{tp:.1f}",
        f"{dp:.1f}", f"{time.compute:.3f}", f"{time.tp:.3f}", f"{time.dp:.3f}", f"{time.overlapped:.3f}",
        f"{job.dp * job.tokens / time.overlapped:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

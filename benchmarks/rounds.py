"""Speeds of several engines, measured in turn, and how much of the machine other programs took meanwhile.

Rounds of all engines are interleaved, so that a drift of the machine meets each alike. Threads that wait for each other
by spinning, as OpenBLAS's and llama.cpp's do, become many times slower when another program wants a core. So a timing
during which others had more than `OTHERS` of the processors is left out, and the number of quiet ones is printed.
"""

import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from engines import Engine

OTHERS = 0.05  # share of the processors
Samples = dict[str, list[tuple[float, float]]]  # what is timed: (tokens/s, share of others) of each round


def set_threads() -> None:
    """Give NumPy the `--threads` of the command line, 2 without; only before it is imported."""
    wanted = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "2"
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, wanted)


def interleave(
    makers: Mapping[str, Callable[[], Engine]], prompts: Sequence[int], n_decode: int, rounds: int
) -> dict[str, Samples]:
    """Time every engine in every round, after one that warms up; an engine that does not survive has no samples.

    Prompts are lengths to prefill; decoding follows the first.
    """
    from llorch.runtime.errors import EngineDied

    samples: dict[str, Samples] = {name: {} for name in makers}
    engines: dict[str, Any] = {}
    for i in range(rounds + 1):
        for name in list(samples):
            click.echo(f"round {i} of {rounds}: {name}", err=True)
            try:
                engine = engines[name] = engines.get(name) or makers[name]()
                measure = getattr(engine, "one_round", partial(one_round, engine))
                measured = measure(prompts, n_decode)
            except EngineDied as error:
                click.echo(f"NOT RUN: {error}")
                del samples[name]
                continue
            for what, sample in measured if i > 0 else ():
                samples[name].setdefault(what, []).append(sample)
    return samples


def finish(samples: Mapping[str, Samples], wanted: Collection[str]) -> None:
    """End with 3 where an engine was not run."""
    if samples.keys() != set(wanted):
        sys.exit(3)


def one_round(engine: Engine, prompts: Sequence[int], n_decode: int) -> list[tuple[str, tuple[float, float]]]:
    """Time an engine that is loaded here: what was timed, with tokens per second and the share of others."""

    def decode() -> None:
        for token_id in range(2000, 2000 + n_decode):
            engine.decode(token_id)

    made = []
    for n in prompts:
        ids = list(range(1000, 1000 + n))
        made.append((f"prefill {n}", _timed(lambda ids=ids: engine.prefill(ids), n)))
        if n == prompts[0]:
            made.append(("decode", _timed(decode, n_decode)))
    return made


def _timed(action: Callable[[], None], n_tokens: int) -> tuple[float, float]:
    """Measure tokens per second, and the share of the processors that other programs used meanwhile."""
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    others = busy_seconds() - busy - (time.process_time() - own)
    return n_tokens / seconds, max(0.0, others) / seconds / (os.cpu_count() or 1)


def busy_seconds() -> float:
    """Read the seconds that all processors have worked since the start of the system; 0 if it does not say."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def quiet(samples: Sequence[tuple[float, float]]) -> list[float]:
    """Keep the speeds measured while other programs were idle, or all speeds if they never were."""
    kept = [speed for speed, others in samples if others <= OTHERS]
    return kept or [speed for speed, _ in samples]


def report(samples: Mapping[str, Samples], ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Print medians, ranges, rounds kept, and the ratio of each of llorch's speeds to each of the other engines'."""
    for name, of_engine in samples.items():
        for what, measured in of_engine.items():
            speeds = quiet(measured)
            spread = f"{statistics.median(speeds):8.1f} ({min(speeds):.1f}-{max(speeds):.1f}) tokens/s"
            n_quiet = sum(others <= OTHERS for _, others in measured)
            print(f"{name:<24} {what:<12} {spread:<34} {n_quiet} of {len(measured)} rounds quiet")
    for mine in ours:
        for other in theirs:
            if other not in samples:
                continue
            of_median = [f"{what} {_ratio(samples, mine, other, what):.2f}" for what in samples[mine]]
            print(f"{mine} / {other}: {', '.join(of_median)}")


def _ratio(samples: Mapping[str, Samples], mine: str, other: str, what: str) -> float:
    """Return the median of the ratios of single rounds, so that a drift of the machine meets both speeds."""
    pairs = list(zip(samples[mine][what], samples[other][what], strict=False))
    both = [(one[0], two[0]) for one, two in pairs if max(one[1], two[1]) <= OTHERS]
    return statistics.median(one / two for one, two in both or [(one[0], two[0]) for one, two in pairs])


def machine() -> str:
    """Describe the processor, its cores, and the kernels that NumPy's OpenBLAS uses."""
    return f"machine: {processor()}, {os.cpu_count()} cores; OpenBLAS kernels: {openblas_kernels()}"


def processor() -> str:
    """Ask the system for the name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def openblas_kernels() -> str:
    """Name the processor for which NumPy's OpenBLAS chose its kernels; `OPENBLAS_CORETYPE` overrides it."""
    import numpy as np

    for file in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        name = getattr(ctypes.CDLL(str(file)), "scipy_openblas_get_corename64_", None)
        if name is not None:
            name.restype = ctypes.c_char_p
            return name().decode()
    return "unknown"

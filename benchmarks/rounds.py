"""Interleaved speeds of several engines, and the share of the machine that other programs used at the same time.

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

OTHERS = 0.05  # largest share of the processors in a quiet round
Samples = dict[str, list[tuple[float, float]]]  # timed part: (tokens/s, share of other programs) of each round


def set_threads() -> None:
    """Set the number of NumPy's threads from `--threads` on the command line, else 2; call before NumPy is imported."""
    n_threads = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "2"
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, n_threads)


def interleave(
    makers: Mapping[str, Callable[[], Engine]], prompts: Sequence[int], n_decode: int, rounds: int
) -> dict[str, Samples]:
    """Time every engine in every round, after a warm-up round; an engine that dies has no samples.

    Prompts are lengths to prefill; decoding follows the first.
    """
    from llorch.runtime.errors import EngineDied

    samples: dict[str, Samples] = {name: {} for name in makers}
    engines: dict[str, Any] = {}
    for round_number in range(rounds + 1):
        for name in list(samples):
            click.echo(f"round {round_number} of {rounds}: {name}", err=True)
            try:
                engine = engines[name] = engines.get(name) or makers[name]()
                measure = getattr(engine, "one_round", partial(one_round, engine))
                measured = measure(prompts, n_decode)
            except EngineDied as error:
                click.echo(f"NOT RUN: {error}")
                del samples[name]
                continue
            for part, sample in measured if round_number > 0 else ():
                samples[name].setdefault(part, []).append(sample)
    return samples


def finish(samples: Mapping[str, Samples], engine_names: Collection[str]) -> None:
    """Exit with 3 if an engine did not run."""
    if samples.keys() != set(engine_names):
        sys.exit(3)


def one_round(engine: Engine, prompts: Sequence[int], n_decode: int) -> list[tuple[str, tuple[float, float]]]:
    """Time an engine in this process: timed parts, with tokens per second and the share of other programs."""

    def decode() -> None:
        for token_id in range(2000, 2000 + n_decode):
            engine.decode(token_id)

    samples = []
    for n_tokens in prompts:
        ids = list(range(1000, 1000 + n_tokens))
        samples.append((f"prefill {n_tokens}", _time_action(lambda ids=ids: engine.prefill(ids), n_tokens)))
        if n_tokens == prompts[0]:
            samples.append(("decode", _time_action(decode, n_decode)))
    return samples


def _time_action(action: Callable[[], None], n_tokens: int) -> tuple[float, float]:
    """Measure tokens per second, and the share of the processors that other programs used meanwhile."""
    busy, cpu_start, start = busy_seconds(), time.process_time(), time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    other_seconds = busy_seconds() - busy - (time.process_time() - cpu_start)
    return n_tokens / seconds, max(0.0, other_seconds) / seconds / (os.cpu_count() or 1)


def busy_seconds() -> float:
    """Read the seconds that all processors have worked since the system's start; 0 if it does not report them."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def quiet(samples: Sequence[tuple[float, float]]) -> list[float]:
    """Keep the speeds measured while other programs were idle, or all speeds if they never were."""
    quiet_speeds = [speed for speed, other_share in samples if other_share <= OTHERS]
    return quiet_speeds or [speed for speed, _ in samples]


def report(samples: Mapping[str, Samples], llorch_names: Sequence[str], engine_names: Sequence[str]) -> None:
    """Print medians, ranges, rounds kept, and the ratio of each of llorch's speeds to each of the other engines'."""
    for name, engine_samples in samples.items():
        for part, measured in engine_samples.items():
            speeds = quiet(measured)
            spread = f"{statistics.median(speeds):8.1f} ({min(speeds):.1f}-{max(speeds):.1f}) tokens/s"
            n_quiet = sum(other_share <= OTHERS for _, other_share in measured)
            print(f"{name:<24} {part:<12} {spread:<34} {n_quiet} of {len(measured)} rounds quiet")
    for llorch_name in llorch_names:
        for engine_name in engine_names:
            if engine_name not in samples:
                continue
            ratios = [f"{part} {_ratio(samples, llorch_name, engine_name, part):.2f}" for part in samples[llorch_name]]
            print(f"{llorch_name} / {engine_name}: {', '.join(ratios)}")


def _ratio(samples: Mapping[str, Samples], llorch: str, engine: str, part: str) -> float:
    """Return the median of the ratios of single rounds, so that a drift of the machine meets both speeds."""
    pairs = list(zip(samples[llorch][part], samples[engine][part], strict=False))
    both_quiet = [(a[0], b[0]) for a, b in pairs if max(a[1], b[1]) <= OTHERS]
    return statistics.median(a / b for a, b in both_quiet or [(a[0], b[0]) for a, b in pairs])


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

"""Speed of commands while another program keeps one core busy: with llorch's default threads, and with two.

    python benchmarks/busy.py [--rounds 3] [--run | --verify | --train]

Two cores. Each command is timed alone with one thread, and beside the busy program with the default, with one and
with two threads; interleaved. The goal is the second over the first, at most 1.3.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rounds import machine

TRAIN = ("lora", "train", "story", "--data", "pirate", "--steps", "20", "-o")
COMMANDS = {"run": ("run", "story", "Once", "-n", "200"), "verify": ("verify", "story"), "train": TRAIN}
CASES = {  # name: busy, options
    "alone, --threads 1": (False, ("--threads", "1")),
    "busy, default": (True, ()),
    "busy, --threads 1": (True, ("--threads", "1")),
    "busy, --threads 2": (True, ("--threads", "2")),
}
GOAL = 1.3


@contextmanager
def busy() -> Iterator[None]:
    """Run another program that never waits, while the body runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(command: tuple[str, ...], options: tuple[str, ...], *, is_busy: bool) -> float:
    """Time llorch as a user runs it, on two cores."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder, busy() if is_busy else nullcontext():
        output = (f"{folder}/run",) if command[-1] == "-o" else ()
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "llorch", *command, *output, *options],
            check=True, capture_output=True, env=environment,
        )  # fmt: skip
        return time.perf_counter() - start


def main() -> int:
    """Print the times; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    for name in COMMANDS:
        parser.add_argument(f"--{name}", action="store_true")
    arguments = vars(parser.parse_args())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    print(machine(), flush=True)
    worst = 0.0
    for name in [name for name in COMMANDS if arguments[name]] or COMMANDS:
        times: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(arguments["rounds"]):
            for case, (is_busy, options) in CASES.items():
                times[case].append(seconds(COMMANDS[name], options, is_busy=is_busy))
        baseline, *medians = (statistics.median(samples) for samples in times.values())
        worst = max(worst, medians[0] / baseline)
        print(f"{name}: {baseline:.1f} s alone with one thread", flush=True)
        for case, median in zip(list(CASES)[1:], medians, strict=True):
            print(f"    {case}: {median:.1f} s, {median / baseline:.2f} times", flush=True)
    print(f"worst default {worst:.2f}, goal {GOAL}: {'met' if worst <= GOAL else 'MISSED'}")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())

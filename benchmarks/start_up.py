"""Time and memory of whole processes: importing, verifying everything built in, opening a real vocabulary.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --vocabulary DIR/ggml-vocab-llama-bpe.gguf   (tests/support/fetch_vocabularies.py)

Medians of some runs after one that is not counted; memory is the peak of the process.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from rounds import processor

OPEN = (
    "import sys; from llorch.files.gguf import open_gguf; file = open_gguf(sys.argv[1]); "
    "print(sum(len(token) for token in file.metadata['tokenizer.ggml.tokens']))"
)


@click.command(help=__doc__)
@click.option("--vocabulary", type=click.Path(exists=True, path_type=Path), help="A GGUF file with a vocabulary.")
@click.option("--runs", default=5, show_default=True)
def main(vocabulary: Path | None, runs: int) -> None:
    """Entry point."""
    commands = {
        "import llorch": [sys.executable, "-c", "import llorch"],
        "import llorch, load a model": [sys.executable, "-c", "import llorch; llorch.load('story')"],
        "llorch --help": [sys.executable, "-m", "llorch", "--help"],
        "llorch verify": [sys.executable, "-m", "llorch", "verify"],
    }
    if vocabulary is not None:
        name = f"header and tokens of {vocabulary.name}, {vocabulary.stat().st_size / 1e6:.1f} MB"
        commands[name] = [sys.executable, "-c", OPEN, str(vocabulary)]
    print(f"machine: {processor()}, {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    for name, command in commands.items():
        runs_measured = [run(command) for _ in range(runs + 1)][1:]
        seconds, peaks = zip(*runs_measured, strict=True)
        print(f"{statistics.median(seconds):6.2f} s  {statistics.median(peaks) / 1e6:5.0f} MB  {name}")


def run(command: list[str]) -> tuple[float, float]:
    """Measure the seconds and peak bytes of one process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ChildProcessError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()

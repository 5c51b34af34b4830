"""Cost of mode `reproducible` against mode `fast`, interleaved: passes of the modules alone.

    python benchmarks/reproducible_speed.py                          Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/reproducible_speed.py --layers 4 --what "Q8_0 bfloat16"
    python benchmarks/reproducible_speed.py --model story --what float32 --what bfloat16

Each round runs every cell in both modes, so that what other programs take meets each alike. A cell is the median of the
reproducible times over the median of the fast ones.
"""

import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import cast

import click
from random_models import SHAPES, random_model
from rounds import processor, set_threads

BATCHES, LENGTH = (1, 4, 16), 64
WHAT = ("float32", "bfloat16", "Q8_0 float32", "Q8_0 bfloat16", "Q4_0 float32", "Q4_0 bfloat16")
Cell = tuple[str, int]  # timed part, number of sequences


class Runner:
    """A model in one mode."""

    def __init__(self, path: Path | str, mode: str, dtype: str, residency: str) -> None:
        """Load it."""
        from llorch.pytorch.model import load_torch

        self.model = load_torch(path, mode=mode, dtype=dtype, residency=residency)  # type: ignore[arg-type]

    def seconds(self, steps: int) -> dict[Cell, float]:
        """Time every cell: a prompt of each sequence, and a step of decoding after it."""
        import torch

        seconds: dict[Cell, float] = {}
        for batch in BATCHES:
            cache, index = self.model.new_cache(batch, LENGTH + steps), torch.arange(LENGTH + steps).expand(batch, -1)
            clock = [time.perf_counter()]
            for start, end in ((0, LENGTH), *((LENGTH + n, LENGTH + n + 1) for n in range(steps))):
                slots, rows = cache.place(index[:, start:end], ctx=end), torch.full((batch,), end - start - 1)
                with torch.inference_mode():
                    self.model.module(index[:, start:end] % 50, slots, cache, rows=rows)
                clock.append(time.perf_counter())
            seconds["prefill", batch], *decode = [b - a for a, b in pairwise(clock)]
            seconds["decode", batch] = statistics.median(decode)
        return seconds


@click.command(help=__doc__)
@click.option("--model", help="A built-in model or a GGUF file, as it is.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--what", "kinds", multiple=True, type=click.Choice(WHAT), default=WHAT)
@click.option("--threads", default=2, show_default=True)
@click.option("--steps", default=8, show_default=True, help="Of decoding, per round.")
@click.option("--rounds", default=5, show_default=True)
def main(
    model: str | None, shape: str, layers: int, kinds: tuple[str, ...], threads: int, steps: int, rounds: int
) -> None:
    """Entry point."""
    import torch

    torch.set_num_threads(threads)
    print(
        f"{model or shape}, {processor()}, {threads} threads, torch {torch.__version__}: ms fast, reproducible, ratio"
    )
    cells = [(part, batch) for part in ("prefill", "decode") for batch in BATCHES]
    print(f"\n| | {' | '.join(f'{part} {batch}' for part, batch in cells)} |\n|---|{'---|' * len(cells)}")
    with nullcontext() if model else random_model(SHAPES[shape] | {"num_hidden_layers": layers}) as folder:
        for kind in kinds:
            *packed, dtype = kind.split()
            path = model or _write_file(cast(Path, folder) / "model.gguf", packed)
            runs = _interleaved(path, dtype, "packed" if packed else "decoded", steps, rounds)
            pairs = [[statistics.median(run[cell] for run in runs[mode]) * 1e3 for mode in runs] for cell in cells]
            print(f"| {kind} | {' | '.join(f'{a:.1f} {b:.1f} **{b / a:.2f}**' for a, b in pairs)} |", flush=True)


def _interleaved(
    path: Path | str, dtype: str, residency: str, steps: int, rounds: int
) -> dict[str, list[dict[Cell, float]]]:
    runners = {mode: Runner(path, mode, dtype, residency) for mode in ("fast", "reproducible")}
    samples: dict[str, list[dict[Cell, float]]] = {mode: [] for mode in runners}
    for number in range(rounds + 1):
        for mode, runner in runners.items():
            click.echo(f"round {number} of {rounds}: {mode}", err=True)
            seconds = runner.seconds(steps)
            if number > 0:
                samples[mode].append(seconds)
    return samples


def _write_file(float_file: Path, block_type: list[str]) -> Path:
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    if not block_type:
        return float_file
    path = float_file.with_name(f"{block_type[0]}.gguf")
    if not path.exists():
        convert(float_file, path, ggml_type=GGMLType[block_type[0]])
    return path


if __name__ == "__main__":
    set_threads()
    main()

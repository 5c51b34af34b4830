"""Prefill and decode speed of three engines on the same float32 weights, cores and prompts, measured in turn.

    python benchmarks/forward_speed.py                     Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/forward_speed.py --shape hybrid      Qwen3.5-0.8B: delta nets, every fourth layer attention
    python benchmarks/forward_speed.py --shape experts     Qwen3-MoE's kind, 4 of 32 experts; 8 GB in float32
    python benchmarks/forward_speed.py --layers 4          a shallower model, for a quick look

Medians are printed. The floor of decode is one reading of all weights: the last line says how much memory bandwidth
each decode speed amounts to.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from engines import Engine, Llorch, foreign
from random_models import SHAPES, random_model
from rounds import finish, interleave, machine, quiet, report, set_threads

ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "llorch": lambda folder, n_threads: Llorch(folder / "model.gguf"),
    "llama.cpp": lambda folder, n_threads: foreign("LlamaCpp", folder / "model.gguf", n_threads),
    "transformers": lambda folder, n_threads: foreign("Transformers", folder, n_threads),
}


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "prompts", multiple=True, default=[128, 512], show_default=True, help="Tokens of a prefill.")
@click.option("--decode", "n_decode", default=24, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--engine", "names", multiple=True, type=click.Choice(list(ENGINES)), default=list(ENGINES))
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    shape: str,
    layers: int,
    threads: int,
    prompts: tuple[int, ...],
    n_decode: int,
    rounds: int,
    names: tuple[str, ...],
    output: Path | None,
) -> None:
    """Entry point."""
    with random_model(SHAPES[shape] | {"num_hidden_layers": layers}) as folder:
        n_bytes = (folder / "model.gguf").stat().st_size
        engines = {name: partial(ENGINES[name], folder, threads) for name in names}
        samples = interleave(engines, prompts, n_decode, rounds)
    print(f"{machine()}; {threads} threads; model file {n_bytes / 1e9:.2f} GB")
    report(samples, [name for name in names if name == "llorch"], [name for name in names if name != "llorch"])
    if shape != "experts":  # a token reads only some of the experts
        speeds = {name: statistics.median(quiet(timed["decode"])) * n_bytes / 1e9 for name, timed in samples.items()}
        print("decode reads " + ", ".join(f"{name} {speed:.0f} GB/s" for name, speed in speeds.items()))
    if output is not None:
        output.write_text(json.dumps({"machine": machine(), "threads": threads, "samples": samples}))
    finish(samples, names)


if __name__ == "__main__":
    set_threads()
    main()

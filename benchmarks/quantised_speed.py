"""Prefill and decode speed of quantised files, ours against llama.cpp on the same file, measured in turn.

    python benchmarks/quantised_speed.py                   Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/quantised_speed.py --type Q4_0 --layers 4
    python benchmarks/quantised_speed.py --no-extra-buffers    where llama.cpp ends by SIGSEGV, as it may with AMX

llama.cpp makes the files. Ours runs them with matrices decoded at load and with matrices decoded at every use, each in
plain float32 (exact) and with activations rounded as llama.cpp rounds them (ggml).
"""

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from engines import Engine, Llorch, foreign
from random_models import SHAPES, forget, random_model
from rounds import Samples, finish, interleave, machine, report, set_threads

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.cpp's llama_ftype


@click.command(help=__doc__)
@click.option("--type", "types", multiple=True, type=click.Choice(list(FILE_TYPES)), default=list(FILE_TYPES))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "prompts", multiple=True, default=[128], show_default=True, help="Tokens of a prefill.")
@click.option("--decode", "n_decode", default=4, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--extra-buffers/--no-extra-buffers", default=True, help="Layouts that llama.cpp makes for a processor.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    types: tuple[str, ...],
    shape: str,
    layers: int,
    threads: int,
    prompts: tuple[int, ...],
    n_decode: int,
    rounds: int,
    extra_buffers: bool,
    output: Path | None,
) -> None:
    """Entry point."""
    samples: dict[str, dict[str, Samples]] = {}
    print(f"{machine()}; {threads} threads")
    with random_model(SHAPES[shape] | {"num_hidden_layers": layers}) as folder:
        for name in types:
            path = quantised(folder / "model.gguf", name, threads)
            engines = engines_of(path, threads, extra_buffers)
            samples[name] = interleave(engines, prompts, n_decode, rounds)
            print(f"{name}, {path.stat().st_size / 1e9:.2f} GB")
            report(samples[name], [engine for engine in engines if engine != "llama.cpp"], ["llama.cpp"])
            path.unlink()
    if output is not None:
        output.write_text(json.dumps({"machine": machine(), "threads": threads, "samples": samples}))
    for name in types:
        finish(samples[name], engines_of(Path(name), threads, extra_buffers))


def engines_of(path: Path, n_threads: int, extra_buffers: bool) -> dict[str, Callable[[], Engine]]:
    """Name the loaders of llama.cpp, and of llorch in both arithmetics and both residencies."""
    from llorch.numerics import EXACT, GGML

    ours = {
        f"llorch {numerics} {residency}": partial(Llorch, path, numerics, residency)
        for numerics in (EXACT, GGML)
        for residency in ("decoded", "packed")
    }
    return {"llama.cpp": lambda: foreign("LlamaCpp", path, n_threads, extra_buffers), **ours}


def quantised(source: Path, name: str, n_threads: int) -> Path:
    """Have llama.cpp write a quantised copy; ends with 3 where it does not survive that."""
    from llorch.engines.process import in_child
    from llorch.errors import EngineDied

    click.echo(f"quantising to {name}", err=True)
    path = source.with_name(f"{name}.gguf")
    try:
        in_child("llama.cpp", source, "quantised_speed:quantise", source, path, FILE_TYPES[name], n_threads)
    except EngineDied as error:
        click.echo(f"NOT RUN: {error}")
        sys.exit(3)
    forget(path)
    return path


def quantise(source: Path, path: Path, file_type: int, n_threads: int) -> None:
    """Write a quantised copy in this process."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = file_type, n_threads
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.pointer(parameters))
    if status:
        raise ChildProcessError(f"llama.cpp ended with {status} when it was to write {path.name}")


if __name__ == "__main__":
    set_threads()
    main()

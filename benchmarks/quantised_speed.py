"""Prefill and decode speed of quantised files, ours against llama.cpp on the same file, measured in turn.

    python benchmarks/quantised_speed.py                   Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/quantised_speed.py --type Q4_0 --layers 4

llama.cpp makes the files. Ours runs them with matrices decoded at load and with matrices decoded at every use, each in
plain float32 (exact) and with activations rounded as llama.cpp rounds them (ggml).
"""

import ctypes
import json
from pathlib import Path

import click
from engines import Engine, LlamaCpp, Llorch
from random_models import QWEN_05B, forget, random_model
from rounds import Samples, interleave, machine, report, set_threads

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.cpp's llama_ftype


@click.command(help=__doc__)
@click.option("--type", "types", multiple=True, type=click.Choice(list(FILE_TYPES)), default=list(FILE_TYPES))
@click.option("--layers", default=24, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "prompts", multiple=True, default=[128], show_default=True, help="Tokens of a prefill.")
@click.option("--decode", "n_decode", default=4, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    types: tuple[str, ...],
    layers: int,
    threads: int,
    prompts: tuple[int, ...],
    n_decode: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Entry point."""
    samples: dict[str, dict[str, Samples]] = {}
    print(f"{machine()}; {threads} threads")
    with random_model(QWEN_05B | {"num_hidden_layers": layers}) as folder:
        for name in types:
            path = quantised(folder / "model.gguf", name, threads)
            engines = engines_of(path, threads)
            samples[name] = interleave(engines, prompts, n_decode, rounds)
            print(f"{name}, {path.stat().st_size / 1e9:.2f} GB")
            report(samples[name], [engine for engine in engines if engine != "llama.cpp"], ["llama.cpp"])
            del engines
            path.unlink()
    if output is not None:
        output.write_text(json.dumps({"machine": machine(), "threads": threads, "samples": samples}))


def engines_of(path: Path, n_threads: int) -> dict[str, Engine]:
    """llama.cpp, and ours in both arithmetics and both residencies."""
    from llorch.numerics import EXACT, GGML

    ours = {
        f"llorch {numerics} {residency}": Llorch(path, numerics, residency)
        for numerics in (EXACT, GGML)
        for residency in ("decoded", "packed")
    }
    return {"llama.cpp": LlamaCpp(path, n_threads), **ours}


def quantised(source: Path, name: str, n_threads: int) -> Path:
    """Write a quantised copy with llama.cpp.

    Raises:
        ChildProcessError: It refused.
    """
    import llama_cpp

    click.echo(f"quantising to {name}", err=True)
    path = source.with_name(f"{name}.gguf")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[name], n_threads
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.pointer(parameters))
    if status:
        raise ChildProcessError(f"llama.cpp ended with {status} when it was to write {name}")
    forget(path)
    return path


if __name__ == "__main__":
    set_threads()
    main()

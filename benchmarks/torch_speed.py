"""Prefill and decode speed of llorch's torch path on the CPU, against transformers and llama.cpp, interleaved.

    python benchmarks/torch_speed.py                       Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/torch_speed.py --layers 4 --rounds 3 --what BF16
    python benchmarks/torch_speed.py --shape experts --layers 4 --what Q8_0 --what F32
    python benchmarks/torch_speed.py --no-extra-buffers    where llama.cpp ends by SIGSEGV, as it may with AMX
    python benchmarks/torch_speed.py --folder DIR          a model of any family, in both formats: DIR/model.gguf is F32

Every engine runs the same weights in the same dtype. llama.cpp makes the quantised files and runs them with its own
rounding of activations to 8 bits; llorch keeps matrices packed and computes in the dtype that is named.
"""

import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
from engines import Engine, LlorchTorch, foreign
from quantised_speed import quantised
from random_models import SHAPES, forget, random_model
from rounds import Samples, finish, interleave, processor, quiet, report, set_threads

# Comparisons: llorch's run -> the runs that it is compared with. The first word of a name is its engine.
PAIRS = {
    "F32": {"llorch float32": ["transformers float32", "llama.cpp"]},
    "BF16": {"llorch bfloat16": ["transformers bfloat16", "llama.cpp"]},
    "Q8_0": {"llorch bfloat16": ["llama.cpp"], "llorch float32": ["llama.cpp"]},
    "Q4_0": {"llorch bfloat16": ["llama.cpp"], "llorch float32": ["llama.cpp"]},
}


@click.command(help=__doc__)
@click.option("--what", "kinds", multiple=True, type=click.Choice(list(PAIRS)), default=list(PAIRS))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="dense", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--folder", "given", type=click.Path(exists=True, path_type=Path), help="Measure this model.")
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "prompts", multiple=True, default=[128], show_default=True, help="Tokens of a prefill.")
@click.option("--decode", "n_decode", default=24, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--extra-buffers/--no-extra-buffers", default=True, help="Layouts that llama.cpp makes for a processor.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    kinds: tuple[str, ...],
    shape: str,
    layers: int,
    given: Path | None,
    threads: int,
    prompts: tuple[int, ...],
    n_decode: int,
    rounds: int,
    extra_buffers: bool,
    output: Path | None,
) -> None:
    """Entry point."""
    samples: dict[str, dict[str, Samples]] = {}
    print(", ".join(f"{name} {value}" for name, value in surroundings(threads).items()))
    random = random_model(SHAPES[shape] | {"num_hidden_layers": layers})
    with random if given is None else nullcontext(given) as folder:
        for kind in kinds:
            path = file_of(folder, kind, threads)
            samples[kind] = interleave(
                engines_of(kind, folder, path, threads, extra_buffers), prompts, n_decode, rounds
            )
            print(f"\n{kind}, {path.stat().st_size / 1e9:.2f} GB")
            for llorch, engines in PAIRS[kind].items():
                pair = {name: samples[kind][name] for name in (llorch, *engines) if name in samples[kind]}
                report(pair, [llorch], engines)
    print(f"\n{table(samples)}")
    if output is not None:
        settings = surroundings(threads) | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "layers": layers}
        output.write_text(json.dumps(settings | {"medians": medians(samples), "samples": samples}, indent=1))
    for kind in kinds:
        finish(samples[kind], names_of(kind))


def file_of(folder: Path, kind: str, n_threads: int) -> Path:
    """Find the file of a type, and write it if it does not exist."""
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    if kind == "F32":
        return folder / "model.gguf"
    if kind != "BF16":
        return quantised(folder / "model.gguf", kind, n_threads)
    path = folder / "BF16.gguf"
    convert(folder / "model.gguf", path, ggml_type=GGMLType.BF16)
    forget(path)
    return path


def engines_of(
    kind: str, folder: Path, path: Path, n_threads: int, extra_buffers: bool
) -> dict[str, Callable[[], Engine]]:
    """Name the loader of each engine of a comparison."""
    makers: dict[str, Callable[[str], Engine]] = {
        "llorch": lambda dtype: LlorchTorch(path, n_threads, dtype),
        "transformers": lambda dtype: foreign("Transformers", folder, n_threads, dtype),
        "llama.cpp": lambda dtype: foreign("LlamaCpp", path, n_threads, extra_buffers),
    }
    return {name: partial(makers[name.split()[0]], name.split()[-1]) for name in names_of(kind)}


def names_of(kind: str) -> list[str]:
    """List all engines of a comparison."""
    return list(dict.fromkeys(name for llorch, engines in PAIRS[kind].items() for name in (llorch, *engines)))


def medians(samples: dict[str, dict[str, Samples]]) -> dict[str, dict[str, dict[str, float]]]:
    """Compute tokens per second of the quiet rounds: file type -> engine -> timed part."""
    return {
        kind: {
            name: {part: statistics.median(quiet(measured)) for part, measured in engine_samples.items()}
            for name, engine_samples in kind_samples.items()
        }
        for kind, kind_samples in samples.items()
    }


def table(samples: dict[str, dict[str, Samples]]) -> str:
    """Write a line per pair, as Markdown: tokens per second of both sides and their ratio."""
    speeds = medians(samples)
    parts = list(next(iter(next(iter(speeds.values())).values())))
    lines = [f"| | ours | theirs | {' | '.join(parts)} |", "|---|---|---|" + "---|" * len(parts)]
    for kind, kind_speeds in speeds.items():
        for llorch, engines in PAIRS[kind].items():
            for engine in (name for name in engines if name in kind_speeds):
                pairs = [(kind_speeds[llorch][part], kind_speeds[engine][part]) for part in parts]
                cells = [f"{a:.1f} / {b:.1f} = {a / b:.2f}" for a, b in pairs]
                lines.append(f"| {kind} | {llorch} | {engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def surroundings(n_threads: int) -> dict[str, object]:
    """List the machine and the package versions of the figures."""
    import torch

    from llorch.ops.compiled.library import library

    packages = {name: version(name) for name in ("torch", "transformers", "llama-cpp-python")}
    kernels = "compiled" if library() is not None else "torch only"
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor(), "threads": n_threads, "torch uses": capability, "kernels": kernels, **packages}


if __name__ == "__main__":
    set_threads()
    main()

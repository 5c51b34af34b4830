"""Prefill and decode speed of quantised files, llorch's against llama.cpp's on the same file, interleaved.

    python benchmarks/quantised_speed.py                   Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/quantised_speed.py --type Q4_0 --layers 4
    python benchmarks/quantised_speed.py --no-extra-buffers    where llama.cpp ends by SIGSEGV, as it may with AMX
    python benchmarks/quantised_speed.py --folders --layers 4  quantised Hugging Face folders on torch

llama.cpp makes the files. llorch runs them with matrices decoded at load and with matrices decoded at every use, in
plain float32 (exact) and with activations rounded as llama.cpp rounds them (ggml).

With --folders the torch path runs random folders of each format, llorch's Q4_0 and Q8_0 and llama.cpp's on the same
shape, all in the same rounds. Then each folder and file is opened in processes of its own, in turn: its peak memory
above that of torch, and the processor time for each of its gigabytes, beside that of the folder in floats. --vocabulary
151936 is Qwen2.5's: a folder keeps its embedding in floats, which then takes most of the time.
"""

import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import click
from engines import Engine, Llorch, LlorchTorch, foreign
from random_folders import EIGHT_BITS, KINDS, write_folder
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
@click.option("--folders", is_flag=True, help="Quantised Hugging Face folders instead.")
@click.option("--vocabulary", default=8192, show_default=True, help="Tokens that a folder knows.")
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
    folders: bool,
    vocabulary: int,
    extra_buffers: bool,
    output: Path | None,
) -> None:
    """Entry point."""
    samples: dict[str, dict[str, Samples]] = {}
    print(f"{machine()}; {threads} threads")
    if folders:
        config = SHAPES[shape] | {"num_hidden_layers": layers, "vocab_size": vocabulary}
        samples["folders"] = of_folders(config, threads, prompts, n_decode, rounds, extra_buffers)
        types = ()
    with random_model(SHAPES[shape] | {"num_hidden_layers": layers}) if types else nullcontext() as folder:
        for name in types:
            assert folder is not None
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


OPENING = """
import os, sys, time, torch
from llorch.pytorch.model import load_torch
def held(key): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1e3
torch.set_num_threads(1)
before, start = held("VmRSS"), time.process_time()
load_torch(sys.argv[1], dtype=sys.argv[2])
seconds, file = time.process_time() - start, sys.argv[1] + "/model.safetensors" * os.path.isdir(sys.argv[1])
size = os.path.getsize(file) / 1e9
print(1e3 * size, held("VmHWM") - before, seconds / size)
"""


def of_folders(
    config: dict[str, object], n_threads: int, prompts: Sequence[int], n_decode: int, rounds: int, extra_buffers: bool
) -> dict[str, Samples]:  # fmt: skip
    """Time the folders and files of the same shape in the same rounds, then open each in its own process."""
    with random_model(config) as folder:
        folders = {kind: write_folder(kind, config, folder / f"of-{number}") for number, kind in enumerate(KINDS)}
        files = {name: quantised(folder / "model.gguf", name, n_threads) for name in ("Q4_0", "Q8_0")}
        llorch_paths = {name: path for name, path in (folders | files).items() if name != "float"}
        engines: dict[str, Callable[[], Engine]] = {
            name: partial(LlorchTorch, path, n_threads, "float32", "packed") for name, path in llorch_paths.items()
        }
        for name, path in files.items():
            engines[f"llama.cpp {name}"] = lambda path=path: foreign("LlamaCpp", path, n_threads, extra_buffers)
        samples = interleave(engines, prompts, n_decode, rounds)
        for name in files:
            same_width = [kind for kind in folders if kind in samples and (kind in EIGHT_BITS) == (name == "Q8_0")]
            peers = [key for key in (name, f"llama.cpp {name}") if key in samples]
            report({key: samples[key] for key in (*same_width, *peers)}, [*same_width, *peers[:1]], peers)
        for dtype in ("float32", "bfloat16"):
            report_opening(folders | files, dtype, rounds)
    return samples


def report_opening(models: dict[str, Path], dtype: str, rounds: int) -> None:
    """Open each folder or file in its own process, in turn; print size, peak and time beside those of the floats."""
    samples: dict[str, list[list[float]]] = {kind: [] for kind in models}
    for _ in range(rounds):
        for kind, path in models.items():
            print(f"opening {kind} in {dtype}", file=sys.stderr)
            command = [sys.executable, "-c", OPENING, str(path), dtype]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            samples[kind].append([float(word) for word in printed.split()])
    for kind, timed in samples.items():
        size, peak, seconds = (statistics.median(column) for column in zip(*timed, strict=True))
        ratios = [run[2] / reference[2] for run, reference in zip(timed, samples["float"], strict=True)]
        print(f"{kind:<12} {dtype:<9} {size:6.0f} MB, peak {peak:6.0f} MB above torch, {seconds:5.2f} s/GB to open,"
              f" {statistics.median(ratios):5.2f} of float ({min(ratios):.2f}-{max(ratios):.2f})")  # fmt: skip


def engines_of(path: Path, n_threads: int, extra_buffers: bool) -> dict[str, Callable[[], Engine]]:
    """Name the loaders of llama.cpp, and of llorch in both arithmetics and both residencies."""
    from llorch.ops.numerics import EXACT, GGML

    llorch_engines = {
        f"llorch {numerics} {residency}": partial(Llorch, path, numerics, residency)
        for numerics in (EXACT, GGML)
        for residency in ("decoded", "packed")
    }
    return {"llama.cpp": lambda: foreign("LlamaCpp", path, n_threads, extra_buffers), **llorch_engines}


def quantised(source: Path, name: str, n_threads: int) -> Path:
    """Write a quantised copy with llama.cpp; exit with 3 if llama.cpp dies."""
    from llorch.engines.process import in_child
    from llorch.runtime.errors import EngineDied

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

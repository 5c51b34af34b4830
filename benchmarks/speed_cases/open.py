"""Case `open`: processor time, wall time and memory from the start of a process to the first token.

Every round of every engine is a fresh process, with the file in the page cache. The import of torch is measured by
itself and taken off. The first run of llorch, which compiles its C library, is a row of its own.
"""

import tempfile
from functools import partial
from pathlib import Path

from .decode import PLAIN, Setup, llorch, model_path
from .rounds import Engine, Results, interleave, start

PROMPT = "The capital of France is"
UNITS = {
    "processor time to the first token": "s", "wall time to the first token": "s", "of it import": "s",
    "of it load": "s", "of it first pass": "s", "processor time for each GB": "s/GB", "import of torch": "s",
    "peak memory": "GB", "peak above torch": "GB", "first run, wall time": "s",
}  # fmt: skip
VARIANTS = ("numpy", "torch,dtype=float32")


def run(setup: Setup, results: Results) -> None:
    """Open every model in turn by all engines, round by round."""
    with setup.models() as models:
        for kind in setup.kinds:
            results.model = kind
            path = model_path(setup, models, kind)
            engines = [llorch(text, path, setup, 1024) for text in setup.variants or VARIANTS]
            if path.suffix == ".gguf":
                engines.append(
                    Engine("llama.cpp", "LlamaCpp", str(path), {"room": 1024}, fallback=PLAIN, reference=True)
                )
            for file in path.iterdir() if path.is_dir() else [path]:
                file.read_bytes()
            with tempfile.TemporaryDirectory() as cache:
                measure = partial(open_once, path=path, threads=setup.threads, cache=cache)
                ran, samples = interleave(engines, measure, range(setup.rounds + 1), results)
            results.add(ran, samples, UNITS)


def open_once(
    engine: Engine, number: int, path: Path, threads: int, cache: str
) -> tuple[Engine, dict[str, tuple[float, float]]]:
    """Open the model in a fresh process. In round 0 the cache of compiled code is empty: that is the first run."""
    process, engine = start(engine, threads, XDG_CACHE_HOME=cache)
    try:
        marks, first = process.marks, process.ask("first", PROMPT)
    finally:
        process.close()
    begin, imported, load = marks["start"], marks["import"], marks["load"]
    torch = marks.get("torch", begin)
    torch_seconds = torch["seconds"] - begin["seconds"]
    cpu = load["cpu"] + first["cpu"] - (torch["cpu"] - begin["cpu"])
    seconds = load["seconds"] + first["seconds"] - torch_seconds
    peak = first["peak_of_all"] / 1e9
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    figures = {
        "processor time to the first token": cpu,
        "wall time to the first token": seconds,
        "of it import": imported["seconds"] - torch_seconds,
        "of it load": load["seconds"] - imported["seconds"],
        "of it first pass": first["seconds"],
        "processor time for each GB": cpu / sum(file.stat().st_size for file in files) * 1e9,
        "peak memory": peak,
    }
    if "torch" in marks:
        figures |= {"import of torch": torch_seconds, "peak above torch": peak - torch["bytes"] / 1e9}
    chosen = figures if number else {"first run, wall time": seconds}
    return engine, {what: (value, first["others"]) for what, value in chosen.items()}

"""Speed of SmolLM2 against llama.cpp: every round of every engine is a process, and rounds are interleaved.

A process imports its packages, opens the file (which is in the page cache), encodes a short text and runs it; then it
reads a prompt of 1,200 tokens and decodes. Peak memory is that of the process.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from published_lines import PROMPT, Line, not_run, progress, smollm2
from rounds import OTHERS, busy_seconds, processor

N_PROMPT, N_DECODE, ROOM = 1200, 32, 1280
# llama.cpp lays packed weights out for the processor; with AMX, release 0.3.36 of its package ends there by SIGSEGV.
PLAIN = "llama.cpp, weights as stored"
ENGINES = ("llorch, NumPy", "llorch, torch", "llama.cpp", PLAIN)
FIGURES = {
    "first": "s to the first token",
    "prompt": f"s for {N_PROMPT} tokens",
    "peak": "MB at the peak",
    "decode": "tokens/s",
}


def speed(n_rounds: int, n_threads: int) -> Iterator[Line]:
    """Time the engines in interleaved rounds."""
    smollm2().read_bytes()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    failures: dict[str, str] = {}
    for index in range(n_rounds):
        for name in ENGINES:
            progress(f"speed: round {index + 1} of {n_rounds}, {name}")
            variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(n_threads))
            command = [sys.executable, __file__, name, str(smollm2()), str(n_threads)]
            process = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)
            if process.returncode:
                failures[name] = f"ended with {process.returncode}: {process.stderr.strip()[-200:]}"
            else:
                samples[name].append(json.loads(process.stdout.splitlines()[-1]))
    host = f"{processor()}, {n_threads} threads"
    for name in ENGINES:
        title = f"SmolLM2, speed of {name}"
        yield not_run(title, host, failures[name]) if name in failures else figures(title, host, samples[name])


def figures(title: str, host: str, rounds: list[dict[str, float]]) -> Line:
    """Make the line with the medians of an engine; a figure is never wrong."""
    n_busy = sum(sample["others"] > OTHERS for sample in rounds)
    medians = (f"{statistics.median(sample[key] for sample in rounds):.4g} {unit}" for key, unit in FIGURES.items())
    load_note = f"other work ran beside {n_busy} of {len(rounds)} rounds" if n_busy else "no other work ran"
    return Line(title, host, len(rounds), 0, f"{', '.join(medians)}; {load_note}")


def one_round(name: str, path: Path, n_threads: int) -> dict[str, float]:
    """Time one engine in this process."""
    open_engine, encode = opener(name, n_threads)
    busy, cpu_start, start_of_all = busy_seconds(), time.process_time(), time.perf_counter()
    engine = open_engine(path)
    engine.prefill(encode(engine, PROMPT))
    measured = {"first": time.perf_counter() - start_of_all}
    start = time.perf_counter()
    engine.prefill([1000 + index % 7000 for index in range(N_PROMPT)])
    measured["prompt"] = time.perf_counter() - start
    measured["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    start = time.perf_counter()
    for token in range(2000, 2000 + N_DECODE):
        engine.decode(token)
    end = time.perf_counter()
    measured["decode"] = N_DECODE / (end - start)
    other_seconds = busy_seconds() - busy - (time.process_time() - cpu_start)
    return measured | {"others": other_seconds / (end - start_of_all) / (os.cpu_count() or 1)}


def opener(name: str, n_threads: int) -> tuple[Callable[[Path], Any], Callable[[Any, str], list[int]]]:
    """Import an engine's packages; return a function that opens a file, and one that encodes a text."""
    import engines

    encode: Callable[[Any, str], list[int]] = lambda engine, text: engine._model.tokenizer.encode(text)  # noqa: E731
    if name in ("llama.cpp", PLAIN):
        import llama_cpp  # noqa: F401

        return partial(
            engines.LlamaCpp, n_threads=n_threads, extra_buffers=name != PLAIN, n_ctx=ROOM
        ), lambda engine, text: engine._llama.tokenize(text.encode())
    if name == "llorch, torch":
        import llorch.pytorch.model

        return partial(engines.LlorchTorch, n_threads=n_threads, dtype="float32", room=ROOM), encode
    import llorch.model.model  # noqa: F401

    return engines.Llorch, encode


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print(json.dumps(one_round(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))

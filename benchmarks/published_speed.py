"""Speed of SmolLM2 beside llama.cpp: every round of every engine is a process, and rounds are interleaved.

A process imports its packages, then opens the file (which the system has in memory) and makes ids of a short
text and runs them; then it reads a prompt of 1,200 tokens and decodes. Peak memory is that of the whole process.
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
# llama.cpp lays packed weights out for the processor; with AMX release 0.3.36 of its package ends by SIGSEGV there.
PLAIN = "llama.cpp, weights as stored"
ENGINES = ("llorch, NumPy", "llorch, torch", "llama.cpp", PLAIN)
FIGURES = {
    "first": "s to the first token",
    "prompt": f"s for {N_PROMPT} tokens",
    "peak": "MB at the peak",
    "decode": "tokens/s",
}


def speed(n_rounds: int, n_threads: int) -> Iterator[Line]:
    """Time the engines in turn."""
    smollm2().read_bytes()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    ended: dict[str, str] = {}
    for at in range(n_rounds):
        for name in ENGINES:
            progress(f"speed: round {at + 1} of {n_rounds}, {name}")
            variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(n_threads))
            words = [sys.executable, __file__, name, str(smollm2()), str(n_threads)]
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | variables)
            if done.returncode:
                ended[name] = f"ended with {done.returncode}: {done.stderr.strip()[-200:]}"
            else:
                samples[name].append(json.loads(done.stdout.splitlines()[-1]))
    where = f"{processor()}, {n_threads} threads"
    for name in ENGINES:
        what = f"SmolLM2, speed of {name}"
        yield not_run(what, where, ended[name]) if name in ended else figures(what, where, samples[name])


def figures(what: str, where: str, rounds: list[dict[str, float]]) -> Line:
    """Make the line with the medians of an engine; a figure is never wrong."""
    busy = sum(one["others"] > OTHERS for one in rounds)
    medians = (f"{statistics.median(one[key] for one in rounds):.4g} {unit}" for key, unit in FIGURES.items())
    beside = f"other work ran beside {busy} of {len(rounds)} rounds" if busy else "no other work ran"
    return Line(what, where, len(rounds), 0, f"{', '.join(medians)}; {beside}")


def one_round(name: str, path: Path, n_threads: int) -> dict[str, float]:
    """Time one engine in this process."""
    open_engine, encode = opener(name, n_threads)
    busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
    engine = open_engine(path)
    engine.prefill(encode(engine, PROMPT))
    found = {"first": time.perf_counter() - began}
    start = time.perf_counter()
    engine.prefill([1000 + i % 7000 for i in range(N_PROMPT)])
    found["prompt"] = time.perf_counter() - start
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    start = time.perf_counter()
    for token in range(2000, 2000 + N_DECODE):
        engine.decode(token)
    ended = time.perf_counter()
    found["decode"] = N_DECODE / (ended - start)
    others = busy_seconds() - busy - (time.process_time() - own)
    return found | {"others": others / (ended - began) / (os.cpu_count() or 1)}


def opener(name: str, n_threads: int) -> tuple[Callable[[Path], Any], Callable[[Any, str], list[int]]]:
    """Import what an engine needs; gives what opens a file by it, and what makes ids of a text."""
    import engines

    encode: Callable[[Any, str], list[int]] = lambda it, text: it._model.tokenizer.encode(text)  # noqa: E731
    if name in ("llama.cpp", PLAIN):
        import llama_cpp  # noqa: F401

        return partial(
            engines.LlamaCpp, n_threads=n_threads, extra_buffers=name != PLAIN, n_ctx=ROOM
        ), lambda it, text: it._llama.tokenize(text.encode())
    if name == "llorch, torch":
        import llorch.pytorch.model

        return partial(engines.LlorchTorch, n_threads=n_threads, dtype="float32", room=ROOM), encode
    import llorch.model.model  # noqa: F401

    return engines.Llorch, encode


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print(json.dumps(one_round(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))

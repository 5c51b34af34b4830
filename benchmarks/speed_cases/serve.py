"""Case `serve`: tokens per second and time to the first token of servers with several clients, on one file.

llama.cpp is the server of llama-cpp-python (`pip install 'llama-cpp-python[server]'`), which answers one request after
the other. Each client opens a connection, asks for one completion as a stream, greedily, and reads it to its end; the
prompts all differ. Tokens of answers count, over the time from the first request to the last token. All servers are
loaded at once and asked in turn; their processes share the cores with the clients.
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from serve_processes import Server, llama_cpp
from serve_processes import llorch as llorch_server

from .engines import busy_seconds
from .models import write_floats
from .rounds import Engine, Results, interleave

WORDS = "the fox saw a small boat and said to her friend that they had lost big red ball under old tree by".split()
LAYERS = {  # layers of Qwen2.5-0.5B; vocabulary and context are those of `story`
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
CONTEXT, FIRST = 512, "{} clients, first token"
LLORCH_SERVERS = {
    "torch": ("--backend", "torch"),
    "torch, reproducible": ("--backend", "torch", "--mode", "reproducible"),
    "numpy": (),
}


@dataclass(frozen=True)
class Answer:
    """Times and tokens of an answer, as one client saw them."""

    first: float  # seconds to the first token
    tokens: int


def run(
    results: Results, *, shape: str, names: Sequence[str], clients: Sequence[int], threads: int, words: int,
    tokens: int, rounds: int,
) -> None:  # fmt: skip
    """Measure the servers in turn with every number of clients, after a warm-up round."""
    results.model = shape
    if "llama.cpp" in names and find_spec("starlette_context") is None:
        results.skip("llama.cpp", "pip install 'llama-cpp-python[server]'")
        names = [name for name in names if name != "llama.cpp"]
    with model_file(shape) as file, ExitStack() as running:
        options = ("--threads", str(threads), "--parallel", str(max(clients)))
        start: Mapping[str, Callable[[], Server]] = {
            **{name: partial(llorch_server, str(file), *options, *more) for name, more in LLORCH_SERVERS.items()},
            "llama.cpp": partial(llama_cpp, file, threads=threads, context=CONTEXT),
        }
        servers = {name: start[name]() for name in names}
        for server in servers.values():
            running.callback(server.stop)
        engines = [Engine("llorch", variant=name) for name in names if name != "llama.cpp"]
        engines += [Engine("llama.cpp", reference=True)] if "llama.cpp" in names else []

        def measure(engine: Engine, number: int) -> tuple[Engine, dict[str, tuple[float, float]]]:
            server, draws, measured = servers[engine.variant or engine.name], random.Random(number), {}
            for n_clients in clients:
                prompts = [" ".join(draws.choice(WORDS) for _ in range(words)) for _ in range(n_clients)]
                measured |= asyncio.run(one_round(server, prompts, tokens))
            return engine, measured if number else {}

        ran, samples = interleave(engines, measure, range(rounds + 1), results)
    units = {what: unit for n in clients for what, unit in ((f"{n} clients", "tokens/s"), (FIRST.format(n), "ms"))}
    results.add(ran, samples, units)


async def one_round(server: Server, prompts: Sequence[str], max_tokens: int) -> dict[str, tuple[float, float]]:
    """Run all clients at once, one for each prompt; return the speeds, and the share of other programs."""
    busy, cpu_start, start = busy_seconds(), time.process_time() + server.cpu_seconds(), time.perf_counter()
    answers = await asyncio.gather(*(complete(server, prompt, max_tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    other_seconds = busy_seconds() - busy - (time.process_time() + server.cpu_seconds() - cpu_start)
    others = max(0.0, other_seconds) / seconds / (os.cpu_count() or 1)
    first = 1000 * statistics.median(answer.first for answer in answers)
    speed = sum(answer.tokens for answer in answers) / seconds
    return {f"{len(prompts)} clients": (speed, others), FIRST.format(len(prompts)): (first, others)}


async def complete(server: Server, prompt: str, max_tokens: int) -> Answer:
    """Ask for one completion, and read its stream."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    header = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    start = time.perf_counter()
    writer.write(f"{header}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
    try:
        return await _read(reader, start)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, start: float) -> Answer:
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {(await reader.read(2000))[-500:]!r}")
    first, n_events, n_reported = 0.0, 0, None
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            return Answer(first, n_events if n_reported is None else n_reported)
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        n_reported = (event.get("usage") or {}).get("completion_tokens", n_reported)
        if event["choices"] and (event["choices"][0].get("text") or event["choices"][0].get("finish_reason")):
            first = first or time.perf_counter() - start
            n_events += 1
    raise RuntimeError("the stream ended before [DONE]")


@contextmanager
def model_file(shape: str) -> Iterator[Path]:
    """Write a GGUF file of `story`, or of a larger model with its tokenizer and random weights."""
    from llorch.files.convert import convert
    from llorch.runtime.builtin import builtin_path

    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as path:
        folder, file = Path(path) / "model", Path(path) / "model.gguf"
        convert(builtin_path("story"), folder)
        if shape != "story":
            write_floats(json.loads((folder / "config.json").read_text()) | LAYERS, folder)
        convert(folder, file)
        yield file

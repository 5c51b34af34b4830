"""Tokens per second and time to the first token of servers with several clients, on one file, interleaved.

    python benchmarks/serve_load.py                        `story`, at 1, 4 and 16 clients, 2 threads
    python benchmarks/serve_load.py --shape 0.5B           random weights in the shape of Qwen2.5-0.5B's layers
    python benchmarks/serve_load.py --server torch --server llama.cpp --clients 16 --rounds 3

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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
from rounds import OTHERS, busy_seconds, machine, set_threads
from serve_processes import Server, llama_cpp, llorch

WORDS = "the fox saw a small boat and said to her friend that they had lost big red ball under old tree by".split()
LAYERS = {  # layers of Qwen2.5-0.5B; vocabulary and context are those of `story`
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
CONTEXT = 512
LLORCH_SERVERS = {
    "torch": ("--backend", "torch"),
    "torch, reproducible": ("--backend", "torch", "--mode", "reproducible"),
    "numpy": (),
}
SERVERS = (*LLORCH_SERVERS, "llama.cpp")


@dataclass(frozen=True)
class Answer:
    """Times and tokens of an answer, as one client saw them."""

    first: float  # seconds to the first token
    seconds: float  # seconds to the last token
    tokens: int


@dataclass(frozen=True)
class Round:
    """Speed and answers of all clients in a round."""

    tokens_per_second: float
    answers: Sequence[Answer]
    others: float  # share of the processors that other programs used


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
    first = last = start
    n_events, n_reported = 0, None
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"data: [DONE]"):
                break
            continue
        event = json.loads(line[6:])
        n_reported = (event.get("usage") or {}).get("completion_tokens", n_reported)
        if event["choices"] and (event["choices"][0].get("text") or event["choices"][0].get("finish_reason")):
            last = time.perf_counter()
            first = last if n_events == 0 else first
            n_events += 1
    else:
        raise RuntimeError("the stream ended before [DONE]")
    return Answer(first - start, last - start, n_events if n_reported is None else n_reported)


async def one_round(server: Server, prompts: Sequence[str], max_tokens: int) -> Round:
    """Run all clients at once, one for each prompt."""
    busy, cpu_start, start = busy_seconds(), time.process_time() + server.cpu_seconds(), time.perf_counter()
    answers = await asyncio.gather(*(complete(server, prompt, max_tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    other_seconds = busy_seconds() - busy - (time.process_time() + server.cpu_seconds() - cpu_start)
    share = max(0.0, other_seconds) / seconds / (os.cpu_count() or 1)
    return Round(sum(answer.tokens for answer in answers) / seconds, answers, share)


def interleave(
    servers: Mapping[str, Server], clients: Sequence[int], n_words: int, max_tokens: int, rounds: int
) -> dict[str, dict[int, list[Round]]]:
    """Measure every server in every round, after a warm-up round."""
    draw = random.Random(0)
    samples: dict[str, dict[int, list[Round]]] = {name: {n_clients: [] for n_clients in clients} for name in servers}
    for index in range(rounds + 1):
        for n_clients in clients:
            prompts = [" ".join(draw.choices(WORDS, k=n_words)) for _ in range(n_clients)]
            for name, server in servers.items():
                click.echo(f"round {index} of {rounds}: {name}, {n_clients} clients", err=True)
                sample = asyncio.run(one_round(server, prompts, max_tokens))
                if index > 0:
                    samples[name][n_clients].append(sample)
    return samples


def quiet(rounds: Sequence[Round]) -> list[Round]:
    """Keep the rounds in which other programs were idle, or all rounds if they never were."""
    return [r for r in rounds if r.others <= OTHERS] or list(rounds)


def speed(rounds: Sequence[Round]) -> float:
    """Compute the median of tokens per second."""
    return statistics.median(r.tokens_per_second for r in quiet(rounds))


def report(samples: Mapping[str, Mapping[int, Sequence[Round]]]) -> None:
    """Print medians, and the ratio of each of llorch's servers to llama.cpp's."""
    print(f"{'server':<20} clients   tokens/s (range)        first token, median and worst    rounds quiet")
    for name, by_clients in samples.items():
        for n_clients, rounds in by_clients.items():
            quiet_rounds = quiet(rounds)
            rates = [r.tokens_per_second for r in quiet_rounds]
            firsts = [1000 * answer.first for r in quiet_rounds for answer in r.answers]
            n_quiet = sum(r.others <= OTHERS for r in rounds)
            spread = f"{speed(rounds):7.1f} ({min(rates):.1f}-{max(rates):.1f})"
            print(
                f"{name:<20} {n_clients:>7}   {spread:<24} {statistics.median(firsts):7.0f} ms {max(firsts):7.0f} ms"
                f"{'':<14} {n_quiet} of {len(rounds)}"
            )
    for name in samples.keys() & LLORCH_SERVERS.keys() if "llama.cpp" in samples else ():
        ratios = [
            f"{n} clients {speed(rounds) / speed(samples['llama.cpp'][n]):.2f}" for n, rounds in samples[name].items()
        ]
        print(f"{name} / llama.cpp: {', '.join(ratios)}")


@contextmanager
def model_file(shape: str) -> Iterator[Path]:
    """Write a GGUF file of `story`, or of a larger model with its tokenizer and random weights."""
    import numpy as np
    from safetensors.numpy import save_file

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.files.convert import convert
    from llorch.files.tensor_names import huggingface_tensors
    from llorch.runtime.builtin import builtin_path

    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as path:
        folder, file = Path(path) / "model", Path(path) / "model.gguf"
        convert(builtin_path("story"), folder)
        if shape != "story":
            click.echo("writing random weights", err=True)
            config = json.loads((folder / "config.json").read_text()) | LAYERS
            (folder / "config.json").write_text(json.dumps(config))
            rng = np.random.default_rng(0)
            tensors = huggingface_tensors(config_from_huggingface(config, path=folder))
            arrays = {tensor.name: 0.02 * rng.standard_normal(tensor.shape, dtype=np.float32) for tensor in tensors}
            arrays |= {name: 1 + array for name, array in arrays.items() if name.endswith("norm.weight")}
            save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        convert(folder, file)
        yield file


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(["story", "0.5B"]), default="story", show_default=True)
@click.option("--server", "names", multiple=True, type=click.Choice(SERVERS), default=SERVERS)
@click.option("--clients", multiple=True, default=[1, 4, 16], show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--words", default=48, show_default=True, help="Of each prompt.")
@click.option("--tokens", default=64, show_default=True, help="Of each answer, at most.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all samples here.")
def main(
    shape: str, names: Sequence[str], clients: Sequence[int], threads: int, words: int, tokens: int, rounds: int,
    output: Path | None,
) -> None:  # fmt: skip
    """Entry point."""
    missing = "llama.cpp" in names and find_spec("starlette_context") is None
    if missing:
        click.echo("NOT RUN: llama.cpp: pip install 'llama-cpp-python[server]'")
    with model_file(shape) as file, ExitStack() as running:
        start: dict[str, Callable[[], Server]] = {
            name: partial(llorch, str(file), "--threads", str(threads), "--parallel", str(max(clients)), *options)
            for name, options in LLORCH_SERVERS.items()
        }
        start["llama.cpp"] = partial(llama_cpp, file, threads=threads, context=CONTEXT)
        servers = {}
        for name in names:
            if name != "llama.cpp" or not missing:
                servers[name] = start[name]()
                running.callback(servers[name].stop)
        samples = interleave(servers, clients, words, tokens, rounds)
        print(f"{machine()}; {threads} threads; {shape}, model file {file.stat().st_size / 1e6:.0f} MB")
    report(samples)
    if output is not None:
        records = {name: {n: [asdict(r) for r in rs] for n, rs in table.items()} for name, table in samples.items()}
        output.write_text(json.dumps({"machine": machine(), "threads": threads, "shape": shape, "samples": records}))
    sys.exit(3 if missing else 0)


if __name__ == "__main__":
    set_threads()
    main()

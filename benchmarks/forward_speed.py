"""Prefill and decode speed of three engines on the same float32 weights, cores and prompt, measured in turn.

    python benchmarks/forward_speed.py                     Qwen2.5-0.5B shape, random weights, 2 threads
    python benchmarks/forward_speed.py --layers 4          a shallower model, for a quick look

Rounds of all engines are interleaved, so that a drift of the machine meets each alike; medians are printed. The floor
of decode is one reading of all weights: the last column says how much memory bandwidth a decode speed amounts to.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import click

QWEN_05B: dict[str, object] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class Engine(Protocol):
    """One engine with the model loaded."""

    def prefill(self, ids: list[int]) -> None:
        """Run a prompt from an empty cache, up to the logits of its last token."""
        ...

    def decode(self, token_id: int) -> None:
        """Run one more token, up to its logits."""
        ...


class Llorch:
    """Our NumPy path."""

    def __init__(self, folder: Path, n_threads: int) -> None:
        """Load; the thread count comes from the environment, set before NumPy is imported."""
        import llorch

        self._model = llorch.load(folder / "model.gguf")

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        from llorch.cache import KVCache

        self._cache = KVCache(self._model.config, self._model.weights.dtype)
        self._model.forward(ids, cache=self._cache, last_only=True)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._model.forward([token_id], cache=self._cache, last_only=True)


class LlamaCpp:
    """llama.cpp as llama-cpp-python sets it up by default, on the CPU."""

    def __init__(self, folder: Path, n_threads: int) -> None:
        """Load."""
        from llama_cpp import Llama

        self._llama = Llama(
            str(folder / "model.gguf"), n_ctx=1024, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
        )

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        self._llama.reset()
        self._llama.eval(ids)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._llama.eval([token_id])


class Transformers:
    """transformers in float32 with its default attention."""

    def __init__(self, folder: Path, n_threads: int) -> None:
        """Load."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(n_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prefill(self, ids: list[int]) -> None:
        """See `Engine`."""
        self._past = None
        self._step(ids)

    def decode(self, token_id: int) -> None:
        """See `Engine`."""
        self._step([token_id])

    def _step(self, ids: list[int]) -> None:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([ids]), past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values


ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "llorch": Llorch,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


@click.command(help=__doc__)
@click.option("--layers", default=24, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "n_prompt", default=128, show_default=True, help="Tokens of the prefill.")
@click.option("--decode", "n_decode", default=24, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--engine", "names", multiple=True, type=click.Choice(list(ENGINES)), default=list(ENGINES))
def main(layers: int, threads: int, n_prompt: int, n_decode: int, rounds: int, names: tuple[str, ...]) -> None:
    """Entry point."""
    with random_model(QWEN_05B | {"num_hidden_layers": layers}) as folder:
        n_bytes = (folder / "model.gguf").stat().st_size
        engines = {name: ENGINES[name](folder, threads) for name in names}
        prefill: dict[str, list[float]] = {name: [] for name in engines}
        decode: dict[str, list[float]] = {name: [] for name in engines}
        for i in range(rounds + 1):
            for name, engine in engines.items():
                click.echo(f"round {i} of {rounds}: {name}", err=True)
                seconds = measure(engine, n_prompt, n_decode)
                if i > 0:  # round 0 warms up
                    prefill[name].append(n_prompt / seconds[0])
                    decode[name].append(n_decode / seconds[1])
    report(prefill, decode, n_bytes)


def measure(engine: Engine, n_prompt: int, n_decode: int) -> tuple[float, float]:
    """Seconds of one prefill and of some decode steps after it."""
    start = time.perf_counter()
    engine.prefill(list(range(1000, 1000 + n_prompt)))
    middle = time.perf_counter()
    for token_id in range(2000, 2000 + n_decode):
        engine.decode(token_id)
    return middle - start, time.perf_counter() - middle


def report(prefill: dict[str, list[float]], decode: dict[str, list[float]], n_bytes: int) -> None:
    """Print medians, ranges and the ratios of our speed to the others'."""
    print(f"machine: {processor()}, {os.cpu_count()} cores; model file {n_bytes / 1e9:.2f} GB")
    print(f"{'engine':<13} {'prefill tokens/s':>24} {'decode tokens/s':>24} {'decode GB/s':>12}")
    for name in prefill:
        speed = statistics.median(decode[name])
        print(f"{name:<13} {spread(prefill[name]):>24} {spread(decode[name]):>24} {speed * n_bytes / 1e9:>12.0f}")
    for name in prefill.keys() - {"llorch"} if "llorch" in prefill else ():
        ratios = [statistics.median(side["llorch"]) / statistics.median(side[name]) for side in (prefill, decode)]
        print(f"llorch / {name}: prefill {ratios[0]:.2f}, decode {ratios[1]:.2f}")


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def processor() -> str:
    """What the system calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@contextmanager
def random_model(config: dict[str, object]) -> Iterator[Path]:
    """A temporary folder with the model in both formats, weights random."""
    import numpy as np
    from safetensors.numpy import save_file

    from llorch.config import ModelConfig
    from llorch.weights import open_weights
    from llorch.weights.export import write_gguf
    from llorch.weights.names import inventory

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as name:
        folder = Path(name)
        click.echo("writing random weights", err=True)
        (folder / "config.json").write_text(json.dumps(config))
        weights = inventory(ModelConfig.from_huggingface(config, path=folder)).values()
        arrays = {w.huggingface: 0.02 * rng.standard_normal(w.shape, dtype=np.float32) for w in weights}
        arrays |= {name: 1 + array for name, array in arrays.items() if name.endswith("norm.weight")}
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        del arrays
        write_gguf(open_weights(folder), folder / "model.gguf")
        yield folder


if __name__ == "__main__":
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "2")
    main()

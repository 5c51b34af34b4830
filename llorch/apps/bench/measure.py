"""How fast a model runs, and how much of what the machine can do that is.

Prefill is bounded by the rate of matrix products, decode by how fast weights and cache are read. Both bounds are
measured in the same run, on the same device, with the library that the backend computes with: one large copy, one large
square product.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from threadpoolctl import threadpool_info

from llorch.families.config import ModelConfig
from llorch.files.residency import remembered
from llorch.files.tensor_names import inventory
from llorch.model.model import Model
from llorch.runtime.errors import UserError

Progress = Callable[[str], None]

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # of a copy that no cache holds
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}  # of a product that fills the device


@dataclass(frozen=True)
class Load:
    """What is run in every round."""

    prompt: int  # tokens of each prompt
    decode: int  # tokens decoded after it
    batch: int  # prompts at once
    rounds: int  # that count; one more warms up

    def require(self, config: ModelConfig) -> None:
        """Refuse (ValueError) prompt and decoded tokens that do not fit the context."""
        if self.prompt + self.decode > config.max_position_embeddings:
            raise UserError(
                f"bench: {self.prompt} tokens of prompt and {self.decode} decoded do not fit the context of "
                f"{config.max_position_embeddings} tokens; use a smaller --prompt or --decode"
            )


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    name: str
    config: ModelConfig
    backend: str  # `numpy`, or device and dtype of torch
    weights: str  # how they are stored
    weight_bytes: int  # that a decode step reads
    cache_itemsize: int  # bytes of a number in the cache
    device_name: str  # as its maker calls it
    threads: int | None  # that compute on the CPU; None where nobody tells
    versions: dict[str, str]  # of what computes


@runtime_checkable
class TimedEngine(Protocol):
    """A model ready to be timed; every call ends when its work is done."""

    def prefill(self) -> None:
        """Run the prompts from an empty cache, up to the logits of their last tokens."""
        ...

    def decode(self) -> None:
        """Run the tokens after them."""
        ...

    def copy_rate(self) -> float:
        """Measure the bytes per second, read and written, of a large copy."""
        ...

    def product_rate(self) -> float:
        """Measure the operations per second of a large square product."""
        ...


class NumpyEngine:
    """Our NumPy path."""

    def __init__(self, model: Model, load: Load) -> None:
        """Keep what is run; ValueError for more than one prompt at once."""
        if load.batch != 1:
            raise UserError(f"bench: the NumPy path runs one prompt at a time, got --batch {load.batch}")
        self._model, self._load = model, load

    def prefill(self) -> None:
        """See `TimedEngine`."""
        from llorch.model.cache import KVCache

        self._cache = KVCache.of(self._model.weights)
        self._model.forward(prompts(self._load, self._model.config.vocab_size)[0], cache=self._cache, last_only=True)

    def decode(self) -> None:
        """See `TimedEngine`."""
        for token_id in range(self._load.decode):
            self._model.forward([token_id % self._model.config.vocab_size], cache=self._cache, last_only=True)

    def copy_rate(self) -> float:
        """See `TimedEngine`."""
        source = np.ones(COPY_BYTES["cpu"], np.uint8)
        target = np.empty_like(source)
        return 2 * source.nbytes / best_time(lambda: np.copyto(target, source))

    def product_rate(self) -> float:
        """See `TimedEngine`."""
        width = PRODUCT_WIDTH["cpu"]
        matrix = np.full((width, width), 0.5, np.float32)
        return 2 * width**3 / best_time(lambda: matrix @ matrix)


def numpy_subject(model: Model) -> Subject:
    """Describe the measured model on the NumPy path."""
    weights = model.weights
    matrices = [name for name in weights if _read_by_a_step(name, model.config)]
    packed = sum(_of_a_token(weights.stored_bytes(name), name, model.config) for name in matrices)
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    decoded = sum(4 * _of_a_token(math.prod(weights.shape(name)), name, model.config) for name in matrices)
    return Subject(
        name=model.name,
        config=model.config,
        backend="numpy",
        weights="packed" if weights.packed else "float32",
        weight_bytes=packed if weights.packed else decoded,
        cache_itemsize=np.dtype(weights.cache_dtype).itemsize,
        device_name=processor(),
        threads=max(pools, default=None),
        versions={"python": platform.python_version(), "numpy": np.__version__},
    )


def measure(engine: TimedEngine, subject: Subject, load: Load, progress: Progress = lambda line: None) -> dict:
    """Time a model: speeds, rates, ceilings and shares, with all that is needed to repeat the run."""
    progress("measuring memory copy and matrix product")
    copy, product = engine.copy_rate(), engine.product_rate()
    prefills, decodes = [], []
    for i in range(load.rounds + 1):
        progress(f"round {i} of {load.rounds}" if i else "warm-up")
        prefills.append(elapsed(engine.prefill))
        decodes.append(elapsed(engine.decode))
    return report(subject, load, prefills[1:], decodes[1:], copy=copy, product=product)


def report(
    subject: Subject, load: Load, prefills: Sequence[float], decodes: Sequence[float], *, copy: float, product: float
) -> dict:
    """Turn seconds into speeds and shares of the ceilings; see `measure`."""
    prefill = {"tokens_per_s": speeds([load.batch * load.prompt / seconds for seconds in prefills])}
    decode = {"tokens_per_s": speeds([load.batch * load.decode / seconds for seconds in decodes])}
    steps = decode["tokens_per_s"]["median"] / load.batch
    prompts_per_s = prefill["tokens_per_s"]["median"] / (load.batch * load.prompt)
    context = load.prompt + load.decode / 2  # on average
    bytes_per_step = step_bytes(subject, load.batch, context)
    decode_flop = load.batch * (token_flop(subject.config, context) + head_flop(subject.config))
    prefill_flop = load.batch * (load.prompt * token_flop(subject.config, load.prompt / 2) + head_flop(subject.config))
    prefill |= rates("flop", prefill_flop * prompts_per_s, "matmul", product)
    decode |= {"bytes_per_step": bytes_per_step} | rates("bytes", bytes_per_step * steps, "copy", copy)
    decode |= rates("flop", decode_flop * steps, "matmul", product)
    names = ("backend", "device_name", "weights", "threads", "versions")
    return {
        "model": subject.name,
        **{name: getattr(subject, name) for name in names},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompt": load.prompt,
        "decoded": load.decode,
        "batch": load.batch,
        "rounds": load.rounds,
        "ceilings": {"copy_bytes_per_s": copy, "matmul_flop_per_s": product},
        "prefill": prefill,
        "decode": decode,
    }


def rates(what: str, rate: float, ceiling: str, ceiling_rate: float) -> dict[str, float]:
    """Give a rate and its share of a ceiling, under the names of the report."""
    return {f"{what}_per_s": rate, f"share_of_{ceiling}": rate / ceiling_rate}


def speeds(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest of some samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def prompts(load: Load, vocab_size: int) -> np.ndarray:
    """Make token ids, different ones in every row; the speed does not depend on them."""
    grid = np.arange(load.prompt)[None] * 7 + np.arange(load.batch)[:, None] * 13
    return grid % vocab_size


def step_bytes(subject: Subject, batch: int, context: float) -> float:
    """Count the bytes of one decode step: weights, keys and values are read once; states are read and written."""
    per_token, of_states = remembered(subject.config)
    return subject.weight_bytes + batch * (per_token * context * subject.cache_itemsize + 2 * 4 * of_states)


def token_flop(config: ModelConfig, context: float) -> float:
    """Count the operations for one token in all layers; a multiplication and an addition are two."""
    layers = [w for w in inventory(config).values() if w.name.startswith("layers.") and len(w.shape) > 1]
    per_token, of_states = remembered(config)
    attention = 2 * per_token * config.group_size * context
    products = sum(_of_a_token(math.prod(w.shape), w.name, config) for w in layers)
    return 2 * products + attention + 6 * of_states


def head_flop(config: ModelConfig) -> int:
    """Count the operations for the logits of one token."""
    return 2 * config.hidden_size * config.vocab_size


def _read_by_a_step(name: str, config: ModelConfig) -> bool:
    """Tell if a step reads a whole matrix; of an embedding that is no output matrix it reads one row."""
    return name != "embed_tokens" or config.tie_word_embeddings


def _of_a_token(size: int, name: str, config: ModelConfig) -> int:
    """Count the elements of a weight that one token uses: of experts, those that are chosen."""
    if config.experts is None or ".experts_" not in name:
        return size
    return size * config.experts.n_experts_per_token // config.experts.n_experts


def elapsed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def best_time(action: Callable[[], object], times: int = 5) -> float:
    """Measure the shortest time of several runs in seconds; the first run does not count."""
    action()
    return min(elapsed(action) for _ in range(times))


def processor() -> str:
    """Ask the system for the name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe(result: dict) -> list[str]:
    """Write the result of `measure` for a person, line by line."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    threads = "" if result["threads"] is None else f", {result['threads']} threads"
    copy, product = result["ceilings"]["copy_bytes_per_s"], result["ceilings"]["matmul_flop_per_s"]
    prefill, decode = result["prefill"], result["decode"]
    return [
        f"{result['model']}, {result['backend']}, weights {result['weights']}; {result['device_name']}{threads}",
        f"{versions}; {result['date']}",
        f"batch {result['batch']}, prompt {result['prompt']}, decoded {result['decoded']}, {result['rounds']} rounds",
        f"this machine: copy {copy / 1e9:.1f} GB/s, product {product / 1e9:.1f} GFLOP/s",
        f"prefill {_spread(prefill)}: {_flop(prefill)}",
        f"decode  {_spread(decode)}: {decode['bytes_per_s'] / 1e9:.1f} GB/s, {decode['share_of_copy']:.1%} of the "
        f"copy; {_flop(decode)}",
    ]


def _spread(part: dict) -> str:
    """Format the median, minimum and maximum speed in tokens/s."""
    spread = part["tokens_per_s"]
    return f"{spread['median']:.1f} ({spread['min']:.1f}-{spread['max']:.1f}) tokens/s"


def _flop(part: dict) -> str:
    """Format the speed in GFLOP/s, and as a share of the speed measured for a matrix product."""
    return f"{part['flop_per_s'] / 1e9:.1f} GFLOP/s, {part['share_of_matmul']:.1%} of the product"

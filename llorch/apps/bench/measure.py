"""Speed of a model, and its share of the machine's speed.

The rate of matrix products limits prefill, and the memory bandwidth for weights and KV cache limits decode. Both limits
(ceilings) are measured in the same run, on the same device, with the backend's library: by one large copy and one large
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
from llorch.files.residency import count_cached_numbers
from llorch.files.tensor_names import inventory
from llorch.model.model import Model
from llorch.ops.compiled.ggml import ggml_kernels
from llorch.runtime.errors import UserError

Progress = Callable[[str], None]  # gets lines for the user

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # larger than every cache of the processor
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}  # rows and columns; large enough to use the whole device


@dataclass(frozen=True)
class Load:
    """Tokens and prompts of every round."""

    prompt: int  # tokens of each prompt
    decode: int  # tokens decoded after each prompt
    batch: int  # prompts that run together
    rounds: int  # measured rounds, after one warm-up round

    def require(self, config: ModelConfig) -> None:
        """Raise UserError if prompt and decoded tokens do not fit the context."""
        if self.prompt + self.decode > config.max_position_embeddings:
            raise UserError(
                f"bench: {self.prompt} tokens of prompt and {self.decode} decoded do not fit the context of "
                f"{config.max_position_embeddings} tokens; use a smaller --prompt or --decode"
            )


@dataclass(frozen=True)
class Subject:
    """Description of the measured model and machine."""

    name: str
    config: ModelConfig
    backend: str  # `numpy`, or device and dtype of torch
    weights: str  # format of the weights in memory
    weight_bytes: int  # bytes of weights that a decode step reads
    cache_itemsize: int  # bytes per element of the KV cache
    device_name: str  # name by its manufacturer
    threads: int | None  # CPU threads; None if unknown
    versions: dict[str, str]  # of Python and the libraries that compute


@runtime_checkable
class TimedEngine(Protocol):
    """A model ready to be timed; every call returns after its work is complete, also on a GPU."""

    def prefill(self) -> None:
        """Run the prompts on an empty cache, up to the logits of their last tokens."""
        ...

    def decode(self) -> None:
        """Run the decode steps after the prompts."""
        ...

    def copy_rate(self) -> float:
        """Measure the speed of a large copy, in bytes per second read and written."""
        ...

    def product_rate(self) -> float:
        """Measure the speed of a large square matrix product, in FLOP/s."""
        ...


class NumpyEngine:
    """The NumPy model, see `TimedEngine`."""

    def __init__(self, model: Model, load: Load) -> None:
        """Hold model and load; raise UserError for more than one prompt at once."""
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
    """Describe a model that is measured in NumPy."""
    weights = model.weights
    matrices = [name for name in weights if _is_read_per_step(name, model.config)]
    packed_bytes = sum(_used_elements(weights.stored_bytes(name), name, model.config) for name in matrices)
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    float32_bytes = sum(4 * _used_elements(math.prod(weights.shape(name)), name, model.config) for name in matrices)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if weights.numerics.kernels == "ggml":
        versions["ggml"] = ggml_kernels().version
    return Subject(
        name=model.name,
        config=model.config,
        backend="numpy",
        weights="packed" if weights.packed else "float32",
        weight_bytes=packed_bytes if weights.packed else float32_bytes,
        cache_itemsize=np.dtype(weights.cache_dtype).itemsize,
        device_name=processor(),
        threads=max(pools, default=None),
        versions=versions,
    )


def measure(engine: TimedEngine, subject: Subject, load: Load, progress: Progress = lambda line: None) -> dict:
    """Time a model; return speeds (tokens/s), rates, ceilings and shares, with all facts needed to repeat the run."""
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
    """Convert seconds to speeds and shares of the ceilings; see `measure`."""
    prefill = {"tokens_per_s": speeds([load.batch * load.prompt / seconds for seconds in prefills])}
    decode = {"tokens_per_s": speeds([load.batch * load.decode / seconds for seconds in decodes])}
    steps_per_s = decode["tokens_per_s"]["median"] / load.batch
    prompts_per_s = prefill["tokens_per_s"]["median"] / (load.batch * load.prompt)
    context = load.prompt + load.decode / 2  # cached tokens of a decode step, on average
    bytes_per_step = step_bytes(subject, load.batch, context)
    decode_flop = load.batch * (token_flop(subject.config, context) + head_flop(subject.config))
    prefill_flop = load.batch * (load.prompt * token_flop(subject.config, load.prompt / 2) + head_flop(subject.config))
    prefill |= rates("flop", prefill_flop * prompts_per_s, "matmul", product)
    decode |= {"bytes_per_step": bytes_per_step} | rates("bytes", bytes_per_step * steps_per_s, "copy", copy)
    decode |= rates("flop", decode_flop * steps_per_s, "matmul", product)
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


def rates(quantity: str, rate: float, ceiling: str, ceiling_rate: float) -> dict[str, float]:
    """Return a rate (FLOP/s or bytes/s) and its share of a ceiling, by their names in the report."""
    return {f"{quantity}_per_s": rate, f"share_of_{ceiling}": rate / ceiling_rate}


def speeds(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of the rounds."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def prompts(load: Load, vocab_size: int) -> np.ndarray:
    """Make token ids (batch, prompt) that differ between rows; the speed does not depend on them."""
    grid = np.arange(load.prompt)[None] * 7 + np.arange(load.batch)[:, None] * 13
    return grid % vocab_size


def step_bytes(subject: Subject, batch: int, context: float) -> float:
    """Count the bytes of one decode step: weights, keys and values are read, float32 delta states read and written."""
    per_token, state_elements = count_cached_numbers(subject.config)
    return subject.weight_bytes + batch * (per_token * context * subject.cache_itemsize + 2 * 4 * state_elements)


def token_flop(config: ModelConfig, context: float) -> float:
    """Count the FLOP of one token in all layers; a multiply-add is two, an element of a delta state needs six."""
    layers = [w for w in inventory(config).values() if w.name.startswith("layers.") and len(w.shape) > 1]
    per_token, state_elements = count_cached_numbers(config)
    attention = 2 * per_token * config.group_size * context  # group_size query heads use a cached number
    products = sum(_used_elements(math.prod(w.shape), w.name, config) for w in layers)
    return 2 * products + attention + 6 * state_elements


def head_flop(config: ModelConfig) -> int:
    """Count the FLOP for the logits of one token."""
    return 2 * config.hidden_size * config.vocab_size


def _is_read_per_step(name: str, config: ModelConfig) -> bool:
    """Tell if a decode step reads a whole matrix: it reads only one row of an untied embedding."""
    return name != "embed_tokens" or config.tie_word_embeddings


def _used_elements(size: int, name: str, config: ModelConfig) -> int:
    """Count the elements (or bytes) of a weight that one token uses: only those of selected experts."""
    if config.experts is None or ".experts_" not in name:
        return size
    return size * config.experts.n_experts_per_token // config.experts.n_experts


def elapsed(action: Callable[[], object]) -> float:
    """Measure the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def best_time(action: Callable[[], object], times: int = 5) -> float:
    """Measure the shortest time of several runs, in seconds, after one warm-up run."""
    action()
    return min(elapsed(action) for _ in range(times))


def processor() -> str:
    """Return the system's name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe(report: dict) -> list[str]:
    """Format the report of `measure` as lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    threads = "" if report["threads"] is None else f", {report['threads']} threads"
    copy, product = report["ceilings"]["copy_bytes_per_s"], report["ceilings"]["matmul_flop_per_s"]
    prefill, decode = report["prefill"], report["decode"]
    return [
        f"{report['model']}, {report['backend']}, weights {report['weights']}; {report['device_name']}{threads}",
        f"{versions}; {report['date']}",
        f"batch {report['batch']}, prompt {report['prompt']}, decoded {report['decoded']}, {report['rounds']} rounds",
        f"this machine: copy {copy / 1e9:.1f} GB/s, product {product / 1e9:.1f} GFLOP/s",
        f"prefill {_show_speed(prefill)}: {_format_flop(prefill)}",
        f"decode  {_show_speed(decode)}: {decode['bytes_per_s'] / 1e9:.1f} GB/s, {decode['share_of_copy']:.1%} of the "
        f"copy; {_format_flop(decode)}",
    ]


def _show_speed(phase: dict) -> str:
    """Format the median, minimum and maximum speed in tokens/s."""
    spread = phase["tokens_per_s"]
    return f"{spread['median']:.1f} ({spread['min']:.1f}-{spread['max']:.1f}) tokens/s"


def _format_flop(phase: dict) -> str:
    """Format the speed in GFLOP/s, and as a share of the measured matrix product."""
    return f"{phase['flop_per_s'] / 1e9:.1f} GFLOP/s, {phase['share_of_matmul']:.1%} of the product"

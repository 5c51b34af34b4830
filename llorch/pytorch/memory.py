"""Memory of a run in torch, predicted before loading; a run that does not fit is refused with the figures.

Figures are upper estimates. On the CPU only process memory counts, because the system drops pages of a mapped file when
it needs memory. `residency`: quantised matrices are `decoded` to the dtype of the run, or stay `packed` in their codes.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.files.quant import GGMLType
from llorch.files.residency import Residency
from llorch.files.tensor_names import inventory
from llorch.ops.compiled.library import library
from llorch.pytorch.device import DTYPES, Target
from llorch.pytorch.distributed.sharding_plan import cut_axis, of_a_rank
from llorch.pytorch.load import BETWEEN_RETURNS, path_of
from llorch.pytorch.stored_kinds import kind_of, packed_bytes, stays_half
from llorch.runtime.memory import available_memory

CHUNK = {"cpu": 512, "cuda": 4096}  # tokens of a batch per prefill pass
SLOTS = 256  # a generation cache has a multiple of this many slots, so that later batches can use it
RUNTIME = {"cpu": 8 << 20, "cuda": 640 << 20}  # bytes of libraries, workspaces and kernel code
_CPU_KERNELS = (torch.float32, torch.bfloat16)  # dtypes in which CPU kernels multiply packed blocks
# oneDNN caches code and buffers for each product shape, at most 1,024 shapes. An expert has one row per token that
# selects it; measured 0.5 MB per shape (32 experts of 4 layers, 256 and 1,024 tokens, float32 and bfloat16).
_SHAPE, _MOST_SHAPES = 1 << 19, 1024
_TILE = 1 << 22  # elements of a packed matrix decoded at a time


class RunOptions(NamedTuple):
    """Options of a run that determine its memory."""

    residency: Literal["decoded", "packed"]
    batch: int
    n_tokens: int  # context per sequence
    n_ranks: int = 1  # ranks that share every layer


@dataclass(frozen=True)
class Need:
    """Bytes that a run needs."""

    weights: int  # on the device, decoded or packed
    cache: int
    activations: int  # of the largest pass
    logits: int  # logits of one token per sequence, and the copies of sampling
    loading: int  # peak of weights during loading; on the CPU with the temporary copies of `copies`
    copies: int  # host memory for the temporary copies that decode and convert the largest weight
    runtime: int  # libraries and their workspaces

    @property
    def peak(self) -> int:
        """Largest number of bytes on the device at any time."""
        return self.runtime + max(self.loading, self.weights + self.cache + self.activations + self.logits)


def predict(
    weights: Weights, target: Target, residency: Literal["decoded", "packed"], batch: int, n_tokens: int,
    n_ranks: int = 1,
) -> Need:  # fmt: skip
    """Predict bytes from shapes and types; only scales are read.

    `n_tokens` is the context per sequence, prompt and answer; the bytes are those of each of `n_ranks`.
    """
    config, width, kind = of_a_rank(weights.config, n_ranks), target.dtype.itemsize, target.device.type
    slots = min(-(-n_tokens // SLOTS) * SLOTS, config.max_position_embeddings) + 1  # and the slot of padding
    cache = sum(_cache_bytes(config, layer, slots, target.dtype) for layer in range(config.n_layers)) * batch
    names = [weight.name for weight in inventory(weights.config).values()]  # in order of loading
    loaded = [_kept_bytes(weights, name, target, residency, n_ranks) for name in names]
    copies = [_copies(weights, name, target, residency, n_ranks) for name in names]
    cpu_copies = copies if kind == "cpu" else [0] * len(copies)
    return Need(
        weights=sum(loaded),
        cache=cache + (cache // 2 if batch > 1 else 0),  # a batch with half of its sequences moves to a new cache
        activations=_activations(config, target, residency, batch, min(n_tokens, slots)),
        logits=batch * config.vocab_size * (width + 4 * 8),  # with float64 copies and sort order
        loading=max(n_loaded + copy for n_loaded, copy in zip(accumulate(loaded), cpu_copies, strict=True)),
        copies=max(copies),
        runtime=RUNTIME[kind]
        + _unused_bytes(weights, target, residency, n_ranks)
        + _n_product_shapes(config, target, batch, n_tokens) * _SHAPE,
    )


def require_memory(
    weights: Weights, target: Target, residency: Residency = "auto", *, batch: int = 1, n_tokens: int = 1024,
    from_blocks: bool = True, n_ranks: int = 1, n_here: int = 1,
) -> Literal["decoded", "packed"]:  # fmt: skip
    """Choose if matrices stay packed, and refuse a run that does not fit, with the figures, before loading.

    `auto` keeps matrices packed if a kernel multiplies from their blocks, which is smaller and faster: on CUDA, and on
    the CPU in float32 and bfloat16 with a C compiler. Otherwise, and without `from_blocks` (such kernels excluded),
    every use would decode them again, so `auto` decodes them once if they fit.

    If `n_ranks` share every layer, each needs its part; `n_here` of them are on this machine and share its memory.
    """
    free = free_memory(target.device) / n_here
    options = RunOptions("decoded", batch, n_tokens, n_ranks)
    if residency == "auto":
        residency = _choose_residency(weights, target, options, free, from_blocks=from_blocks)
    options = options._replace(residency=residency)
    need = predict(weights, target, *options)
    if need.peak > free:
        per_rank = f" for each of {n_here} ranks" if n_here > 1 else ""
        raise MemoryError(_refusal(weights, target, options, need, free, per_rank))
    if target.device.type != "cpu" and need.copies > available_memory():
        raise MemoryError(
            f"{weights.path}: loading needs {_gb(need.copies)} of host memory for its largest weight, "
            f"but {_gb(available_memory())} are free; close other programs"
        )
    return options.residency


def require_room(weights: Weights, target: Target, *, batch: int, n_tokens: int) -> None:
    """Refuse a batch that does not fit in addition to the loaded weights, before it is allocated."""
    free, residency = free_memory(target.device), _as_loaded(weights, target)

    def usage(sequences: int) -> int:
        need = predict(weights, target, residency, sequences, n_tokens)
        return need.cache + need.activations + need.logits

    if usage(batch) > free:
        fits = max((n for n in range(1, batch) if usage(n) <= free), default=0)
        remedy = f"{fits} sequences at once would fit" if fits else "use fewer tokens"
        raise MemoryError(
            f"generate: {batch} sequences of {n_tokens} tokens need {_gb(usage(batch))} on {target.device} in addition "
            f"to the weights, but {_gb(free)} are free; {remedy}"
        )


def room_of_pages(weights: Weights, target: Target, *, n_jobs: int, page: int, n_tokens: int | None = None) -> int:
    """Return the number of cache pages for `n_tokens` tokens of all jobs; MemoryError if they do not fit.

    Without `n_tokens`: the pages that all jobs can use, but at most those that fit in half of the free memory.
    """
    free, context = free_memory(target.device), weights.config.max_position_embeddings

    def need(n_pages: int) -> int:
        page_bytes = n_pages * page * _slot_bytes(weights.config, target.dtype)
        return page_bytes + _non_page_bytes(weights, target, n_jobs, min(n_pages * page, context))

    if n_tokens is None:
        max_pages = n_jobs * -(-context // page)
        return max(1, bisect_right(range(max_pages + 1), free / 2, key=need) - 1)
    n_pages = -(-n_tokens // page)
    if need(n_pages) > free:
        fits = max(0, bisect_right(range(n_pages), free, key=need) - 1) * page
        remedy = f"{fits} tokens would fit" if fits else "use fewer jobs"
        raise MemoryError(
            f"batch: {n_tokens} tokens of {n_jobs} jobs need {_gb(need(n_pages))} on {target.device} in addition "
            f"to the weights, but {_gb(free)} are free; {remedy}"
        )
    return n_pages


def _non_page_bytes(weights: Weights, target: Target, n_jobs: int, longest: int) -> int:
    """Sum the bytes besides pages and weights: delta net states, gathered contexts of a layer, one pass, its logits."""
    config, width, residency = weights.config, target.dtype.itemsize, _as_loaded(weights, target)
    nets = [layer for layer in range(config.n_layers) if config.layer(layer).mixer == "delta_net"]
    states = n_jobs * sum(_cache_bytes(config, layer, 0, target.dtype) for layer in nets)
    gathered = n_jobs * longest * 2 * config.kv_width * width
    passes = max(_activations(config, target, residency, n, longest) for n in (1, n_jobs))
    return states + gathered + passes + n_jobs * config.vocab_size * (width + 4 * 8)


def _as_loaded(weights: Weights, target: Target) -> Literal["decoded", "packed"]:
    """Return the residency to assume for loaded weights: packed if any of them can be, which adds a decoded tile."""
    return "packed" if any(kind_of(weights, name, target.device.type) for name in weights) else "decoded"


def _slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token in a page pool."""
    layers = range(config.n_layers)
    return sum(_cache_bytes(config, layer, 1, dtype) for layer in layers if config.layer(layer).mixer != "delta_net")


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device."""
    if device.type != "cuda":
        return available_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch for reuse
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def _choose_residency(
    weights: Weights, target: Target, decoded: RunOptions, free: float, *, from_blocks: bool
) -> Literal["decoded", "packed"]:
    """Choose packed weights if kernels multiply from their blocks, or if decoded weights do not fit."""
    if not any(kind_of(weights, name, target.device.type) for name in weights):
        return "decoded"
    if from_blocks and (target.device.type == "cuda" or (target.dtype in _CPU_KERNELS and library() is not None)):
        return "packed"
    return "decoded" if predict(weights, target, *decoded).peak <= free else "packed"


def _stays_packed(weights: Weights, name: str, target: Target, residency: str) -> bool:
    return residency == "packed" and kind_of(weights, name, target.device.type) is not None


def _kept_bytes(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> int:
    """Return the bytes of a loaded weight, or of a rank's part of it."""
    n_parts = 1 if cut_axis(path_of(name)) is None else n_ranks
    if _stays_packed(weights, name, target, residency):
        return packed_bytes(weights, name) // n_parts
    is_half = _stays_half(weights, name, target, residency, n_ranks)
    return math.prod(weights.shape(name)) * (2 if is_half else target.dtype.itemsize) // n_parts


def _stays_half(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> bool:
    """Tell if a matrix, or a rank's part of it, stays in 16 bits next to packed matrices."""
    columns = weights.shape(name)[-1] // (n_ranks if cut_axis(path_of(name)) == 1 else 1)
    return residency == "packed" and stays_half(weights, name, columns, target.dtype, target.device)


def _copies(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> int:
    """Estimate the bytes of temporary copies of a weight while it is read, decoded and converted, before it is cut."""
    elements, kind = math.prod(weights.shape(name)), weights.stored_type(name)
    is_packed = _stays_packed(weights, name, target, residency)
    if is_packed and not isinstance(kind, GGMLType):
        return 4 * elements  # codes in one byte each, repacked codes, and scales
    if is_packed or _stays_half(weights, name, target, residency, n_ranks):  # read some rows at a time
        packed_copy = 0 if n_ranks == 1 and target.device.type == "cpu" else packed_bytes(weights, name) or 2 * elements
        return min(BETWEEN_RETURNS, 4 * elements) + packed_copy
    decoded = 0 if kind is GGMLType.F32 and n_ranks == 1 else 4 * elements
    converted = 0 if target.dtype is torch.float32 else 4 * elements
    return decoded + converted


def _unused_bytes(weights: Weights, target: Target, residency: str, n_ranks: int) -> int:
    """Estimate the bytes that are unused between matrices on the CPU.

    The C library does not return memory between decoded matrices: at most a tenth of their bytes was measured. Packed
    matrices are in chunks of 64 MB (`LargePages`), whose last page of 2 MB is partly used.
    """
    if target.device.type != "cpu":
        return 0
    decoded = packed = 0
    for name in weights:
        n_bytes = _kept_bytes(weights, name, target, residency, n_ranks)
        if _stays_packed(weights, name, target, residency):
            packed += n_bytes
        elif weights.stored_type(name) is not GGMLType.F32:
            decoded += n_bytes
    return decoded // 10 + packed // 32


def _n_product_shapes(config: ModelConfig, target: Target, batch: int, n_tokens: int) -> int:
    """Count the different shapes of expert products, at most: two for each number of rows (gate and up, down)."""
    if config.experts is None or target.device.type != "cpu":
        return 0
    n_passes = -(-batch * n_tokens // CHUNK["cpu"])
    n_calls = n_passes * config.experts.n_experts * sum(config.layer(i).experts for i in range(config.n_layers))
    n_rows = min(batch * n_tokens, CHUNK["cpu"]) * config.experts.n_experts_per_token
    return min(2 * min(n_calls, n_rows), _MOST_SHAPES)


def _activations(config: ModelConfig, target: Target, residency: str, batch: int, n_tokens: int) -> int:
    """Return the bytes of one pass: hidden states, projections, feed-forward block, mask and scores."""
    width = target.dtype.itemsize
    seq = min(n_tokens, max(1, CHUNK[target.device.type] // batch))
    rows = 4 * config.hidden_size + max(_elements_per_token(config, layer) for layer in range(config.n_layers))
    scores = config.n_heads * min(seq, 64) * n_tokens * 4 if target.device.type == "cpu" else 0
    mask = seq * n_tokens * (1 + width)
    tile = 3 * _TILE * 4 if residency == "packed" else 0
    return batch * (seq * rows * width + scores + mask) + tile


def _cache_bytes(config: ModelConfig, layer: int, slots: int, dtype: torch.dtype) -> int:
    """Return the cache bytes of a layer and a sequence: keys and values, or twice the state of a delta net."""
    net = config.delta_net
    if net is None or config.layer(layer).mixer != "delta_net":
        return 2 * config.kv_width * slots * dtype.itemsize
    matrices = net.n_value_heads * net.key_head_dim * net.value_head_dim
    return 2 * ((net.conv_kernel - 1) * net.conv_width * dtype.itemsize + matrices * max(dtype.itemsize, 4))


def _elements_per_token(config: ModelConfig, layer: int) -> int:
    """Estimate the elements per token that the modules of a block compute."""
    layer_config, net, experts = config.layer(layer), config.delta_net, config.experts
    mixer, feed = 4 * config.q_width + 2 * config.kv_width, 4 * config.intermediate_size
    if net is not None and layer_config.mixer == "delta_net":  # partly in float32
        mixer = 2 * (3 * net.conv_width + 4 * net.value_width)
    if experts is not None and layer_config.experts:
        selected = experts.n_experts_per_token * (4 * experts.expert_size + 4 * config.hidden_size)
        feed = selected + 4 * experts.shared_size + 6 * experts.n_experts
    return mixer + feed


def _refusal(weights: Weights, target: Target, options: RunOptions, need: Need, free: float, per_rank: str) -> str:
    parts = {"weights": need.weights, "cache": need.cache, "activations": need.activations + need.logits}
    figures = ", ".join(f"{name} {_gb(n_bytes)}" for name, n_bytes in parts.items())
    return (
        f"{weights.path}: needs about {_gb(need.peak)} on {target.device} ({target.dtype_name}, {options.residency}, "
        f"batch {options.batch}, {options.n_tokens} tokens: {figures}), {_gb(free)} are free{per_rank}; "
        + _suggestion(weights, target, options, free)
    )


def _suggestion(weights: Weights, target: Target, options: RunOptions, free: float) -> str:
    """Return the least restrictive change with which the run fits."""
    for description, other_target, alternative in _alternatives(weights, target, options):
        peak = predict(weights, other_target, *alternative).peak
        if peak <= free:
            return f"{description} would need {_gb(peak)}"
    return "use a smaller model or a smaller --dtype"


def _alternatives(weights: Weights, target: Target, options: RunOptions) -> Iterator[tuple[str, Target, RunOptions]]:
    """Yield cheaper options: smaller batch, shorter context, packed weights, bfloat16."""
    half = Target(target.device, DTYPES["bfloat16"])
    is_packable = options.residency == "decoded" and any(kind_of(weights, name, target.device.type) for name in weights)
    packed = options._replace(residency="packed")
    for batch in _halvings(options.batch, least=1):
        yield f"a batch of {batch}", target, options._replace(batch=batch)
    for n_tokens in _halvings(options.n_tokens, least=256):
        yield f"{n_tokens} tokens of context", target, options._replace(n_tokens=n_tokens)
    if is_packable:
        yield "--weights packed", target, packed
    if target.dtype.itemsize > 2:
        yield "--dtype bfloat16", half, options
        if is_packable:
            yield "--dtype bfloat16 --weights packed", half, packed
        for n_tokens in _halvings(options.n_tokens, least=256):
            yield f"--dtype bfloat16 with {n_tokens} tokens of context", half, options._replace(n_tokens=n_tokens)


def _halvings(n: int, *, least: int) -> Iterator[int]:
    """Yield n / 2, n / 4, ... down to `least`."""
    while n // 2 >= least:
        n //= 2
        yield n


def _gb(n_bytes: int | float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"

"""Memory of a run in torch, known before anything is loaded: what does not fit is refused with the figures.

Upper estimates. On the CPU only memory of the process counts: pages of a mapped file are given back when they are
needed elsewhere.
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
from llorch.pytorch.device import DTYPES, Target
from llorch.pytorch.distributed.sharding_plan import cut_axis, of_a_rank
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.load import BETWEEN_RETURNS, path_of
from llorch.pytorch.stored_kinds import kind_of, packed_bytes, stays_half
from llorch.runtime.memory import available_memory

CHUNK = {"cpu": 512, "cuda": 4096}  # tokens of a batch per pass of long prompts
SLOTS = 256  # caches for generation are whole multiples
RUNTIME = {"cpu": 8 << 20, "cuda": 640 << 20}  # libraries, their workspaces, code of kernels
_CPU_KERNELS = (torch.float32, torch.bfloat16)  # dtypes in which they multiply from blocks
# oneDNN keeps code and room for each shape that it multiplied, 1,024 of them at most. Experts have as many rows as
# chose them: 0.5 MB a shape were seen (32 experts of 4 layers, 256 and 1,024 tokens, float32 and bfloat16).
_SHAPE, _MOST_SHAPES = 1 << 19, 1024
_TILE = 1 << 22  # elements of a packed matrix that are decoded at once


class Wanted(NamedTuple):
    """The options of a run that decide its memory."""

    residency: Literal["decoded", "packed"]
    batch: int
    n_tokens: int  # of context, per sequence
    n_ranks: int = 1  # that share every layer


@dataclass(frozen=True)
class Need:
    """Bytes that a run needs."""

    weights: int  # on the device, in the dtype or packed
    cache: int
    activations: int  # of the largest pass
    logits: int  # of one token per sequence, with what sampling makes of them
    loading: int  # of weights while they are loaded, at most; on the CPU with the copies made meanwhile
    copies: int  # of the largest weight while it is decoded and converted, in the memory of the host
    runtime: int  # libraries and their workspaces

    @property
    def peak(self) -> int:
        """Largest number of bytes on the device at any time."""
        return self.runtime + max(self.loading, self.weights + self.cache + self.activations + self.logits)


def predict(
    weights: Weights, target: Target, residency: Literal["decoded", "packed"], batch: int, n_tokens: int,
    n_ranks: int = 1,
) -> Need:  # fmt: skip
    """Count bytes from shapes and types; only scales are read.

    `n_tokens` is the context per sequence, prompt and answer. With `n_ranks` that share every layer, the bytes are
    those of each rank.
    """
    config, width, kind = of_a_rank(weights.config, n_ranks), target.dtype.itemsize, target.device.type
    slots = min(-(-n_tokens // SLOTS) * SLOTS, config.max_position_embeddings) + 1
    cache = sum(_remembered(config, layer, slots, target.dtype) for layer in range(config.n_layers)) * batch
    names = [row.name for row in inventory(weights.config).values()]  # in order of loading
    kept = [_kept_bytes(weights, name, target, residency, n_ranks) for name in names]
    copies = [_copies(weights, name, target, residency, n_ranks) for name in names]
    beside = copies if kind == "cpu" else [0] * len(copies)
    return Need(
        weights=sum(kept),
        cache=cache + (cache // 2 if batch > 1 else 0),  # a batch that lost half of its sequences moves to a new one
        activations=_activations(config, target, residency, batch, min(n_tokens, slots)),
        logits=batch * config.vocab_size * (width + 4 * 8),  # with copies in float64 and an order
        loading=max(before + copy for before, copy in zip(accumulate(kept), beside, strict=True)),
        copies=max(copies),
        runtime=RUNTIME[kind]
        + _lost(weights, target, residency, n_ranks)
        + _n_product_shapes(config, target, batch, n_tokens) * _SHAPE,
    )


def require_memory(
    weights: Weights, target: Target, residency: Residency = "auto", *, batch: int = 1, n_tokens: int = 1024,
    from_blocks: bool = True, n_ranks: int = 1, n_here: int = 1,
) -> Literal["decoded", "packed"]:  # fmt: skip
    """Choose where matrices lie, and refuse what does not fit, with the figures, before anything is loaded.

    `auto` keeps matrices packed where a kernel multiplies from their blocks, which is both less to keep and faster: on
    CUDA, and on the CPU in float32 and bfloat16 where a C compiler is at hand. Elsewhere every use would decode them
    anew, so that it decodes once if that fits; so it does without `from_blocks`, where such kernels are left out.

    If `n_ranks` share every layer, each needs its part; `n_here` of them take it from the same memory.
    """
    free = free_memory(target.device) / n_here
    wanted = Wanted("decoded", batch, n_tokens, n_ranks)
    if residency == "auto":
        residency = _choice(weights, target, wanted, free, from_blocks=from_blocks)
    wanted = wanted._replace(residency=residency)
    need = predict(weights, target, *wanted)
    if need.peak > free:
        each = f" for each of {n_here} ranks" if n_here > 1 else ""
        raise MemoryError(_refusal(weights, target, wanted, need, free, each))
    if target.device.type != "cpu" and need.copies > available_memory():
        raise MemoryError(
            f"{weights.path}: loading needs {_gb(need.copies)} of host memory for its largest weight, "
            f"but {_gb(available_memory())} are free; close other programs"
        )
    return wanted.residency


def require_room(weights: Weights, target: Target, *, batch: int, n_tokens: int) -> None:
    """Refuse a batch that does not fit beside the weights, which are loaded, before anything of it is made."""
    free, residency = free_memory(target.device), _as_loaded(weights)

    def room(sequences: int) -> int:
        need = predict(weights, target, residency, sequences, n_tokens)
        return need.cache + need.activations + need.logits

    if room(batch) > free:
        fits = max((n for n in range(1, batch) if room(n) <= free), default=0)
        remedy = f"{fits} sequences at once would fit" if fits else "use fewer tokens"
        raise MemoryError(
            f"generate: {batch} sequences of {n_tokens} tokens need {_gb(room(batch))} on {target.device} in addition "
            f"to the weights, but {_gb(free)} are free; {remedy}"
        )


def room_of_pages(weights: Weights, target: Target, *, n_jobs: int, page: int, n_tokens: int | None = None) -> int:
    """Count the pages of a pool for the contexts of some jobs; refused if they do not fit beside the loaded weights.

    Without a number of tokens: as many as all jobs can have, or as fit in half of the memory that is free.
    """
    free, context = free_memory(target.device), weights.config.max_position_embeddings

    def need(n_pages: int) -> int:
        own = n_pages * page * _slot(weights.config, target.dtype)
        return own + _beside_pages(weights, target, n_jobs, min(n_pages * page, context))

    if n_tokens is None:
        most = n_jobs * -(-context // page)
        return max(1, bisect_right(range(most + 1), free / 2, key=need) - 1)
    n_pages = -(-n_tokens // page)
    if need(n_pages) > free:
        fits = max(0, bisect_right(range(n_pages), free, key=need) - 1) * page
        remedy = f"{fits} tokens would fit" if fits else "use fewer jobs"
        raise MemoryError(
            f"batch: {n_tokens} tokens of {n_jobs} jobs need {_gb(need(n_pages))} on {target.device} in addition "
            f"to the weights, but {_gb(free)} are free; {remedy}"
        )
    return n_pages


def _beside_pages(weights: Weights, target: Target, n_jobs: int, longest: int) -> int:
    """Sum the bytes beside the pages: states, what is gathered of a layer, one pass and its logits."""
    config, width, residency = weights.config, target.dtype.itemsize, _as_loaded(weights)
    nets = [layer for layer in range(config.n_layers) if config.layer(layer).mixer == "delta_net"]
    states = n_jobs * sum(_remembered(config, layer, 0, target.dtype) for layer in nets)
    gathered = n_jobs * longest * 2 * config.kv_width * width
    passes = max(_activations(config, target, residency, n, longest) for n in (1, n_jobs))
    return states + gathered + passes + n_jobs * config.vocab_size * (width + 4 * 8)


def _as_loaded(weights: Weights) -> Literal["decoded", "packed"]:
    """Tell how the weights are loaded: packed if any of them can be."""
    return "packed" if any(kind_of(weights, name) for name in weights) else "decoded"


def _slot(config: ModelConfig, dtype: torch.dtype) -> int:
    """Count the bytes of a token in a pool."""
    layers = range(config.n_layers)
    return sum(_remembered(config, layer, 1, dtype) for layer in layers if config.layer(layer).mixer != "delta_net")


def free_memory(device: torch.device) -> float:
    """Return the bytes that can still be taken on a device."""
    if device.type != "cuda":
        return available_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def _choice(
    weights: Weights, target: Target, decoded: Wanted, free: float, *, from_blocks: bool
) -> Literal["decoded", "packed"]:
    """Choose packed weights if kernels read them (`from_blocks`), or if decoded weights do not fit."""
    if not any(kind_of(weights, name) for name in weights):
        return "decoded"
    if from_blocks and (target.device.type == "cuda" or (target.dtype in _CPU_KERNELS and library() is not None)):
        return "packed"
    return "decoded" if predict(weights, target, *decoded).peak <= free else "packed"


def _stays_packed(weights: Weights, name: str, residency: str) -> bool:
    return residency == "packed" and kind_of(weights, name) is not None


def _kept_bytes(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> int:
    """Count the bytes of a weight, or of a rank's part of it, once it is loaded."""
    n_parts = 1 if cut_axis(path_of(name)) is None else n_ranks
    if _stays_packed(weights, name, residency):
        return packed_bytes(weights, name) // n_parts
    halved = _stays_half(weights, name, target, residency, n_ranks)
    return math.prod(weights.shape(name)) * (2 if halved else target.dtype.itemsize) // n_parts


def _stays_half(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> bool:
    """Tell if a matrix, or a rank's part of it, stays in the two bytes of its file beside packed matrices."""
    columns = weights.shape(name)[-1] // (n_ranks if cut_axis(path_of(name)) == 1 else 1)
    return residency == "packed" and stays_half(weights, name, columns, target.dtype, target.device)


def _copies(weights: Weights, name: str, target: Target, residency: str, n_ranks: int) -> int:
    """Estimate the bytes of copies of a weight while it is read, decoded, reordered and converted, before it is cut."""
    elements, kind = math.prod(weights.shape(name)), weights.stored_type(name)
    packed = _stays_packed(weights, name, residency)
    if packed and not isinstance(kind, GGMLType):
        return 4 * elements  # codes, each in a byte, that are joined anew, and scales
    if packed or _stays_half(weights, name, target, residency, n_ranks):  # some rows at a time
        whole = 0 if n_ranks == 1 and target.device.type == "cpu" else packed_bytes(weights, name) or 2 * elements
        return min(BETWEEN_RETURNS, 4 * elements) + whole
    decoded = 0 if kind is GGMLType.F32 and n_ranks == 1 else 4 * elements
    converted = 0 if target.dtype is torch.float32 else 4 * elements
    return decoded + converted


def _lost(weights: Weights, target: Target, residency: str, n_ranks: int) -> int:
    """Estimate the bytes that lie unused between matrices on the CPU.

    The C library does not give back those between decoded matrices: at most a tenth of their bytes was seen. Packed
    ones lie in 64 MB at a time (`LargePages`), of which the last page of 2 MB is used in part.
    """
    if target.device.type != "cpu":
        return 0
    decoded = packed = 0
    for name in weights:
        kept = _kept_bytes(weights, name, target, residency, n_ranks)
        if _stays_packed(weights, name, residency):
            packed += kept
        elif weights.stored_type(name) is not GGMLType.F32:
            decoded += kept
    return decoded // 10 + packed // 32


def _n_product_shapes(config: ModelConfig, target: Target, batch: int, n_tokens: int) -> int:
    """Count the products of different shapes that experts make: two for each number of rows."""
    if config.experts is None or target.device.type != "cpu":
        return 0
    n_passes = -(-batch * n_tokens // CHUNK["cpu"])
    n_calls = n_passes * config.experts.n_experts * sum(config.layer(i).experts for i in range(config.n_layers))
    n_rows = min(batch * n_tokens, CHUNK["cpu"]) * config.experts.n_experts_per_token
    return min(2 * min(n_calls, n_rows), _MOST_SHAPES)


def _activations(config: ModelConfig, target: Target, residency: str, batch: int, n_tokens: int) -> int:
    """Count the bytes of one pass: hidden states, projections, feed-forward part, mask and scores."""
    width = target.dtype.itemsize
    seq = min(n_tokens, max(1, CHUNK[target.device.type] // batch))
    rows = 4 * config.hidden_size + max(_part_rows(config, layer) for layer in range(config.n_layers))
    scores = config.n_heads * min(seq, 64) * n_tokens * 4 if target.device.type == "cpu" else 0
    mask = seq * n_tokens * (1 + width)
    tile = 3 * _TILE * 4 if residency == "packed" else 0
    return batch * (seq * rows * width + scores + mask) + tile


def _remembered(config: ModelConfig, layer: int, slots: int, dtype: torch.dtype) -> int:
    """Count the bytes of the cache for a layer and a sequence: keys and values, or twice the state of a delta net."""
    net = config.delta_net
    if net is None or config.layer(layer).mixer != "delta_net":
        return 2 * config.kv_width * slots * dtype.itemsize
    matrices = net.n_value_heads * net.key_head_dim * net.value_head_dim
    return 2 * ((net.conv_kernel - 1) * net.conv_width * dtype.itemsize + matrices * max(dtype.itemsize, 4))


def _part_rows(config: ModelConfig, layer: int) -> int:
    """Count the elements of a token that the parts of a block make."""
    this, net, experts = config.layer(layer), config.delta_net, config.experts
    mixer, feed = 4 * config.q_width + 2 * config.kv_width, 4 * config.intermediate_size
    if net is not None and this.mixer == "delta_net":  # much of it in float32
        mixer = 2 * (3 * net.conv_width + 4 * net.value_width)
    if experts is not None and this.experts:
        chosen = experts.n_experts_per_token * (4 * experts.expert_size + 4 * config.hidden_size)
        feed = chosen + 4 * experts.shared_size + 6 * experts.n_experts
    return mixer + feed


def _refusal(weights: Weights, target: Target, wanted: Wanted, need: Need, free: float, each: str) -> str:
    parts = {"weights": need.weights, "cache": need.cache, "activations": need.activations + need.logits}
    figures = ", ".join(f"{name} {_gb(n_bytes)}" for name, n_bytes in parts.items())
    return (
        f"{weights.path}: needs about {_gb(need.peak)} on {target.device} ({target.dtype_name}, {wanted.residency}, "
        f"batch {wanted.batch}, {wanted.n_tokens} tokens: {figures}), {_gb(free)} are free{each}; "
        + _suggestion(weights, target, wanted, free)
    )


def _suggestion(weights: Weights, target: Target, wanted: Wanted, free: float) -> str:
    """Name the first change, from the least painful on, with which the run fits."""
    for words, other_target, other in _alternatives(weights, target, wanted):
        peak = predict(weights, other_target, *other).peak
        if peak <= free:
            return f"{words} would need {_gb(peak)}"
    return "use a smaller model or a smaller --dtype"


def _alternatives(weights: Weights, target: Target, wanted: Wanted) -> Iterator[tuple[str, Target, Wanted]]:
    """Yield cheaper requests, as a hint for the user: smaller batch, shorter context, packed weights, bfloat16."""
    half = Target(target.device, DTYPES["bfloat16"])
    packable = wanted.residency == "decoded" and any(kind_of(weights, name) for name in weights)
    packed = wanted._replace(residency="packed")
    for batch in _halvings(wanted.batch, least=1):
        yield f"a batch of {batch}", target, wanted._replace(batch=batch)
    for n_tokens in _halvings(wanted.n_tokens, least=256):
        yield f"{n_tokens} tokens of context", target, wanted._replace(n_tokens=n_tokens)
    if packable:
        yield "--weights packed", target, packed
    if target.dtype.itemsize > 2:
        yield "--dtype bfloat16", half, wanted
        if packable:
            yield "--dtype bfloat16 --weights packed", half, packed
        for n_tokens in _halvings(wanted.n_tokens, least=256):
            yield f"--dtype bfloat16 with {n_tokens} tokens of context", half, wanted._replace(n_tokens=n_tokens)


def _halvings(n: int, *, least: int) -> Iterator[int]:
    while n // 2 >= least:
        n //= 2
        yield n


def _gb(n_bytes: int | float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"

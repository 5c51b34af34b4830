"""Predicted needs of LoRA training on a mesh, from shapes alone: bytes of a rank, messages of a step, seconds.

    memory      bytes kept by a rank, and bytes added while a step runs
    messages    every collective of a step, in bytes: of a sum its input, of a gather its output, of a reduce-scatter
                its input; a ring moves (n - 1) / n of that, for a sum twice
    step_time   seconds from assumptions about a machine, see `Machine`; nothing of it is measured

It is written from the description in `llorch.pytorch.distributed.parallel`, and knows none of its code. Every layer is
dense and has adapters. If sizes are not divided evenly, the figures are those of the first rank, which has most.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llorch.families.config import ModelConfig

WIDE = 4  # bytes of float32: adapters, gradients, moments, and widened intermediate values
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


@dataclass(frozen=True)
class Job:
    """Settings of a training on a mesh."""

    config: ModelConfig
    dp: int
    tp: int
    rows: int  # rows of a forward pass, distributed over dp
    tokens: int  # tokens of each row
    r: int = 8
    modules: tuple[str, ...] = (*COLUMNS, *ROWS)
    width: int = 2  # bytes of a weight
    recomputed: bool = False  # --gradient-checkpointing
    chunk: int = 256  # rows of logits at a time
    passes: int = 1  # --accumulation

    @property
    def own_tokens(self) -> int:
        """Tokens of a forward pass on a rank."""
        return -(-self.rows // self.dp) * self.tokens


@dataclass(frozen=True)
class Array:
    """Share of a tensor on a rank of tp."""

    shape: tuple[int, ...]
    width: int  # bytes of an element
    kind: str = ""  # A or B for an adapter, else empty
    tp_axis: int | None = None  # axis that tp shards; None: replicated

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def share(self, dp: int) -> int:
        """Count the bytes of one rank's shard along dp."""
        return -(-self.shape[0] // dp) * math.prod(self.shape[1:]) * self.width

    def gathered(self, dp: int) -> int:
        """Count the bytes of all shards, which have equal sizes."""
        return self.share(dp) * dp


def block(job: Job) -> list[Array]:
    """List the frozen tensors of one layer."""
    config = job.config
    arrays = [Array((config.hidden_size,), job.width)] * 2
    arrays += [Array((config.head_dim,), job.width)] * (2 if config.qk_norm else 0)
    for name, (n_in, n_out) in _matrices(config).items():
        arrays.append(_shard(job, name, (n_out, n_in), job.width))
        if config.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
            arrays.append(Array((n_out // job.tp,), job.width))
        if config.o_bias and name == "o_proj":
            arrays.append(Array((n_out,), job.width))
    return arrays


def adapters(job: Job) -> list[Array]:
    """List the trained tensors of one layer; tp shards A or B, the one with the sharded axis of the matrix."""
    arrays = []
    for name in job.modules:
        n_in, n_out = _matrices(job.config)[name]
        is_column = name in COLUMNS
        width_in, width_out = (n_in if is_column else n_in // job.tp), (n_out // job.tp if is_column else n_out)
        arrays.append(Array((job.r, width_in), WIDE, "A", None if is_column else 1))
        arrays.append(Array((width_out, job.r), WIDE, "B", 0 if is_column else None))
    return arrays


def unsharded(job: Job) -> list[Array]:
    """List embedding, last norm and head, which tp does not shard."""
    config = job.config
    table = Array((config.vocab_size, config.hidden_size), job.width)
    return [table] * (1 if config.tie_word_embeddings else 2) + [Array((config.hidden_size,), job.width)]


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output width of each matrix of a layer."""
    hidden, q, kv, inter = config.hidden_size, config.q_width, config.kv_width, config.intermediate_size
    return {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, inter), "up_proj": (hidden, inter), "down_proj": (inter, hidden),
    }  # fmt: skip


def _shard(job: Job, name: str, shape: tuple[int, int], width: int) -> Array:
    n_out, n_in = shape
    return Array((n_out // job.tp, n_in) if name in COLUMNS else (n_out, n_in // job.tp), width)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank by kind."""

    weights: int  # frozen weights, its dp shard of its tp shard
    adapters: int
    gradients: int  # during a step; as large as the adapters
    moments: int
    gathered: int  # embedding, head and norm, and two blocks: the running one and the prefetched one
    activations: int  # kept for the backward pass, and those of the block that is being computed or recomputed
    logits: int  # one chunk

    @property
    def between_steps(self) -> int:
        """Bytes between steps."""
        return self.weights + self.adapters + self.moments

    @property
    def peak(self) -> int:
        """Bytes during a step at most; logits are freed before blocks are gathered for the backward pass."""
        return self.between_steps + self.gradients + self.gathered + self.activations + self.logits


def memory(job: Job) -> Memory:
    """Count the bytes of a rank."""
    layers, dp = job.config.n_layers, job.dp
    adapter_bytes = layers * sum(array.share(dp) for array in adapters(job))
    block_bytes = sum(array.gathered(dp) for array in (*block(job), *adapters(job)))
    rest_bytes = sum(array.gathered(dp) for array in unsharded(job))
    block_activations = activations(job)
    inputs = job.own_tokens * job.config.hidden_size * job.width
    saved = layers * inputs + block_activations if job.recomputed else layers * block_activations
    return Memory(
        weights=layers * sum(array.share(dp) for array in block(job))
        + sum(array.share(dp) for array in unsharded(job)),
        adapters=adapter_bytes,
        gradients=adapter_bytes,
        moments=2 * adapter_bytes,
        gathered=rest_bytes + 2 * block_bytes if dp * job.tp > 1 else 0,  # also with a single shard
        activations=saved + _gradient_bytes(job),
        logits=min(job.chunk, job.own_tokens) * job.config.vocab_size * (job.width + (WIDE if job.width < WIDE else 0)),
    )


def activations(job: Job) -> int:
    """Count the bytes that one block keeps for its backward pass.

    Both norms keep their input, widened. Adapters keep the input of their matrices, once per shared input, and the
    input of B; the input of down is computed again. Attention keeps q, k, v and its result. SwiGLU keeps gate and up.
    """
    config, tp, width = job.config, job.tp, job.width
    q, kv, inter = config.q_width // tp, config.kv_width // tp, config.intermediate_size // tp
    per_token = 2 * config.hidden_size * WIDE + (2 * inter + 2 * q + 2 * kv) * width
    for names in (COLUMNS[:3], COLUMNS[3:]):
        per_token += config.hidden_size * width * any(name in job.modules for name in names)
    return (per_token + job.r * WIDE * len(job.modules)) * job.own_tokens


def _gradient_bytes(job: Job) -> int:
    """Count the bytes of gradients in the backward pass of a block at a time: those of SwiGLU, widened."""
    return 3 * job.own_tokens * job.config.intermediate_size // job.tp * WIDE


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step of a rank."""

    content: str
    axis: str  # tp or dp
    kind: str  # all-reduce, all-gather, reduce-scatter
    size: int  # bytes of one message, see the module docstring
    count: int

    @property
    def volume(self) -> int:
        """Bytes of all messages."""
        return self.size * self.count

    def moved(self, n_ranks: int) -> float:
        """Count the bytes that a rank sends in a ring."""
        return self.volume * (2 if self.kind == "all-reduce" else 1) * (n_ranks - 1) / n_ranks


def messages(job: Job) -> list[Message]:
    """List every collective of a step."""
    tp_messages = [*_sum_activations(job), *_sum_factor_gradients(job)] if job.tp > 1 else []
    dp_messages = [*_gather_parameters(job), _reduce_gradients(job)] if job.dp > 1 else []
    loss = [Message("loss", "dp", "all-reduce", 8, 1)] if job.dp * job.tp > 1 else []
    return [*tp_messages, *dp_messages, *_gather_gradients(job), *loss]


def _sum_activations(job: Job) -> Iterator[Message]:
    """Yield the sums of tp: two forward, two backward in each layer, one less because embeddings need no gradient.

    A recomputed block stops when nothing more is missing, before its last sum.
    """
    layers, size = job.config.n_layers, job.own_tokens * job.config.hidden_size * job.width
    yield Message("outputs, forward", "tp", "all-reduce", size, 2 * layers * job.passes)
    yield Message("inputs, backward", "tp", "all-reduce", size, (2 * layers - 1) * job.passes)
    if job.recomputed:
        yield Message("outputs, made again", "tp", "all-reduce", size, layers * job.passes)


def _sum_factor_gradients(job: Job) -> Iterator[Message]:
    for array in adapters(job):
        if array.tp_axis is None:
            yield Message("gradient of a factor", "tp", "all-reduce", array.size * WIDE, job.config.n_layers)


def _gather_parameters(job: Job) -> Iterator[Message]:
    block_bytes = sum(array.gathered(job.dp) for array in (*block(job), *adapters(job)))
    yield Message("a block", "dp", "all-gather", block_bytes, 2 * job.config.n_layers * job.passes)
    rest_bytes = sum(array.gathered(job.dp) for array in unsharded(job))
    yield Message("embedding, norm and head", "dp", "all-gather", rest_bytes, job.passes)


def _reduce_gradients(job: Job) -> Message:
    size = sum(array.gathered(job.dp) for array in adapters(job))
    return Message("gradients of a block", "dp", "reduce-scatter", size, job.config.n_layers)


def _gather_gradients(job: Job) -> Iterator[Message]:
    """Yield the gathers for the global gradient norm, along dp and then along tp."""
    if job.dp > 1:
        size = sum(array.gathered(job.dp) for array in adapters(job))
        yield Message("gradients for the norm", "dp", "all-gather", job.config.n_layers * size, 1)
    if job.tp > 1:
        size = sum(array.size * WIDE * job.tp for array in adapters(job) if array.tp_axis is not None)
        yield Message("gradients for the norm", "tp", "all-gather", job.config.n_layers * size, 1)


@dataclass(frozen=True)
class Machine:
    """Assumptions about GPUs: figures of an H100's data sheet, and guessed shares of them."""

    flops: float = 989e12  # dense bfloat16
    memory: float = 3.35e12  # bytes a second
    inside: float = 450e9  # bytes a second of a GPU to others of its machine, one way
    between: float = 50e9  # bytes a second to other machines
    per_machine: int = 8
    flops_share: float = 0.5
    memory_share: float = 0.8
    network_share: float = 0.7
    latency: float = 10e-6  # seconds per message


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause."""

    compute: float
    tp: float
    dp: float

    @property
    def one_after_the_other(self) -> float:
        """Seconds without any overlap."""
        return self.compute + self.tp + self.dp

    @property
    def overlapped(self) -> float:
        """Seconds if dp messages overlap with computation; tp messages block it."""
        return max(self.compute + self.tp, self.dp)


def flop(job: Job) -> float:
    """Count the operations of a rank in a step: frozen matrices forward, for input gradients, and recomputed."""
    config, repeats = job.config, int(job.recomputed)
    matrices = sum(n_in * n_out for n_in, n_out in _matrices(config).values()) * config.n_layers / job.tp
    attention = 2 * job.tokens * config.q_width * config.n_layers / job.tp  # half of it is masked
    n_trained = sum(array.size for array in adapters(job)) * config.n_layers
    head = config.vocab_size * config.hidden_size
    per_token = matrices * (4 + 2 * repeats) + attention * (3 + repeats) + n_trained * (6 + 2 * repeats) + head * 4
    return per_token * job.own_tokens * job.passes


def step_time(job: Job, machine: Machine) -> StepTime:
    """Estimate the seconds: the slower of arithmetic and memory, plus the messages of both axes."""
    weights = sum(array.size for array in block(job)) * job.config.n_layers + sum(
        array.size for array in unsharded(job)
    )
    touched = weights * job.width * (2 + job.recomputed) + 2 * job.config.n_layers * activations(job)
    arithmetic = flop(job) / (machine.flops * machine.flops_share)
    return StepTime(
        compute=max(arithmetic, touched * job.passes / (machine.memory * machine.memory_share)),
        tp=_message_seconds(job, machine, "tp", job.tp, job.tp <= machine.per_machine),
        dp=_message_seconds(job, machine, "dp", job.dp, job.dp * job.tp <= machine.per_machine),
    )


def _message_seconds(job: Job, machine: Machine, axis: str, n_ranks: int, inside: bool) -> float:
    speed = (machine.inside if inside else machine.between) * machine.network_share
    axis_messages = [message for message in messages(job) if message.axis == axis]
    return sum(message.moved(n_ranks) / speed + message.count * machine.latency for message in axis_messages)

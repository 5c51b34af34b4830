"""Needs of a LoRA training on a mesh, from shapes alone: bytes of a rank, messages of a step, seconds on paper.

    memory      what a rank keeps, and what comes on top while a step runs
    messages    every collective of a step, in bytes: of a sum what is summed, of a gather what comes out, of a
                reduce-scatter what goes in; a ring moves (n - 1) / n of that, for a sum twice
    step_time   seconds from assumptions about a machine, see `Machine`; nothing of it is measured

It is written from the description in `llorch.pytorch.distributed.parallel`, and knows none of its code. Every layer is
dense and has adapters; where sizes are not divided evenly it is the first rank, which has most, that is described.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llorch.families.config import ModelConfig

WIDE = 4  # bytes of float32: adapters, gradients, moments, and what is computed widened
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


@dataclass(frozen=True)
class Job:
    """A training on a mesh."""

    config: ModelConfig
    dp: int
    tp: int
    rows: int  # of a forward pass, shared out over dp
    tokens: int  # of each row
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
    """Share of a tensor that a rank of tp has."""

    shape: tuple[int, ...]
    width: int  # bytes of an element
    kind: str = ""  # A or B, of an adapter
    tp_axis: int | None = None  # along which tp cuts it; None: all ranks have the same

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def share(self, dp: int) -> int:
        """Count the bytes that one rank of dp keeps."""
        return -(-self.shape[0] // dp) * math.prod(self.shape[1:]) * self.width

    def gathered(self, dp: int) -> int:
        """Count the bytes of all shares, which have one size."""
        return self.share(dp) * dp


def block(job: Job) -> list[Array]:
    """List the frozen tensors of one layer."""
    config = job.config
    found = [Array((config.hidden_size,), job.width)] * 2
    found += [Array((config.head_dim,), job.width)] * (2 if config.qk_norm else 0)
    for name, (n_in, n_out) in _matrices(config).items():
        found.append(_cut(job, name, (n_out, n_in), job.width))
        if config.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
            found.append(Array((n_out // job.tp,), job.width))
        if config.o_bias and name == "o_proj":
            found.append(Array((n_out,), job.width))
    return found


def adapters(job: Job) -> list[Array]:
    """List the trained tensors of one layer; tp cuts the one of A and B that has the cut axis of the matrix."""
    found = []
    for name in job.modules:
        n_in, n_out = _matrices(job.config)[name]
        columns = name in COLUMNS
        a, b = (n_in if columns else n_in // job.tp), (n_out // job.tp if columns else n_out)
        found.append(Array((job.r, a), WIDE, "A", None if columns else 1))
        found.append(Array((b, job.r), WIDE, "B", 0 if columns else None))
    return found


def rest(job: Job) -> list[Array]:
    """List embedding, last norm and head, which tp does not cut."""
    config = job.config
    table = Array((config.vocab_size, config.hidden_size), job.width)
    return [table] * (1 if config.tie_word_embeddings else 2) + [Array((config.hidden_size,), job.width)]


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the width in and out of each matrix of a layer."""
    hidden, q, kv, inter = config.hidden_size, config.q_width, config.kv_width, config.intermediate_size
    return {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, inter), "up_proj": (hidden, inter), "down_proj": (inter, hidden),
    }  # fmt: skip


def _cut(job: Job, name: str, shape: tuple[int, int], width: int) -> Array:
    n_out, n_in = shape
    return Array((n_out // job.tp, n_in) if name in COLUMNS else (n_out, n_in // job.tp), width)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: int  # frozen, its share of its part
    adapters: int
    gradients: int  # as large as the adapters, while a step runs
    moments: int
    gathered: int  # embedding, head and norm during a pass, and two blocks: one that runs, one that arrives
    activations: int  # kept for the backward pass, and of one block what is made again or is being made
    logits: int  # one chunk

    @property
    def kept(self) -> int:
        """Between steps."""
        return self.weights + self.adapters + self.moments

    @property
    def peak(self) -> int:
        """While a step runs: logits are gone when the blocks are put together for the backward pass."""
        return self.kept + self.gradients + self.gathered + self.activations + self.logits


def memory(job: Job) -> Memory:
    """Count the bytes of a rank."""
    layers, dp = job.config.n_layers, job.dp
    trained = layers * sum(each.share(dp) for each in adapters(job))
    one_block = sum(each.gathered(dp) for each in (*block(job), *adapters(job)))
    whole_rest = sum(each.gathered(dp) for each in rest(job))
    of_block = activations(job)
    inputs = job.own_tokens * job.config.hidden_size * job.width
    kept = layers * inputs + of_block if job.recomputed else layers * of_block
    return Memory(
        weights=layers * sum(each.share(dp) for each in block(job)) + sum(each.share(dp) for each in rest(job)),
        adapters=trained,
        gradients=trained,
        moments=2 * trained,
        gathered=whole_rest + 2 * one_block if dp * job.tp > 1 else 0,  # also where there is one share
        activations=kept + _passing(job),
        logits=min(job.chunk, job.own_tokens) * job.config.vocab_size * (job.width + (WIDE if job.width < WIDE else 0)),
    )


def activations(job: Job) -> int:
    """Count the bytes that one block keeps for its backward pass.

    Both norms keep their input, widened; adapters the input of their matrices, which those beside each other share, and
    what goes into B; attention q, k, v and its result; SwiGLU gate, silu(gate) and up, widened.
    """
    config, tp, width = job.config, job.tp, job.width
    q, kv, inter = config.q_width // tp, config.kv_width // tp, config.intermediate_size // tp
    found = 2 * config.hidden_size * WIDE + 3 * inter * WIDE + (2 * q + 2 * kv) * width
    for beside, size in ((COLUMNS[:3], config.hidden_size), (COLUMNS[3:], config.hidden_size), (("down_proj",), inter)):
        found += size * width * any(name in job.modules for name in beside)
    return (found + job.r * WIDE * len(job.modules)) * job.own_tokens


def _passing(job: Job) -> int:
    """Count the bytes of gradients that the backward pass of a block holds at a time: those of SwiGLU, widened."""
    return 3 * job.own_tokens * job.config.intermediate_size // job.tp * WIDE


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step of a rank."""

    what: str
    axis: str  # tp or dp
    kind: str  # all-reduce, all-gather, reduce-scatter
    size: int  # bytes of one, see above
    count: int

    @property
    def volume(self) -> int:
        """Bytes of all of them."""
        return self.size * self.count

    def moved(self, n_ranks: int) -> float:
        """Count the bytes that a rank sends in a ring."""
        return self.volume * (2 if self.kind == "all-reduce" else 1) * (n_ranks - 1) / n_ranks


def messages(job: Job) -> list[Message]:
    """List every collective of a step."""
    of_tp = [*_activations_summed(job), *_factors_summed(job)] if job.tp > 1 else []
    of_dp = [*_parameters_gathered(job), _gradients_shared_out(job)] if job.dp > 1 else []
    loss = [Message("loss", "dp", "all-reduce", 8, 1)] if job.dp * job.tp > 1 else []
    return [*of_tp, *of_dp, *_gradients_gathered(job), *loss]


def _activations_summed(job: Job) -> Iterator[Message]:
    """Yield the sums of tp, two forward and two backward in each layer; the embedding wants no gradient, so one less.

    A block that is made again ends where nothing more is missing, before its last sum.
    """
    layers, size = job.config.n_layers, job.own_tokens * job.config.hidden_size * job.width
    yield Message("outputs, forward", "tp", "all-reduce", size, 2 * layers * job.passes)
    yield Message("inputs, backward", "tp", "all-reduce", size, (2 * layers - 1) * job.passes)
    if job.recomputed:
        yield Message("outputs, made again", "tp", "all-reduce", size, layers * job.passes)


def _factors_summed(job: Job) -> Iterator[Message]:
    for each in adapters(job):
        if each.tp_axis is None:
            yield Message("gradient of a factor", "tp", "all-reduce", each.size * WIDE, job.config.n_layers)


def _parameters_gathered(job: Job) -> Iterator[Message]:
    block_bytes = sum(each.gathered(job.dp) for each in (*block(job), *adapters(job)))
    yield Message("a block", "dp", "all-gather", block_bytes, 2 * job.config.n_layers * job.passes)
    rest_bytes = sum(each.gathered(job.dp) for each in rest(job))
    yield Message("embedding, norm and head", "dp", "all-gather", rest_bytes, job.passes)


def _gradients_shared_out(job: Job) -> Message:
    size = sum(each.gathered(job.dp) for each in adapters(job))
    return Message("gradients of a block", "dp", "reduce-scatter", size, job.config.n_layers)


def _gradients_gathered(job: Job) -> Iterator[Message]:
    """Yield the gathers for the norm of all gradients together, along dp and then along tp."""
    if job.dp > 1:
        size = sum(each.gathered(job.dp) for each in adapters(job))
        yield Message("gradients for the norm", "dp", "all-gather", job.config.n_layers * size, 1)
    if job.tp > 1:
        size = sum(each.size * WIDE * job.tp for each in adapters(job) if each.tp_axis is not None)
        yield Message("gradients for the norm", "tp", "all-gather", job.config.n_layers * size, 1)


@dataclass(frozen=True)
class Machine:
    """Assumptions about GPUs: the defaults are figures of an H100's data sheet, the shares of them guesses."""

    flops: float = 989e12  # dense bfloat16
    memory: float = 3.35e12  # bytes a second
    inside: float = 450e9  # bytes a second of a GPU to others of its machine, one way
    between: float = 50e9  # to other machines
    per_machine: int = 8
    flops_share: float = 0.5
    memory_share: float = 0.8
    network_share: float = 0.7
    latency: float = 10e-6  # seconds of a message


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    compute: float
    tp: float
    dp: float

    @property
    def one_after_the_other(self) -> float:
        """With nothing overlapped."""
        return self.compute + self.tp + self.dp

    @property
    def overlapped(self) -> float:
        """With all messages of dp behind the computation; those of tp are waited for."""
        return max(self.compute + self.tp, self.dp)


def flop(job: Job) -> float:
    """Count the operations of a rank in a step: frozen matrices forward and for the input gradient, perhaps again."""
    config, again = job.config, int(job.recomputed)
    matrices = sum(n_in * n_out for n_in, n_out in _matrices(config).values()) * config.n_layers / job.tp
    attention = 2 * job.tokens * config.q_width * config.n_layers / job.tp  # half of it is masked
    trained = sum(each.size for each in adapters(job)) * config.n_layers
    head = config.vocab_size * config.hidden_size
    per_token = matrices * (4 + 2 * again) + attention * (3 + again) + trained * (6 + 2 * again) + head * 4
    return per_token * job.own_tokens * job.passes


def step_time(job: Job, machine: Machine) -> StepTime:
    """Estimate the seconds: the slower of arithmetic and memory, and the messages of both axes."""
    weights = sum(each.size for each in block(job)) * job.config.n_layers + sum(each.size for each in rest(job))
    touched = weights * job.width * (2 + job.recomputed) + 2 * job.config.n_layers * activations(job)
    arithmetic = flop(job) / (machine.flops * machine.flops_share)
    return StepTime(
        compute=max(arithmetic, touched * job.passes / (machine.memory * machine.memory_share)),
        tp=_sent(job, machine, "tp", job.tp, job.tp <= machine.per_machine),
        dp=_sent(job, machine, "dp", job.dp, job.dp * job.tp <= machine.per_machine),
    )


def _sent(job: Job, machine: Machine, axis: str, n_ranks: int, inside: bool) -> float:
    speed = (machine.inside if inside else machine.between) * machine.network_share
    found = [each for each in messages(job) if each.axis == axis]
    return sum(each.moved(n_ranks) / speed + each.count * machine.latency for each in found)

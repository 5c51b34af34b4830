"""Where matrices lie while a model runs: decoded to float32 at load, or packed as in the file and decoded at every use.

Decoded is faster: every use is one matrix product. Packed needs the file's bytes and one tile. `auto` decodes when that
fits the memory that is free now. F32 matrices are neither: they are used in place, mapped from the file.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.runtime.memory import available_memory

Residency = Literal["auto", "decoded", "packed"]

_OVERHEAD = 256_000_000  # interpreter, libraries, one decoded tile and its temporaries
_GB = 1e9


@dataclass(frozen=True)
class ResidencyPlan:
    """A choice and the figures that led to it."""

    residency: Literal["decoded", "packed"]
    types: dict[str, int]  # stored type to bytes of the matrices that have it
    decoded: int  # bytes that the run would need with matrices decoded
    packed: int  # bytes that it would need with matrices packed
    free: float  # bytes that were free

    @property
    def needed(self) -> int:
        """Bytes that the run will need."""
        return self.decoded if self.residency == "decoded" else self.packed

    def describe(self) -> str:
        """Format the types of the matrices, their place in memory and the bytes needed as one line for a person."""
        stored = ", ".join(f"{n / _GB:.2f} GB {kind}" for kind, n in self.types.items())
        how = "decoded at load" if self.residency == "decoded" else "packed, decoded tile by tile"
        needs = f"needs about {self.needed / _GB:.1f} GB, {self.free / _GB:.1f} GB are free"
        other = f"; decoded at load would need {self.decoded / _GB:.1f} GB" if self.residency == "packed" else ""
        return f"weights: {stored}; {how}, {needs}{other}"


def plan(weights: Weights, wanted: Residency = "auto", *, n_tokens: int = 1024) -> ResidencyPlan:
    """Choose a residency that fits with so many tokens of context; MemoryError, with the figures, where none does."""
    n_tokens = min(n_tokens, weights.config.max_position_embeddings)
    working = _OVERHEAD + working_bytes(weights, n_tokens)
    matrices = [name for name in weights if weights.slots[name].multiplied]
    types: Counter[str] = Counter()
    for name in matrices:
        types[weights.stored_type(name).name] += weights.stored_bytes(name)
    packed = types.total() + working
    decoded = sum(4 * math.prod(weights.shape(name)) for name in matrices) + working
    free = available_memory()
    residency = wanted if wanted != "auto" else ("decoded" if decoded <= free else "packed")
    made = ResidencyPlan(residency, types, decoded, packed, free)
    if made.needed > free:
        raise MemoryError(_refusal(weights, made, n_tokens))
    return made


def working_bytes(weights: Weights, n_tokens: int) -> int:
    """Estimate from above the bytes of the cache (its width: the numerics) and activations of one pass."""
    config = weights.config
    per_value = 2 if weights.numerics.kv_cache == "f16" else 4
    per_token, of_states = remembered(config)
    cache = 2 * (per_token * n_tokens * per_value + 4 * of_states)  # storage doubles; states are there before and after
    return cache + _activation_bytes(config, min(n_tokens, 512), n_tokens)


def remembered(config: ModelConfig) -> tuple[int, int]:
    """Count the numbers that all layers remember: keys and values of one token, and states of delta nets."""
    n_nets = sum(config.layer(i).mixer == "delta_net" for i in range(config.n_layers))
    state = config.delta_net.state_size if config.delta_net is not None else 0
    return 2 * (config.n_layers - n_nets) * config.kv_width, n_nets * state


def _activation_bytes(config: ModelConfig, seq: int, ctx: int) -> int:
    """Estimate the bytes of float32 activations of a pass: `seq` tokens, `ctx` tokens in all."""
    mixed = 3 * config.q_width
    if (net := config.delta_net) is not None:  # its own rows, and of every value head those of its keys and values
        of_heads = net.n_value_heads * (net.key_head_dim + net.value_head_dim)
        mixed = max(5 * config.q_width, 2 * net.conv_width + 2 * of_heads)
    if (experts := config.experts) is not None:
        chosen = experts.n_experts_per_token * (4 * experts.expert_size + 2 * config.hidden_size)
        mixed += 3 * experts.n_experts + chosen + 4 * experts.shared_size
    rows = seq * (6 * config.hidden_size + 4 * config.intermediate_size + mixed)
    scores = 3 * config.n_heads * seq * ctx
    return 4 * (rows + scores + config.vocab_size)


def _refusal(weights: Weights, made: ResidencyPlan, n_tokens: int) -> str:
    text = f"{weights.path}: needs about {made.needed / _GB:.1f} GB ({made.residency}, {n_tokens} tokens)"
    text += f", {made.free / _GB:.1f} GB are free"
    if made.residency == "decoded" and made.packed <= made.free:
        return f"{text}; packed weights would need {made.packed / _GB:.1f} GB, use --weights packed"
    return f"{text}; use a smaller model, a smaller type or fewer tokens"

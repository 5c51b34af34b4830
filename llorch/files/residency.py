"""Residency of matrices in a run: packed as in the file and multiplied from there, or decoded to float32 at load.

Packed needs the file's bytes and one decoded tile. With the C library it opens at once and reads fewer bytes a token,
so `auto` chooses it for all models but small ones. Without the library a packed matrix is decoded at every use; then
`auto` chooses decoded if that fits into free memory. F32 matrices are always used in place, mapped from the file.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.files.compiled import has_compiled_form
from llorch.files.quant import GGMLType
from llorch.ops.compiled.products import is_available
from llorch.ops.numerics import ProductKernels
from llorch.runtime.memory import available_memory
from llorch.runtime.threads import is_small

Residency = Literal["auto", "decoded", "packed"]

_OVERHEAD = 256_000_000  # interpreter, libraries, one decoded tile and its temporaries
_GB = 1e9


@dataclass(frozen=True)
class ResidencyPlan:
    """Chosen residency and its memory needs."""

    residency: Literal["decoded", "packed"]
    types: dict[str, int]  # stored type -> bytes of its matrices
    decoded: int  # bytes that a run with decoded matrices needs
    packed: int  # bytes that a run with packed matrices needs
    free: float  # free bytes at planning time
    kernels: ProductKernels = "own"  # whose functions multiply packed matrices

    @property
    def needed(self) -> int:
        """Bytes that the run needs."""
        return self.decoded if self.residency == "decoded" else self.packed

    def describe(self) -> str:
        """Format the types of the matrices, their residency and the bytes needed, in one line."""
        matrix_bytes = ", ".join(f"{n_bytes / _GB:.2f} GB {kind}" for kind, n_bytes in self.types.items())
        packed_state = "packed, multiplied by ggml's kernels" if self.kernels == "ggml" else "packed"
        state = "decoded at load" if self.residency == "decoded" else packed_state
        need = f"needs about {self.needed / _GB:.1f} GB, {self.free / _GB:.1f} GB are free"
        alternative = f"; decoded at load would need {self.decoded / _GB:.1f} GB" if self.residency == "packed" else ""
        return f"weights: {matrix_bytes}; {state}, {need}{alternative}"


def plan(weights: Weights, requested: Residency = "auto", *, n_tokens: int = 1024) -> ResidencyPlan:
    """Choose a residency that fits with `n_tokens` of context; MemoryError, with the numbers, if none does."""
    n_tokens = min(n_tokens, weights.config.max_position_embeddings)
    working = _OVERHEAD + working_bytes(weights, n_tokens)
    matrices = [name for name in weights if weights.slots[name].multiplied]
    types: Counter[str] = Counter()
    for name in matrices:
        types[weights.stored_type(name).name] += weights.stored_bytes(name)
    packed = types.total() + working
    decoded = sum(4 * math.prod(weights.shape(name)) for name in matrices) + working
    free, kernels = available_memory(), weights.numerics.kernels
    chosen = requested if requested != "auto" else _choose(weights, matrices, fits=decoded <= free)
    residency_plan = ResidencyPlan(chosen, types, decoded, packed, free, kernels)
    if residency_plan.needed > free:
        raise MemoryError(_refusal(weights, residency_plan, n_tokens))
    return residency_plan


def _choose(weights: Weights, matrices: list[str], *, fits: bool) -> Literal["decoded", "packed"]:
    """Choose packed if C multiplies every stored matrix of a model that is not small, or if decoded does not fit."""
    if not fits or weights.numerics.kernels == "ggml":  # ggml's kernels multiply stored matrices
        return "packed"
    if is_small(sum(math.prod(weights.shape(name)) for name in matrices)):
        return "decoded"
    stored = [matrix for name in matrices for matrix in weights.all_stored(name) if matrix.ggml_type != GGMLType.F32]
    return "packed" if stored and all(map(has_compiled_form, stored)) and is_available() else "decoded"


def working_bytes(weights: Weights, n_tokens: int) -> int:
    """Return an upper bound of the bytes of the KV cache (float16 if the numerics say so) and of one pass."""
    config = weights.config
    n_value_bytes = 2 if weights.numerics.kv_cache == "f16" else 4
    n_per_token, n_state = count_cached_numbers(config)
    cache = 2 * (n_per_token * n_tokens * n_value_bytes + 4 * n_state)  # storage doubles; a pass has old and new states
    return cache + _activation_bytes(config, min(n_tokens, 512), n_tokens)  # 512: PREFILL_CHUNK of llorch.model.model


def count_cached_numbers(config: ModelConfig) -> tuple[int, int]:
    """Count the cached numbers of all layers: keys and values of one token, and states of delta nets."""
    n_nets = sum(config.layer(i).mixer == "delta_net" for i in range(config.n_layers))
    state = config.delta_net.state_size if config.delta_net is not None else 0
    return 2 * (config.n_layers - n_nets) * config.kv_width, n_nets * state


def _activation_bytes(config: ModelConfig, seq: int, ctx: int) -> int:
    """Estimate the bytes of float32 activations of a pass of `seq` tokens in a context of `ctx`."""
    mixer_width = 3 * config.q_width
    if (net := config.delta_net) is not None:  # its own rows, and keys and values of every value head
        head_width = net.n_value_heads * (net.key_head_dim + net.value_head_dim)
        mixer_width = max(5 * config.q_width, 2 * net.conv_width + 2 * head_width)
    if (experts := config.experts) is not None:
        expert_width = experts.n_experts_per_token * (4 * experts.expert_size + 2 * config.hidden_size)
        mixer_width += 3 * experts.n_experts + expert_width + 4 * experts.shared_size
    rows = seq * (6 * config.hidden_size + 4 * config.intermediate_size + mixer_width)
    scores = 3 * config.n_heads * seq * ctx
    return 4 * (rows + scores + config.vocab_size)


def _refusal(weights: Weights, choice: ResidencyPlan, n_tokens: int) -> str:
    message = f"{weights.path}: needs about {choice.needed / _GB:.1f} GB ({choice.residency}, {n_tokens} tokens)"
    message += f", {choice.free / _GB:.1f} GB are free"
    if choice.residency == "decoded" and choice.packed <= choice.free:
        return f"{message}; packed weights would need {choice.packed / _GB:.1f} GB, use --weights packed"
    return f"{message}; use a smaller model, a smaller type or fewer tokens"

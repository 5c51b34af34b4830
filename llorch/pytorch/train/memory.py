"""Peak memory of a training step, estimated after the model is loaded and before the first step.

    current memory                       weights, adapter and libraries, as the system or CUDA reports them
  + gradients, moments of AdamW          computed
  + tensors saved by a forward pass      per token and constant, measured in two short passes of the model
  + temporary tensors of one block's backward pass, and logits of a chunk        computed

Recomputed blocks save their inputs, and one block saves the rest. The longest row of the data counts, times the rows
of a forward pass.

Source: `benchmarks/speed.py train`, which compares the estimate with the resident memory of whole runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from llorch.families.config import ModelConfig
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.cpu.linear import TILE
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.lora.dropout import keyed, token_keys
from llorch.pytorch.train.forward import hidden_states
from llorch.training.batch import IGNORED, Batch

_SHORT = 16  # tokens of the shorter pass, if the context allows; the longer has twice as many
_COMPILER = 110 << 20  # bytes of torch's compiler, imported when blocks are recomputed
_WIDE = 4  # bytes of float32, in which norms, SwiGLU and the loss compute


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the peak of a training step."""

    now: int  # current memory, and what recomputation will import
    trained: int  # gradients and moments
    activations: int  # saved by a forward pass, and holes between them
    logits: int  # of a chunk, with copies; or temporary tensors of a block's backward pass, if these are more
    n_tokens: int  # of the largest forward pass

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        return self.now + self.trained + self.activations + self.logits


def kept_bytes(module: CausalLM, device: torch.device) -> tuple[float, float]:
    """Measure the bytes that a forward pass keeps for backward, without recomputation: per token, and constant.

    The constant is not 0 with DoRA, which keeps matrices. Two passes of different length determine both.
    """
    was_training = module.training
    module.train()  # dropout saves its masks
    n_tokens = max(1, min(_SHORT, module.config.max_position_embeddings // 2))
    short_bytes, long_bytes = (_measure_kept(module, n, device) for n in (n_tokens, 2 * n_tokens))
    module.train(was_training)
    per_token = (long_bytes - short_bytes) / n_tokens
    return per_token, max(0.0, short_bytes - n_tokens * per_token)


def step_memory(
    config: ModelConfig, saved_bytes: tuple[float, float], *, n_tokens: int, width: int, chunk: int, recomputed: bool,
    trained: int, copies: tuple[int, int], device: torch.device,
) -> StepMemory:  # fmt: skip
    """Estimate a step with `n_tokens` in its largest pass, from the numbers of `kept_bytes` and `product_copies`.

    `width`: bytes of an activation; `trained`: bytes of gradients and moments; `chunk`: see `loss_sum`, 0 for none.
    """
    inputs = config.n_layers * config.hidden_size * width
    per_token, constant = saved_bytes
    if recomputed:  # all blocks save their inputs, and one block everything
        per_token, constant = inputs + per_token / config.n_layers, constant / config.n_layers
    temporary = 5 * config.intermediate_size * _WIDE + 2 * config.hidden_size * width
    head_copy, holes = copies
    n_bytes = width + (_WIDE if width < _WIDE else 0) if chunk else width + 2 * _WIDE  # of a logit
    rows = min(chunk or n_tokens, n_tokens)
    return StepMemory(
        now=_current_bytes(device) + (_COMPILER if recomputed else 0),
        trained=trained,
        activations=int(n_tokens * per_token + constant) + holes,
        logits=max(rows * config.vocab_size * n_bytes + head_copy, n_tokens * temporary),
        n_tokens=n_tokens,
    )


def product_copies(module: CausalLM, device: torch.device) -> tuple[int, int]:
    """Return the bytes of the copy that oneDNN makes of the head on the CPU, and of holes in the heap.

    A packed matrix is decoded for each product, at most `TILE` elements at a time, and oneDNN copies what is decoded.
    Tensors that the pass saves take parts of that memory, so the next matrix needs more: measured at most 2.2 times the
    largest decoded matrix of a layer (glibc 2.36, 24 layers, with and without recomputation). The C library could
    return each array to the system, but a step would be 1.3 times as long.
    """
    if device.type != "cpu":
        return 0, 0
    head = getattr(module.lm_head, "base_layer", module.lm_head)
    matrices = (matrix for matrix in module.model.layers.modules() if isinstance(matrix, PackedMatrix))
    holes = int(2.2 * max(map(_tile_bytes, matrices), default=0) * module.config.n_layers)
    return (2 * _tile_bytes(head) if isinstance(head, PackedMatrix) else head.weight.nbytes), holes


def _tile_bytes(matrix: PackedMatrix) -> int:
    return _WIDE * min(TILE, matrix.in_features * matrix.out_features)


def _measure_kept(module: CausalLM, n_tokens: int, device: torch.device) -> int:
    """Sum the bytes of tensors that a pass saves, each storage once, without parameters and buffers."""
    parameter_pointers = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    saved_storages: dict[int, int] = {}

    def save_storage(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_pointers:
            saved_storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the output of a node would keep its graph, and with it all that the pass saves

    ids = np.arange(n_tokens)[None] % module.config.vocab_size
    labels = np.full_like(ids, IGNORED)
    batch = Batch(ids, labels, np.arange(n_tokens)[None], np.zeros_like(ids), np.arange(1))
    keys = token_keys(batch.samples, n_tokens, seed=0, step=0)
    with keyed(module, keys), saved_tensors_hooks(save_storage, lambda tensor: tensor):
        hidden = hidden_states(module, batch, device)  # holds the graph, so that no storage is reused
    del hidden
    return sum(saved_storages.values())


def _current_bytes(device: torch.device) -> int:
    """Return the bytes that the process uses on the device, or in host memory; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

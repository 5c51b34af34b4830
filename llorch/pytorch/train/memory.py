"""Memory at the peak of a training step, estimated once the model is loaded and before the first step.

    what is there now                    weights, adapter and libraries, as the system or CUDA counts them
  + gradients, moments of AdamW          counted
  + what a forward pass keeps            per token and once, seen in two short passes of the model itself
  + what one block's backward pass has in hand, and the logits of a chunk        counted

Recomputed blocks keep their inputs, and one block keeps the rest. The longest row of the data decides, as many times as
a forward pass has rows.

Source: benchmarks/train_estimate.py, which compares the estimate with the resident memory of whole runs.
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
from llorch.pytorch.lora.dropout import keyed, token_keys
from llorch.pytorch.train.forward import hidden_states
from llorch.training.batch import IGNORED, Batch

_SHORT = 16  # tokens of the shorter pass, where the context has room; the other pass has twice as many
_COMPILER = 110 << 20  # torch imports its compiler when blocks are recomputed
_WIDE = 4  # bytes of float32, in which norms, SwiGLU and the loss compute


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the peak of a training step."""

    now: int  # before the first step
    trained: int  # gradients and moments
    activations: int  # that a forward pass keeps
    logits: int  # of a chunk, with what multiplies them; or what the backward pass of a block has in hand, if more
    n_tokens: int  # of the largest forward pass

    @property
    def peak(self) -> int:
        """All of it."""
        return self.now + self.trained + self.activations + self.logits


def kept_bytes(module: CausalLM, device: torch.device) -> tuple[float, float]:
    """Count the bytes that a pass without recomputation keeps for each token, and once (DoRA: matrices)."""
    training = module.training
    module.train()  # dropout keeps what it made
    n_tokens = max(1, min(_SHORT, module.config.max_position_embeddings // 2))
    short, long = (_kept(module, n, device) for n in (n_tokens, 2 * n_tokens))
    module.train(training)
    per_token = (long - short) / n_tokens
    return per_token, max(0.0, short - n_tokens * per_token)


def step_memory(
    config: ModelConfig, kept: tuple[float, float], *, n_tokens: int, width: int, chunk: int, recomputed: bool,
    trained: int, device: torch.device,
) -> StepMemory:  # fmt: skip
    """Estimate a step whose largest forward pass has so many tokens; `trained` is bytes of gradients and moments."""
    inputs = config.n_layers * config.hidden_size * width
    of_token, once = kept
    if recomputed:
        of_token, once = inputs + of_token / config.n_layers, once / config.n_layers
    in_hand = 3 * config.intermediate_size * _WIDE + 2 * config.hidden_size * width
    copies = width + (_WIDE if width < _WIDE else 0) if chunk else width + 2 * _WIDE
    rows = min(chunk or n_tokens, n_tokens)
    reordered = config.hidden_size * config.vocab_size * width if device.type == "cpu" else 0  # oneDNN, of the head
    return StepMemory(
        now=_now(device) + (_COMPILER if recomputed else 0),
        trained=trained,
        activations=int(n_tokens * of_token + once),
        logits=max(rows * config.vocab_size * copies + reordered, n_tokens * in_hand),
        n_tokens=n_tokens,
    )


def _kept(module: CausalLM, n_tokens: int, device: torch.device) -> int:
    """Sum the bytes of the tensors that a pass saves, each storage once, without parameters and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}

    def saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = np.arange(n_tokens)[None] % module.config.vocab_size
    nothing = np.full_like(ids, IGNORED)
    batch = Batch(ids, nothing, np.arange(n_tokens)[None], np.zeros_like(ids), np.arange(1))
    keys = token_keys(batch.samples, n_tokens, seed=0, step=0)
    with keyed(module, keys), saved_tensors_hooks(saved, lambda tensor: tensor):
        hidden = hidden_states(module, batch, device)  # keeps the graph, so that no storage is used twice
    del hidden
    return sum(found.values())


def _now(device: torch.device) -> int:
    """Return the bytes that the process holds on the device, or in the host's memory; 0 if unknown."""
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

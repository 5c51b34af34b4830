"""Forward pass of training: from a batch of documents to hidden states, with gradients.

A token of a packed row (several documents in one row) sees only its own document. If no row has two documents, the
causal mask is enough: padding is at the end of a row, so no token sees it, and it is not in the loss.
"""

from functools import lru_cache, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llorch.families.config import ModelConfig
from llorch.families.layers import Bound
from llorch.ops.rope import rope_tables
from llorch.pytorch.cache import NoCache, PassPlacement, Visible
from llorch.pytorch.causal_lm import CausalLM, Keep, keep_nothing
from llorch.runtime.errors import UserError
from llorch.training.batch import Batch

Angles = Float[Tensor, "positions half"]


def hidden_states(
    module: CausalLM, batch: Batch, device: torch.device, *, keep: Keep = keep_nothing
) -> Float[Tensor, "batch seq hidden"]:
    """Run a batch up to the final norm, uncached; the loss computes logits. Values at padding are arbitrary."""
    ids = torch.from_numpy(batch.ids).to(device)
    x = module.model(ids, place_of(module, batch, device), NoCache(device), keep)
    return keep("final_norm", module.model.norm(x))


def place_of(module: CausalLM, batch: Batch, device: torch.device) -> PassPlacement:
    """Return positions, angles and masks of a batch; refuse a document longer than the context."""
    config = module.config
    longest = int(batch.positions.max()) + 1
    if longest > config.max_position_embeddings:
        raise UserError(
            f"train: expected documents within the context of {config.max_position_embeddings}, got {longest} tokens; "
            "cut documents with --max-length"
        )
    is_packed = bool((batch.documents > 0).any())
    if is_packed and config.delta_net is not None:
        raise UserError("train: packing mixes documents in models with delta nets; train without --packing")
    dtype = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    positions = batch.positions.clip(min=0)
    visible = None
    if is_packed:
        documents = torch.from_numpy(batch.documents).to(device)
        visible = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # (batch, 1, seq, ctx)
    slots = torch.from_numpy(positions).to(device)
    n_angles = 1 << (longest - 1).bit_length()  # powers of two, so that few tables are cached
    cos, sin = (table[slots] for table in _angles(config, n_angles, dtype, device))  # (batch, seq, half)
    near = {
        layer.bound: _bounded_mask(layer.bound, slots, visible) for layer in config.layers if layer.bound is not None
    }
    heat = config.temperature and config.temperature.of(positions.reshape(-1)).reshape(positions.shape)
    heat = None if heat is None else torch.from_numpy(heat).to(device, dtype)
    return PassPlacement(slots, cos, sin, visible, positions.shape[1], near, heat)


@lru_cache(maxsize=4)
def _angles(config: ModelConfig, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Angles, Angles]:
    """Return RoPE tables, cached on the device: computing them takes milliseconds, in which a GPU would wait."""
    options = {"head_dim": config.rotated, "theta": config.rope_theta, "scaling": config.rope_scaling}
    cos, sin = (torch.from_numpy(table).to(device, dtype) for table in rope_tables(np.arange(n), **options))
    return cos, sin


def _bounded_mask(
    bound: Bound, positions: Int[Tensor, "batch seq"], visible: Visible
) -> Bool[Tensor, "batch 1 seq ctx"]:
    """Restrict the visible tokens to a window or chunk."""
    kind, size = bound
    first = positions - size + 1 if kind == "window" else positions // size * size
    seq = positions.shape[1]
    mask = torch.ones(seq, seq, dtype=torch.bool, device=positions.device).tril() if visible is None else visible
    return mask & (positions[:, None, None, :] >= first[:, None, :, None])


def checkpoint_gradients(module: CausalLM) -> None:
    """Use gradient checkpointing: save only the input of each block, and recompute the block in backward.

    Gradients have the same bits: dropout is a function of the tokens (`pytorch.lora.dropout`), not of a generator.
    Source: arXiv:1604.06174; torch.utils.checkpoint, non-reentrant, which does not cut the graph at a frozen input.
    """
    for layer in module.model.layers:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        layer.forward = partial(checkpoint, layer.forward, **options)  # type: ignore[method-assign]

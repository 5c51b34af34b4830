"""The forward pass of training: a batch of documents in, hidden states out, gradients wanted.

Documents that are packed into one row see only themselves. If no row holds two of them, the mask is the causal one
alone: padding stands at the end of a row, so no token sees it, and no loss is taken there.
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
    """Run a batch up to the last norm, uncached; logits are made where the loss is. Those of padding mean nothing."""
    ids = torch.from_numpy(batch.ids).to(device)
    x = module.model(ids, place_of(module, batch, device), NoCache(device), keep)
    return keep("final_norm", module.model.norm(x))


def place_of(module: CausalLM, batch: Batch, device: torch.device) -> PassPlacement:
    """Place the tokens of a batch; a document longer than the context is refused."""
    config = module.config
    longest = int(batch.positions.max()) + 1
    if longest > config.max_position_embeddings:
        raise UserError(
            f"train: expected documents within the context of {config.max_position_embeddings}, got {longest} tokens; "
            "cut documents with --max-length"
        )
    packed = bool((batch.documents > 0).any())
    if packed and config.delta_net is not None:
        raise UserError("train: packing mixes documents in models with delta nets; train without --packing")
    wide = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    positions = batch.positions.clip(min=0)
    visible = None
    if packed:
        documents = torch.from_numpy(batch.documents).to(device)
        visible = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # (batch, 1, seq, ctx)
    at = torch.from_numpy(positions).to(device)
    n_angles = 1 << (longest - 1).bit_length()  # few tables serve batches of any length
    cos, sin = (table[at] for table in _angles(config, n_angles, wide, device))  # (batch, seq, half)
    near = {layer.bound: _near(layer.bound, at, visible) for layer in config.layers if layer.bound is not None}
    heat = config.temperature and config.temperature.of(positions.reshape(-1)).reshape(positions.shape)
    heat = None if heat is None else torch.from_numpy(heat).to(device, wide)
    return PassPlacement(at, cos, sin, visible, positions.shape[1], near, heat)


@lru_cache(maxsize=4)
def _angles(config: ModelConfig, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Angles, Angles]:
    """Keep tables on the device: the processor takes milliseconds for them, in which a GPU would wait in every step."""
    kind = {"head_dim": config.rotated, "theta": config.rope_theta, "scaling": config.rope_scaling}
    cos, sin = (torch.from_numpy(table).to(device, dtype) for table in rope_tables(np.arange(n), **kind))
    return cos, sin


def _near(bound: Bound, positions: Int[Tensor, "batch seq"], visible: Visible) -> Bool[Tensor, "batch 1 seq ctx"]:
    """Mark the visible tokens that are no further back than a bound."""
    kind, size = bound
    first = positions - size + 1 if kind == "window" else positions // size * size
    seq = positions.shape[1]
    seen = torch.ones(seq, seq, dtype=torch.bool, device=positions.device).tril() if visible is None else visible
    return seen & (positions[:, None, None, :] >= first[:, None, :, None])


def checkpoint_gradients(module: CausalLM) -> None:
    """Keep only the input of each block and compute the block again when its gradient is wanted.

    Gradients have the same bits: nothing is drawn, dropout is a function of the tokens (`pytorch.lora.dropout`).
    Source: arXiv:1604.06174; torch.utils.checkpoint without reentrance, which does not cut the graph at a frozen input.
    """
    for layer in module.model.layers:
        how = {"use_reentrant": False, "preserve_rng_state": False}
        layer.forward = partial(checkpoint, layer.forward, **how)  # type: ignore[method-assign]

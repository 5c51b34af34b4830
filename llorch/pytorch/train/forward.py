"""The torch page run to be trained on: a batch of documents in, hidden states out, gradients wanted.

Documents that are packed into one row see only themselves. Where no row holds two of them the mask is the causal one
alone: padding stands at the end of a row, so no token sees it, and no loss is taken there.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llorch.ops.rope import rope_tables
from llorch.pytorch.cache import NoCache, Place
from llorch.pytorch.causal_lm import CausalLM, Keep, keep_nothing
from llorch.train.batch import Batch


def hidden_states(
    module: CausalLM, batch: Batch, device: torch.device, *, keep: Keep = keep_nothing
) -> Float[Tensor, "batch seq hidden"]:
    """Run a batch up to the last norm, uncached; logits are made where the loss is. Those of padding mean nothing."""
    ids = torch.from_numpy(batch.ids).to(device)
    x = module.model(ids, place_of(module, batch, device), NoCache(device), keep)
    return keep("final_norm", module.model.norm(x))


def place_of(module: CausalLM, batch: Batch, device: torch.device) -> Place:
    """Where the tokens of a batch stand; a document longer than the context is refused."""
    config = module.config
    longest = int(batch.positions.max()) + 1
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"train: a document of {longest} tokens does not fit the context of {config.max_position_embeddings}; "
            "shorten it with --max-length"
        )
    kind = {"head_dim": config.head_dim, "theta": config.rope_theta, "scaling": config.rope_scaling}
    wide = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    positions = batch.positions.clip(min=0)
    cos, sin = (
        torch.from_numpy(table.reshape(*positions.shape, -1)).to(device, wide)
        for table in rope_tables(positions.reshape(-1), **kind)
    )  # (batch, seq, half)
    packed = bool((batch.documents > 0).any())
    visible = _own_document(torch.from_numpy(batch.documents).to(device)) if packed else None
    return Place(torch.from_numpy(positions).to(device), cos, sin, visible, positions.shape[1])


def _own_document(documents: Tensor) -> Bool[Tensor, "batch 1 seq ctx"]:
    """Block-diagonal and causal."""
    same = documents[:, :, None] == documents[:, None, :]  # (batch, seq, ctx)
    return same.tril()[:, None]


def checkpoint_gradients(module: CausalLM) -> None:
    """Keep only the input of each block and compute the block again when its gradient is wanted.

    The random numbers of the first run are drawn again, so that gradients have the same bits, dropout included. Source:
    arXiv:1604.06174; torch.utils.checkpoint without reentrance, which does not cut the graph at a frozen input.
    """
    for layer in module.model.layers:
        layer.forward = _recomputed(layer.forward)  # type: ignore[method-assign]


def _recomputed(forward: Any) -> Any:
    return lambda *given: checkpoint(forward, *given, use_reentrant=False)

"""Logits of a base, of the base with an adapter beside it, and of the merged model: how far each is from the other."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from llorch.cache import KVCache
from llorch.files import Weights
from llorch.forward import forward
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter

N_IDS = 12


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Logits of a few tokens from all over the vocabulary."""

    spread: float  # standard deviation of the logits with the adapter
    effect: float  # largest difference between the base and the base with the adapter
    error: float  # largest difference between the base with the adapter and the merged model


def compare_logits(weights: Weights, adapter: Adapter, merged: Weights) -> Agreement:
    """Run three models on the same tokens."""
    ids = probe_ids(weights.config.vocab_size, adapter)
    plain, beside, inside = (run(w, ids) for w in (weights, AdaptedWeights(weights, adapter), merged))
    return Agreement(
        spread=float(beside.std()),
        effect=float(np.abs(beside - plain).max()),
        error=float(np.abs(inside - beside).max()),
    )


def probe_ids(vocab_size: int, adapter: Adapter) -> Int64[np.ndarray, " ids"]:
    """Ids from all over a vocabulary, in an order without a pattern.

    An adapter of the embedding moves only tokens that it was trained on: half of the ids are those it moves most.
    """
    places = np.arange(N_IDS) * 5 % N_IDS
    ids = (2 * places + 1) * vocab_size // (2 * N_IDS)
    if "embed_tokens" in adapter.tensors:
        moved = np.abs(adapter.tensors["embed_tokens"].lora_A).sum(axis=0)
        ids[::2] = np.argsort(-moved, kind="stable")[: N_IDS // 2]
    return ids


def run(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Logits of every token."""
    return forward(ids, weights, KVCache(weights.config, weights.dtype))

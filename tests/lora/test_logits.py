"""The tokens that logits of an adapter are judged on."""

import numpy as np
from random_adapters import random_adapter, tiny_base

from llorch.files import open_weights
from llorch.lora.adapter import LORA_A, Adapter, LoraTensors
from llorch.lora.logits import N_IDS, compare_logits, probe_ids
from llorch.lora.merge import MergedWeights


def knowing(adapter: Adapter, ids: list[int]) -> Adapter:
    """An adapter of the embedding that was trained on a few tokens only."""
    made = adapter.tensors["embed_tokens"].arrays()
    rows = np.zeros_like(made[LORA_A])
    rows[:, ids] = made[LORA_A][:, ids]
    return Adapter(adapter.config, adapter.targets, {"embed_tokens": LoraTensors(**made | {LORA_A: rows})})


def test_the_ids_are_different_ones_from_all_over_the_vocabulary(tmp_path):
    config = open_weights(tiny_base(tmp_path / "base")).config
    ids = probe_ids(50_000, random_adapter(config))
    assert len(set(ids.tolist())) == N_IDS
    assert set((ids // 10_000).tolist()) == {0, 1, 2, 3, 4}


def test_an_embedding_is_judged_on_tokens_that_it_was_trained_on(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base"))
    plain = probe_ids(weights.config.vocab_size, random_adapter(weights.config)).tolist()
    unseen = next(token for token in range(weights.config.vocab_size) if token not in plain)
    adapter = knowing(random_adapter(weights.config, target_modules=("embed_tokens",)), [unseen])
    assert unseen in probe_ids(weights.config.vocab_size, adapter)
    found = compare_logits(weights, adapter, MergedWeights(weights, adapter))
    assert found.effect > 0
    assert found.error < 1e-4 * found.effect

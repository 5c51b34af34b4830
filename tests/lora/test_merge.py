"""Merging: what the merged matrices hold, rounded once, and that nothing else changes."""

import numpy as np
import pytest
from builders.random_adapters import EVERY, adapted_logits, logits_of, random_adapter, tiny_base
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.merge import MergedWeights, merged_matrix

KINDS = {
    "every matrix": {"target_modules": EVERY},
    "rsLoRA with ranks": {"target_modules": EVERY, "use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "DoRA": {"target_modules": (*EVERY, "embed_tokens", "lm_head"), "use_dora": True},
    "embedding": {"target_modules": ("embed_tokens",)},
    "output": {"target_modules": ("lm_head", "q_proj")},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_logits_of_the_adapter_beside_the_base(tmp_path, kind, tied):
    base = tiny_base(tmp_path / "base", "qwen3", tied=tied)
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **KINDS[kind])
    expected = adapted_logits(base, adapter)
    actual = logits_of(MergedWeights(weights, adapter))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_a_merged_matrix_is_the_sum_worked_by_hand(tmp_path):
    adapter = random_adapter(open_weights(tiny_base(tmp_path / "base")).config, r=3, lora_alpha=6.0)
    weight = np.full((32, 32), 0.25, np.float32)
    lora = adapter.tensors["layers.0.q_proj"]
    expected = (0.25 + 2.0 * lora.lora_B.astype(np.float64) @ lora.lora_A.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(merged_matrix(weight, adapter, "layers.0.q_proj"), expected, strict=True)


def test_many_tiles_give_the_bits_of_one(monkeypatch, weights):
    adapter = random_adapter(weights.config, target_modules=("embed_tokens", "up_proj"), use_dora=True)
    names = ("embed_tokens", "layers.1.up_proj")
    whole = [merged_matrix(weights.array(name), adapter, name) for name in names]
    monkeypatch.setattr("llorch.lora.merge._AT_ONCE", 96)
    for name, expected in zip(names, whole, strict=True):
        np.testing.assert_allclose(merged_matrix(weights.array(name), adapter, name), expected, rtol=2e-7)


@pytest.mark.parametrize("use_dora", [False, True])
def test_the_adapter_page_merges_to_the_same_numbers(use_dora, weights):
    adapter = random_adapter(weights.config, use_dora=use_dora)
    beside, merged = AdaptedWeights(weights, adapter), MergedWeights(weights, adapter)
    for name in adapter.targets:
        np.testing.assert_allclose(beside[name].dequantize(), merged.array(name), rtol=0, atol=3e-7)


def test_weights_without_an_adapter_and_the_base_itself_do_not_change(weights):
    before = {name: weights.read(name).copy() for name in weights}
    merged = MergedWeights(weights, random_adapter(weights.config, target_modules=("q_proj",)))
    for name in weights:
        assert merged.is_changed(name) == name.endswith(".q_proj")
        assert np.array_equal(merged.array(name), before[name]) != merged.is_changed(name)
        np.testing.assert_array_equal(weights.read(name), before[name])


def test_tied_embedding_and_output_part_only_where_one_of_them_is_adapted(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base", tied=True))
    inner = MergedWeights(weights, random_adapter(weights.config))
    assert inner.config.tie_word_embeddings
    assert "lm_head" not in inner
    outer = MergedWeights(weights, random_adapter(weights.config, target_modules=("embed_tokens",)))
    assert not outer.config.tie_word_embeddings
    np.testing.assert_array_equal(outer.array("lm_head"), weights.array("embed_tokens"))
    assert not np.array_equal(outer.array("embed_tokens"), weights.array("embed_tokens"))


def test_a_sum_that_overflows_is_refused(weights):
    adapter = random_adapter(weights.config)
    adapter.tensors["layers.0.q_proj"].lora_A[:] = 3e38
    with refuses("NonFinite", "layers.0.q_proj", where=weights.path):
        MergedWeights(weights, adapter).array("layers.0.q_proj")

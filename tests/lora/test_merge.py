"""Merging: what the merged matrices hold, and one adapter in five ways, beside the base and merged, live."""

import numpy as np
import pytest
from builders.random_adapters import (
    EVERY,
    IDS,
    adapted_logits,
    logits_of,
    peft_model,
    plain_logits,
    random_adapter,
    save_quietly,
    tiny_base,
    torch_logits,
)
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.merge import MergedWeights, merged_matrix
from llorch.lora.peft_format import write_peft
from llorch.training.merge_files import merge

KINDS = {
    "every matrix": {"target_modules": EVERY},
    "rsLoRA with ranks": {"target_modules": EVERY, "use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "DoRA": {"target_modules": (*EVERY, "embed_tokens", "lm_head"), "use_dora": True},
    "embedding": {"target_modules": ("embed_tokens",)},
    "output": {"target_modules": ("lm_head", "q_proj")},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_logits_of_the_adapter(tmp_path, kind, tied):
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


def test_merge_does_not_depend_on_tile_size(monkeypatch, weights):
    adapter = random_adapter(weights.config, target_modules=("embed_tokens", "up_proj"), use_dora=True)
    names = ("embed_tokens", "layers.1.up_proj")
    whole = [merged_matrix(weights.array(name), adapter, name) for name in names]
    monkeypatch.setattr("llorch.lora.merge._AT_ONCE", 96)
    for name, expected in zip(names, whole, strict=True):
        np.testing.assert_allclose(merged_matrix(weights.array(name), adapter, name), expected, rtol=2e-7)


@pytest.mark.parametrize("use_dora", [False, True])
def test_reference_adapter_merges_to_the_same_values(use_dora, weights):
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


def test_tied_embeddings_are_untied_only_if_one_of_them_is_adapted(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base", tied=True))
    inner = MergedWeights(weights, random_adapter(weights.config))
    assert inner.config.tie_word_embeddings
    assert "lm_head" not in inner
    outer = MergedWeights(weights, random_adapter(weights.config, target_modules=("embed_tokens",)))
    assert not outer.config.tie_word_embeddings
    np.testing.assert_array_equal(outer.array("lm_head"), weights.array("embed_tokens"))
    assert not np.array_equal(outer.array("embed_tokens"), weights.array("embed_tokens"))


def test_overflowing_merge_is_refused(weights):
    adapter = random_adapter(weights.config)
    adapter.tensors["layers.0.q_proj"].lora_A[:] = 3e38
    with refuses("NonFinite", "layers.0.q_proj", where=weights.path):
        MergedWeights(weights, adapter).array("layers.0.q_proj")


CASES = [
    ("llama", False, {}),
    ("qwen2", False, {"use_rslora": True}),
    ("qwen3", True, {"alpha_pattern": {"q_proj": 2.0}}),
]


@pytest.mark.live
@pytest.mark.parametrize(("family", "tied", "settings"), CASES)
def test_all_engines_agree_on_an_adapter_and_on_the_merged_model(tmp_path, family, tied, settings):
    from transformers import AutoModelForCausalLM

    from llorch.engines.llamacpp import LlamaCpp, logits_with_adapter

    base = tiny_base(tmp_path / "base", family, tied=tied)
    weights = open_weights(base)
    adapter = random_adapter(weights.config, target_modules=EVERY, **settings)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config)
    for target in ("merged", "merged.gguf"):
        merge(base, tmp_path / "adapter", tmp_path / target)
    ours = adapted_logits(base, adapter)
    with LlamaCpp(tmp_path / "merged.gguf") as engine:
        merged_in_llamacpp = engine.logits(IDS)
    ways = {
        "PEFT": torch_logits(peft_model(base, tmp_path / "adapter")),
        "llama.cpp with the adapter": logits_with_adapter(base, tmp_path / "adapter.gguf", IDS),
        "merged in transformers": torch_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")),
        "merged in llama.cpp": merged_in_llamacpp,
    }
    for way, logits in ways.items():
        np.testing.assert_allclose(logits, ours, rtol=0, atol=5e-6 * np.abs(ours).max(), err_msg=way)


@pytest.mark.live
@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_merge_into_a_tied_base_equals_peft(tmp_path, modules):
    from transformers import AutoModelForCausalLM

    from llorch.engines.llamacpp import LlamaCpp

    base = tiny_base(tmp_path / "base", tied=True)
    weights = open_weights(base)
    write_peft(random_adapter(weights.config, target_modules=modules), tmp_path / "adapter", base=identity_of(weights))
    theirs = torch_logits(peft_model(base, tmp_path / "adapter"))
    for target in ("merged", "merged.gguf"):
        merge(base, tmp_path / "adapter", tmp_path / target)
    with LlamaCpp(tmp_path / "merged.gguf") as engine:
        np.testing.assert_allclose(engine.logits(IDS), theirs, rtol=0, atol=5e-6 * np.abs(theirs).max())
    merged = torch_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    np.testing.assert_allclose(merged, theirs, rtol=0, atol=5e-6 * np.abs(theirs).max())


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
@pytest.mark.parametrize(("tied", "module"), [(True, "lm_head"), (True, "embed_tokens"), (False, "norm")])
def test_remedy_for_fully_trained_modules_keeps_the_logits_of_peft(tmp_path, tied, module):
    import torch

    base = tiny_base(tmp_path / "base", "qwen3", tied=tied)
    model = peft_model(base, r=3, target_modules=["q_proj"], modules_to_save=[module])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    theirs = torch_logits(model)
    merged = save_quietly(model.merge_and_unload(), tmp_path / "merged")
    assert np.abs(theirs - plain_logits(base)).max() > 0.1
    np.testing.assert_allclose(plain_logits(merged), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.live
def test_merged_bf16_folder_equals_peft_up_to_its_second_rounding(tmp_path):
    import torch

    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    merge(base, tmp_path / "adapter", tmp_path / "merged", ggml_type=GGMLType.BF16)
    theirs = peft_model(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = open_weights(tmp_path / "merged")
    for name, path in (("layers.0.q_proj", "model.layers.0.self_attn.q_proj"), ("embed_tokens", "model.embed_tokens")):
        assert np.mean(ours.array(name) != theirs[f"{path}.weight"].to(torch.bfloat16).float().numpy()) < 0.01

"""One adapter in five ways: beside the base in PEFT, llama.cpp and here, merged in transformers and llama.cpp."""

import numpy as np
import pytest
from builders.random_adapters import (
    EVERY,
    IDS,
    adapted_logits,
    peft_model,
    plain_logits,
    random_adapter,
    save_quietly,
    tiny_base,
    torch_logits,
)

from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.training.merge_files import merge

pytestmark = pytest.mark.live
CASES = [
    ("llama", False, {}),
    ("qwen2", False, {"use_rslora": True}),
    ("qwen3", True, {"alpha_pattern": {"q_proj": 2.0}}),
]


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


@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_a_tied_base_merges_into_what_peft_computes(tmp_path, modules):
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


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
@pytest.mark.parametrize(("tied", "module"), [(True, "lm_head"), (True, "embed_tokens"), (False, "norm")])
def test_the_way_out_for_modules_trained_whole_keeps_what_peft_computes(tmp_path, tied, module):
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


def test_a_merged_bf16_folder_is_that_of_peft_but_for_its_second_rounding(tmp_path):
    import torch

    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    merge(base, tmp_path / "adapter", tmp_path / "merged", ggml_type=GGMLType.BF16)
    theirs = peft_model(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = open_weights(tmp_path / "merged")
    for name, path in (("layers.0.q_proj", "model.layers.0.self_attn.q_proj"), ("embed_tokens", "model.embed_tokens")):
        assert np.mean(ours.array(name) != theirs[f"{path}.weight"].to(torch.bfloat16).float().numpy()) < 0.01

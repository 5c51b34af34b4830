"""The plain form of an adapter: one rank, one alpha, no patterns, the same logits."""

import json

import numpy as np
import pytest
from random_adapters import EVERY, adapted_logits, random_adapter, same_tensors, tiny_base

from llorch.errors import FormatError
from llorch.files import open_weights
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.lora.plain import module_names, plain_adapter

KINDS = {
    "rsLoRA": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 5, "up_proj": 2}},
    "alphas": {"alpha_pattern": {"v_proj": 11.0, r"layers\.0\..*": 2.0}},
    "one layer": {"target_modules": ("q_proj", "v_proj"), "layers_to_transform": (1,), "use_rslora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_knows_one_rank_and_alpha_computes_the_same(tmp_path, kind):
    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **KINDS[kind])
    plain = plain_adapter(adapter, weights.config)
    want = adapted_logits(base, adapter)
    np.testing.assert_allclose(adapted_logits(base, plain), want, rtol=0, atol=2e-6 * np.abs(want).max())
    write_peft(plain, tmp_path / "adapter", base=identity_of(weights))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"]
    assert not any(config[key] for key in ("rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform"))
    assert {len(tensors.lora_A) for tensors in plain.tensors.values()} == {config["r"]}


def test_an_adapter_that_is_plain_already_keeps_its_bits(tmp_path):
    config = open_weights(tiny_base(tmp_path / "base")).config
    adapter = random_adapter(config)
    plain = plain_adapter(adapter, config)
    assert same_tensors(plain, adapter)
    assert plain.config.lora_alpha == adapter.config.lora_alpha


def test_dora_is_refused(tmp_path):
    config = open_weights(tiny_base(tmp_path / "base")).config
    with pytest.raises(FormatError, match="merge instead"):
        plain_adapter(random_adapter(config, use_dora=True), config)


def test_modules_are_named_by_their_ends_where_every_layer_has_them(tmp_path):
    config = open_weights(tiny_base(tmp_path / "base")).config
    assert module_names(random_adapter(config).targets, config) == tuple(sorted(EVERY))
    some = random_adapter(config, target_modules=("q_proj",), layers_to_transform=(1,))
    assert module_names(some.targets, config) == ("model.layers.1.self_attn.q_proj",)

"""An adapter as arrays: complete, of the right shapes, finite; or refused with everything that is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from llorch.config import ModelConfig
from llorch.errors import FormatError
from llorch.lora.adapter import Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig

LORA = LoraConfig(r=2, lora_alpha=3.0, target_modules=("q_proj", "embed_tokens"), rank_pattern={r"layers\.1\..*": 3})


def tensors(config: ModelConfig, rng: np.random.Generator, lora: LoraConfig = LORA) -> dict[str, LoraTensors]:
    found = {}
    for name, target in lora.targets(config).items():
        rank = lora.rank_of(target)
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((rank, target.n_in), (target.n_out, rank)))
        found[name] = LoraTensors(a, b, np.ones(target.n_out, np.float32) if lora.use_dora else None)
    return found


@pytest.fixture
def adapter(config: ModelConfig, rng: np.random.Generator) -> Adapter:
    return checked(LORA, tensors(config, rng), config)


def test_an_adapter_counts_its_numbers_and_names_them_in_order(adapter: Adapter, config: ModelConfig):
    q = [(config.hidden_size + config.q_width) * rank for rank in (2, 3, 2)]
    assert adapter.n_parameters == sum(q) + 2 * (config.vocab_size + config.hidden_size)
    assert list(adapter.flat())[:3] == ["embed_tokens.lora_A", "embed_tokens.lora_B", "layers.0.q_proj.lora_A"]
    assert adapter.scaling("layers.0.q_proj") == 1.5


def test_the_order_of_the_tensors_does_not_matter(config: ModelConfig, rng: np.random.Generator):
    backwards = dict(reversed(tensors(config, rng).items()))
    assert list(checked(LORA, backwards, config).tensors) == list(LORA.targets(config))


def test_a_length_of_rows_belongs_to_dora_alone(config: ModelConfig, rng: np.random.Generator):
    dora = replace(LORA, use_dora=True)
    assert checked(dora, tensors(config, rng, dora), config).flat()["layers.0.q_proj.magnitude"].shape == (24,)
    with pytest.raises(FormatError, match=r"Missing: .*layers\.0\.q_proj\.magnitude"):
        checked(dora, tensors(config, rng), config)
    with pytest.raises(FormatError, match=r"Unexpected: .*layers\.0\.q_proj\.magnitude"):
        checked(LORA, tensors(config, rng, dora), config)


def test_what_is_missing_or_too_many_is_listed(config: ModelConfig, rng: np.random.Generator):
    half = {name: t for name, t in tensors(config, rng).items() if name != "layers.2.q_proj"}
    with pytest.raises(
        FormatError, match=r"adapter: Missing: .*expected 8 tensors; Missing: layers\.2\.q_proj\.lora_A, "
    ):
        checked(LORA, half, config, where="adapter")
    with pytest.raises(FormatError, match=r"Unexpected: .*Unexpected: layers\.0\.v_proj\.lora_A, "):
        checked(LORA, tensors(config, rng) | {"layers.0.v_proj": half["layers.0.q_proj"]}, config)


def test_a_module_that_the_model_lacks_is_missing(config: ModelConfig):
    with pytest.raises(FormatError, match="Missing: lora config: the model has no module c_attn"):
        checked(LoraConfig(target_modules=("c_attn",)), {}, config)

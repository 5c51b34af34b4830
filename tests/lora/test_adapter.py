"""An adapter as arrays: counted and named; what is refused stands with the formats that it is read from."""

import numpy as np
import pytest

from llorch.families.config import ModelConfig
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

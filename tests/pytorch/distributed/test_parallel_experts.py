"""Experts split over ranks: generation, gradients, and what cannot be. Their stages: `test_parallel`."""

from typing import Any

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.split_runs import NoText, answered, generated, gradients

from llorch.lora.config import LoraConfig
from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.model import load_torch
from llorch.runtime.errors import EngineDied

pytestmark = pytest.mark.usefixtures("warm_ranks")

ATTENTION: Any = {"r": 4, "lora_alpha": 8, "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}


@pytest.mark.slow
def test_tokens_are_those_of_one_process():
    model = load_torch("micro-qwen2-moe")
    vars(model)["tokenizer"] = NoText()
    assert on_ranks(2, generated, "micro-qwen2-moe", 2, {})["tokens"] == [answered(model)] * 2


def test_gradients_of_adapters_on_attention_are_those_of_one_process():
    lora = LoraConfig(**ATTENTION)
    alone, split = gradients("micro-qwen2-moe", 1, lora), on_ranks(2, gradients, "micro-qwen2-moe", 2, lora)
    assert alone.keys() == split.keys()
    for name, expected in alone.items():
        largest = float(np.abs(expected).max())
        assert largest > 0
        np.testing.assert_allclose(split[name], expected, rtol=0, atol=1e-12 * largest, strict=True, equal_nan=False)


@pytest.mark.slow
def test_adapters_on_experts_are_refused():
    lora = LoraConfig(r=4, lora_alpha=8, target_parameters=("experts.down_proj",))
    with refuses(EngineDied, "adapters", "experts"):
        on_ranks(2, gradients, "micro-qwen2-moe", 2, lora)

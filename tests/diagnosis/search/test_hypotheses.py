"""Hypotheses that a diagnosis replays: roundings of products, and mistakes of a folder's scheme."""

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from helpers.stored_goldens import weights_of

from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.search.block_hypotheses import block_mistakes
from llorch.diagnosis.search.hypotheses import rounding_hypotheses
from llorch.files import open_weights
from llorch.ops.rounding import round_activations


@pytest.mark.parametrize("model", ["micro-llama", "micro-qwen2"], ids=["no bias", "bias"])
def test_products_kept_in_half_precision_are_rounded_before_the_bias(model: str):
    weights = weights_of(model).astype(np.float64)
    config, layer = weights.config, weights.layer(0)
    (hypothesis,) = (one for one in rounding_hypotheses(config) if one.name == "products-kept-in-bf16")
    stage_change = hypothesis.change(("l0.q_proj",)).replaced_stages["l0.q_proj"]
    product = np.random.default_rng(7).standard_normal((3, config.q_width))
    bias = layer.get("q_bias", np.zeros(config.q_width))
    assert bias.any() == config.qkv_bias
    inputs = StageInputs(config, layer, {}, np.arange(3), np.arange(3), np.float64, 0)
    actual = stage_change.wrong(inputs, "q_proj", product + bias)
    np.testing.assert_array_equal(actual, round_activations(product, "BF16") + bias)


@pytest.mark.parametrize(("folder", "prefix"), [("awq-gemm", "awq-"), ("mlx-4bit", "mlx-"), ("bnb-nf4", "nf4-")])
def test_folder_gets_the_mistakes_of_its_scheme(folder: str, prefix: str):
    names = {hypothesis.name for hypothesis in block_mistakes(open_weights(FOLDERS / folder))}
    others = {"awq-", "mlx-", "nf4-", "gptq-", "fp8-"} - {prefix}
    assert any(name.startswith(prefix) for name in names)
    assert not any(name.startswith(tuple(others)) for name in names)

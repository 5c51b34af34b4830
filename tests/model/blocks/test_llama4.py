"""Llama 4 beside transformers itself, in float64: chunks, head norm, temperature, experts that are given a share."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import random_folder

from llorch.files import open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

pytestmark = pytest.mark.live  # transformers makes the models

CASES = {  # settings, and what a change of which must show
    "dense and sparse layers": {"attention_chunk_size": 8, "floor_scale": 5},
    "two experts": {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "use_qk_norm": False},
    "never tempered": {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "attention_chunk_size": 7},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_every_variant_is_that_of_transformers(tmp_path: Path, settings: dict):
    import torch
    from transformers import Llama4ForCausalLM

    from llorch.engines.float64_everywhere import float64_everywhere

    folder = random_folder("llama4", tmp_path / "llama4", 0, **settings)
    with float64_everywhere(refuse=False):
        model = Llama4ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    ids = np.arange(30) * 7 % 104
    with float64_everywhere(), torch.no_grad():
        expected = model(torch.tensor(ids[None]), use_cache=True).logits[0].numpy()
    weights = open_weights(folder).astype(np.float64)
    for parts in ([30], [9, 1, 20]):
        cache = KVCache(weights.config, np.float64)
        actual = np.concatenate([forward(part, weights, cache) for part in np.split(ids, np.cumsum(parts)[:-1])])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("how", ["plain", "sdpa", "reproducible", "batch"])
def test_torch_is_that_of_numpy_in_every_way_that_it_runs(tmp_path: Path, how: str):
    from llorch.judging.runners.torch import VARIANTS, TorchRunner
    from llorch.pytorch.device import target
    from llorch.stages.stage_ref import Pass

    weights = open_weights(random_folder("llama4", tmp_path / "llama4", 1, **CASES["dense and sparse layers"]))
    name = {"plain": "", "batch": "-fast-batch"}.get(how, f"-{how}")
    runner = TorchRunner(weights, target("cpu", "float32"), VARIANTS[name], name)
    ids, shown = np.arange(30) * 7 % 104, dict[str, np.ndarray]()
    runner.chained("near", Pass(tuple(ids.tolist())), shown.__setitem__, n_cached=11)  # pyright: ignore
    expected = forward(ids, weights.astype(np.float64), KVCache(weights.config, np.float64))[11:]
    np.testing.assert_allclose(shown["logits"], expected, rtol=0, atol=2e-5 * np.abs(expected).max())

"""Windows, layers without RoPE, temperature and all of Llama 4 beside transformers itself, in float64."""

from pathlib import Path

import numpy as np
import pytest
from builders.by_position import FAMILIES, logits_of, random_model
from builders.families import random_folder

from llorch.families.layers import Layer, Temperature
from llorch.files import open_weights
from llorch.model.blocks import forward
from llorch.model.blocks.positions import seen_from
from llorch.model.cache import KVCache

pytestmark = pytest.mark.live  # transformers makes the models

LLAMA4_CASES = {  # settings, and what a change of which must show
    "dense and sparse layers": {"attention_chunk_size": 8, "floor_scale": 5},
    "two experts": {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "use_qk_norm": False},
    "never tempered": {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "attention_chunk_size": 7},
}


@pytest.fixture(params=FAMILIES)
def both(request):
    return random_model(request.param)


@pytest.mark.parametrize(("first", "parts"), [(0, [40]), (0, [13, 1, 26]), (301, [40])])
def test_every_family_is_that_of_transformers(both, first, parts):
    model, weights = both
    ids, cache = np.arange(40) * 7 % 104, KVCache(weights.config, np.float64, first_position=first)
    expected = logits_of(model, ids, first)
    actual = np.concatenate([forward(part, weights, cache) for part in np.split(ids, np.cumsum(parts)[:-1])])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_a_window_counts_the_token_itself_and_a_chunk_starts_at_its_multiple():
    positions = np.arange(14, 18)
    np.testing.assert_array_equal(Layer(window=3).seen_from(positions), [12, 13, 14, 15])
    np.testing.assert_array_equal(Layer(chunk=8).seen_from(positions), [8, 8, 16, 16])
    np.testing.assert_array_equal(seen_from(Layer(chunk=8), positions, ctx=6), [-4, -4, 4, 4])  # keys 12 to 17
    assert Layer().seen_from(positions) is None


def test_temperature_is_that_of_positions_worked_by_hand():
    positions = np.array([6, 7, 8, 15])
    llama4, ministral = (Temperature(scale=0.1, floor=8, offset=offset) for offset in (1, 0))
    np.testing.assert_allclose(llama4.of(positions), 1 + 0.1 * np.log([1, 2, 2, 3]), rtol=1e-15)
    np.testing.assert_allclose(ministral.of(positions), 1 + 0.1 * np.log([1, 1, 2, 2]), rtol=1e-15)


@pytest.mark.parametrize("settings", LLAMA4_CASES.values(), ids=LLAMA4_CASES)
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

    weights = open_weights(random_folder("llama4", tmp_path / "llama4", 1, **LLAMA4_CASES["dense and sparse layers"]))
    name = {"plain": "", "batch": "-fast-batch"}.get(how, f"-{how}")
    runner = TorchRunner(weights, target("cpu", "float32"), VARIANTS[name], name)
    ids, shown = np.arange(30) * 7 % 104, dict[str, np.ndarray]()
    runner.chained("near", Pass(tuple(ids.tolist())), shown.__setitem__, n_cached=11)  # pyright: ignore
    expected = forward(ids, weights.astype(np.float64), KVCache(weights.config, np.float64))[11:]
    np.testing.assert_allclose(shown["logits"], expected, rtol=0, atol=2e-5 * np.abs(expected).max())

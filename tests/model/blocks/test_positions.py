"""Windows, layers without RoPE, temperature, experts and all of Llama 4 beside transformers itself, in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.by_position import FAMILIES, logits_of, random_model
from builders.families import random_folder

from llorch.engines.transformers_capture import float64_everywhere
from llorch.families.layers import Experts, Layer, Temperature
from llorch.files import open_weights
from llorch.model.blocks import forward
from llorch.model.blocks.experts import experts
from llorch.model.blocks.positions import seen_from
from llorch.model.cache import KVCache

pytestmark = pytest.mark.live  # transformers makes the models
LLAMA4_CASES = {  # settings, and what a change of which must show
    "dense and sparse layers": {"attention_chunk_size": 8, "floor_scale": 5},
    "two experts": {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "use_qk_norm": False},
    "never tempered": {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "attention_chunk_size": 7},
}


@pytest.fixture(params=FAMILIES)
def model_and_weights(request):
    return random_model(request.param)


@pytest.mark.parametrize(("first", "parts"), [(0, [40]), (0, [13, 1, 26]), (301, [40])])
def test_every_family_is_that_of_transformers(model_and_weights, first, parts):
    model, weights = model_and_weights
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

    from llorch.engines.transformers_capture import float64_everywhere

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


@pytest.mark.parametrize("variant", ["plain", "sdpa", "reproducible", "batch"])
def test_torch_is_that_of_numpy_in_every_way_that_it_runs(tmp_path: Path, variant: str):
    from llorch.judging.runners.torch import VARIANTS, TorchRunner
    from llorch.pytorch.device import target
    from llorch.stages.stage_ref import Pass

    weights = open_weights(random_folder("llama4", tmp_path / "llama4", 1, **LLAMA4_CASES["dense and sparse layers"]))
    name = {"plain": "", "batch": "-fast-batch"}.get(variant, f"-{variant}")
    runner = TorchRunner(weights, target("cpu", "float32"), VARIANTS[name], name)
    ids, shown = np.arange(30) * 7 % 104, dict[str, np.ndarray]()
    runner.chained("near", Pass(tuple(ids.tolist())), shown.__setitem__, n_cached=11)  # pyright: ignore
    expected = forward(ids, weights.astype(np.float64), KVCache(weights.config, np.float64))[11:]
    np.testing.assert_allclose(shown["logits"], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


SEQ, HIDDEN, INTER, SHARED, N = 13, 24, 20, 28, 7


def block_of(kind: str, **settings: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A random block of transformers, and its weights by our short names."""
    import torch
    import transformers

    values = {
        "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "num_experts": N, "num_attention_heads": 2,
        "_experts_implementation": "eager", **settings,
    }  # fmt: skip
    if kind == "Qwen2Moe":
        values["shared_expert_intermediate_size"] = SHARED
    module = getattr(transformers.models, "qwen2_moe" if kind == "Qwen2Moe" else "qwen3_moe")
    made = getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
    with float64_everywhere(refuse=False):
        block = getattr(made, f"{kind}SparseMoeBlock")(getattr(transformers, f"{kind}Config")(**values))
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    state = {name: tensor.numpy() for name, tensor in block.state_dict().items()}
    gate, up = np.split(state["experts.gate_up_proj"], 2, axis=1)
    weights = {
        "router": state["gate.weight"], "experts_gate_proj": gate, "experts_up_proj": up,
        "experts_down_proj": state["experts.down_proj"],
    }  # fmt: skip
    weights |= {
        f"shared_{part}_proj": state[name] for part in ("gate", "up", "down")
        if (name := f"shared_expert.{part}_proj.weight") in state
    }  # fmt: skip
    return block, weights | ({"shared_gate": state["shared_expert_gate.weight"]} if kind == "Qwen2Moe" else {})


@pytest.mark.parametrize("k", [1, 3, N])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen3Moe"])
def test_transformers_block_in_float64(kind: str, normalised: bool, k: int) -> None:
    import torch

    torch.manual_seed(k)
    block, weights = block_of(kind, num_experts_per_tok=k, norm_topk_prob=normalised)
    h, trace = np.random.default_rng(k).normal(size=(SEQ, HIDDEN)), dict[str, np.ndarray]()
    with float64_everywhere(), torch.no_grad():
        expected = block(torch.from_numpy(h)[None])[0].numpy()
        _, theirs, ids = block.gate(torch.from_numpy(h))
    shared = SHARED if kind == "Qwen2Moe" else 0
    settings = Experts(
        n_experts=N, n_experts_per_token=k, expert_size=INTER, shared_size=shared, shared_gate=shared > 0,
        norm_topk_prob=normalised,
    )  # fmt: skip
    actual = experts(h, weights, lambda name, array: trace.setdefault(name, array), settings=settings)
    assert np.abs(actual - expected).max() < 1e-12 * np.abs(expected).max()
    np.testing.assert_array_equal(trace["topk_ids"], ids.numpy())
    np.testing.assert_allclose(trace["topk_weights"], theirs.numpy(), rtol=1e-13)
    assert trace["expert_act"].shape == (SEQ, k, INTER)
    assert trace["topk_ids"].dtype == np.int64

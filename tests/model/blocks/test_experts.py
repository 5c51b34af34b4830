"""The page of experts, beside transformers' own block computing in float64, and what it leaves untouched."""

from typing import Any

import numpy as np
import pytest

from llorch.engines.float64_everywhere import float64_everywhere
from llorch.families.layers import Experts
from llorch.model.blocks.experts import experts

pytestmark = pytest.mark.live  # transformers makes the models

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

"""A whole model with all Triton kernels, against the plain one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernel_tolerances import DTYPES, PLACES, distance, kernel_device
from torch import nn

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, attention
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.table import install_kernels
from llorch.pytorch.kernels.triton import dense_matvec
from llorch.pytorch.kernels.triton.dense_matvec import DenseLinear
from llorch.pytorch.kernels.triton.kernels import TRITON_KERNELS

SCORES = ("attn_scores", "attn_probs")
FAMILIES = {
    "qwen3": {"n_layers": 2},
    "qwen2": {"n_layers": 2, "family": "qwen2", "qkv_bias": True, "qk_norm": False, "n_kv_heads": 1},
}


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(dense_matvec, "_PROGRAMS", 1)  # few programs, which the interpreter runs one by one
    return kernel_device(request.param)


def model(config: Any, dtype: torch.dtype, device: torch.device, *, rounded_to: torch.dtype) -> CausalLM:
    """Random weights, the same for every dtype: those of the narrowest one."""
    made, generator = CausalLM(config), torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        start = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.5)
        weight.data = (start + (1 if "norm" in name else 0)).to(rounded_to)
    return made.to(device, dtype).requires_grad_(False)


def traces(causal_lm: CausalLM, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Every stage of a padded prompt, of a step, and of one after the second row ended; all look at the whole cache."""
    cache = Cache(causal_lm.config, batch=2, n_slots=9, dtype=causal_lm.model.norm.weight.dtype, device=device)
    ids = torch.arange(12).view(2, 6)
    passes = [[[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]], [[5], [3]], [[6], [-1]]]
    found = []
    for positions in passes:
        trace: dict[str, torch.Tensor] = {}

        def keep(name: str, array: torch.Tensor, trace: dict[str, torch.Tensor] = trace) -> torch.Tensor:
            trace[name] = array.clone()
            return array

        place = cache.place(torch.tensor(positions, device=device), ctx=9)
        causal_lm(ids[:, : len(positions[0])].to(device), place, cache, keep=keep)
        found.append({name: _select_tokens(array, positions) for name, array in trace.items()})
    return found


def _select_tokens(array: torch.Tensor, positions: list[list[int]]) -> torch.Tensor:
    """Without the rows of padding, which nobody looks at, where the stage has a row per token."""
    if array.shape[1] != len(positions[0]):
        return array
    return array[torch.tensor(positions, device=array.device) >= 0]


@pytest.mark.nightly_cases("interpreter-*-torch.bfloat16", "interpreter-*-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_stages_are_as_close_to_float64_as_unfused_ones(config, family, dtype, device):
    config = replace(config, **FAMILIES[family])
    plain, fused = (model(config, dtype, device, rounded_to=dtype) for _ in range(2))
    use_sdpa(fused)
    install_kernels(fused, TRITON_KERNELS)
    exact = traces(model(config, torch.float64, device, rounded_to=dtype), device)
    floor = 4 * torch.finfo(dtype).eps
    for expected, near, actual in zip(exact, traces(plain, device), traces(fused, device), strict=True):
        assert list(actual) == [name for name in expected if not name.endswith(SCORES)]
        for name, array in actual.items():
            assert array.dtype is dtype
            assert array.device.type == device.type
            assert distance(array, expected[name]) <= max(4 * distance(near[name], expected[name]), floor), name


def test_model_without_observers_gives_the_same_logits(config, device):
    config = replace(config, n_layers=1)
    fused = model(config, torch.float32, device, rounded_to=torch.float32)
    use_sdpa(fused)
    install_kernels(fused, TRITON_KERNELS)
    logits = []
    for observe in ({}, {"keep": lambda name, array: array}):
        cache = Cache(config, batch=2, n_slots=9, dtype=torch.float32, device=device)
        for start, seq in ((0, 5), (5, 1)):
            ids = torch.arange(start, start + 2 * seq, device=device).view(2, seq)
            positions = torch.arange(start, start + seq, device=device).expand(2, seq)
            logits.append(fused(ids, cache.place(positions, ctx=9), cache, **observe))
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


def test_eager_attention_is_not_replaced(config):
    made = model(config, torch.float32, torch.device("cpu"), rounded_to=torch.float32)
    install_kernels(made, TRITON_KERNELS)
    layers: Any = made.model.layers
    assert all(layer.self_attn.attend is attention for layer in layers)


def test_weights_keep_their_names_and_their_memory(config):
    made = model(config, torch.float32, torch.device("cpu"), rounded_to=torch.float32)
    made.lm_head.weight = made.model.embed_tokens.weight
    before = {name: weight.data_ptr() for name, weight in made.state_dict().items()}
    install_kernels(made, TRITON_KERNELS)
    assert {name: weight.data_ptr() for name, weight in made.state_dict().items()} == before


def test_non_dense_projections_are_not_replaced(config):
    made = model(config, torch.float32, torch.device("cpu"), rounded_to=torch.float32)
    layers: Any = made.model.layers
    packed = layers[0].self_attn.k_proj = nn.Identity()
    install_kernels(made, TRITON_KERNELS)
    assert layers[0].self_attn.k_proj is packed
    assert isinstance(layers[0].self_attn.q_proj, DenseLinear)
    assert layers[0].self_attn.q_proj.shared_launch is layers[0].self_attn.v_proj.shared_launch is not None

"""Adapters on modules of the torch model: put on, switched, trained, taken off."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.refusals import refuses
from helpers.training_passes import ALL, CPU, SETTINGS, base, batch, logits_of, loss_of
from torch import Tensor, nn

from llorch.files import open_weights
from llorch.lora.merge import MergedWeights
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.pytorch.load import load_dense
from llorch.pytorch.lora.adapters import (
    activate,
    adapter_names,
    adapter_of,
    attach,
    detach,
    lora_modules,
    trainable_parameters,
)
from llorch.pytorch.lora.dropout import drop_mask, keyed, salt_of, token_keys
from llorch.pytorch.lora.modules import LoraModule, delta
from llorch.runtime.builtin import builtin_path

KEYS = token_keys(np.arange(2), 9, seed=0, step=0)  # of `batch`
KINDS = pytest.mark.parametrize("kind", SETTINGS)


def logits(module: CausalLM) -> Tensor:
    with torch.no_grad():
        return logits_of(module, batch())


def gradients(module: CausalLM) -> Mapping[str, Tensor]:
    parameters = trainable_parameters(module)
    made = torch.autograd.grad(loss_of(logits_of(module, batch()), batch()), list(parameters.values()))
    return dict(zip(parameters, made, strict=True))


def assert_slope(module: CausalLM, keys: list[str]) -> None:
    """The loss changes along a random direction of some parameters as their gradients say."""
    parameters, made = trainable_parameters(module), gradients(module)
    directions = {key: random_values(*parameters[key].shape, seed=at).double() for at, key in enumerate(keys)}
    losses = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for key, direction in directions.items():
                parameters[key].add_(step * direction)
            losses.append(float(loss_of(logits_of(module, batch()), batch())))
            for key, direction in directions.items():
                parameters[key].sub_(step * direction)
    slope = sum(float((made[key] * direction).sum()) for key, direction in directions.items())
    assert abs(slope) > 0.01
    assert slope == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def random_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def digest(module: nn.Module) -> str:
    """Of every tensor that is no adapter's."""
    of_adapters = {id(p) for m in module.modules() if isinstance(m, nn.ParameterDict) for p in m.values()}
    tensors = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in of_adapters]
    return hashlib.sha256(
        b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


@KINDS
@pytest.mark.parametrize("name", ["micro-llama3", "micro-qwen3"])  # tied, and not
def test_adapter_on_the_base_equals_the_merged_weights(name: str, kind: str):
    module = base(name, torch.float64)
    adapter = random_adapter(module.config, **SETTINGS[kind])
    attach(module, adapter)
    wide = MergedWeights(open_weights(builtin_path(name)).astype(np.float64), adapter)
    expected = logits(load_dense(wide, dtype=torch.float64, device=CPU))
    torch.testing.assert_close(logits(module), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    assert float((expected - logits(base(name, torch.float64))).abs().max()) > 0.1


@KINDS
def test_gradients_equal_finite_differences(kind: str):
    module = base("micro-qwen2", torch.float64)
    adapter = random_adapter(module.config, **SETTINGS[kind])
    attach(module, adapter, trainable=True)
    held = ("lora_A", "lora_B") if adapter.config.use_dora else ()  # of a length that differences would change
    assert_slope(module, [key for key in adapter.flat() if not key.endswith(held)])


def test_parameters_have_names_order_and_values_of_the_adapter():
    module = base("micro-qwen2")
    adapter = random_adapter(module.config, **SETTINGS["dora on embedding and head"])
    attach(module, adapter, name="mine", trainable=True)
    parameters = trainable_parameters(module, "mine")
    assert list(parameters) == list(adapter.flat())
    assert all(np.array_equal(p.detach().numpy(), adapter.flat()[key]) for key, p in parameters.items())
    with torch.no_grad():
        parameters["lm_head.lora_B"].add_(1)
    assert np.array_equal(adapter_of(module, "mine").tensors["lm_head"].lora_B, adapter.tensors["lm_head"].lora_B + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_float32_for_narrower_bases_and_float64_for_float64(dtype: torch.dtype):
    module = base("micro-qwen2", dtype)
    attach(module, random_adapter(module.config), trainable=True)
    wide = torch.promote_types(dtype, torch.float32)
    made = logits_of(module, batch())
    loss_of(made, batch()).backward()
    parameters = trainable_parameters(module).values()
    assert made.dtype is dtype
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters if p.grad is not None} == {wide}


def test_the_sum_of_product_and_delta_is_rounded_once():
    module = base("micro-qwen2", torch.bfloat16)
    path, x = "model.layers.0.self_attn.k_proj", random_values(3, 96).bfloat16()
    product = module.get_submodule(path)(x)
    adapter = random_adapter(module.config, target_modules=("k_proj",))
    attach(module, adapter)
    tensors = adapter.tensors["layers.0.k_proj"]
    matrix = adapter.scaling("layers.0.k_proj") * torch.from_numpy(tensors.lora_B @ tensors.lora_A).double()
    assert torch.equal(module.get_submodule(path)(x), (product.double() + x.double() @ matrix.T).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.25], ids=["no dropout", "dropout"])
def test_the_sum_with_the_base_has_the_bits_of_torchs_own_sum(share: float, dtype: torch.dtype):
    x, y, lora_A, lora_B = (
        random_values(*shape, seed=at) for at, shape in enumerate([(2, 5, 12), (2, 5, 7), (3, 12), (7, 3)])
    )
    given = [x.to(dtype), lora_A, lora_B, y.to(dtype)]
    how: Any = {"scaling": 1.5, "mask": random_values(2, 5, 12, seed=5) > 0 if share else None, "share": share}
    grad, results = random_values(2, 5, 7, seed=6).to(dtype), []
    for together in (True, False):
        x, lora_A, lora_B, y = (tensor.detach().requires_grad_() for tensor in given)
        if together:
            made = delta(x, lora_A, lora_B, **how, onto=y)
        else:
            made = (y + delta(x, lora_A, lora_B, **how)).to(dtype)
        results.append((made, *torch.autograd.grad(made, [x, lora_A, lora_B, y], grad)))
    with torch.no_grad():
        assert torch.equal(delta(x, lora_A, lora_B, **how, onto=y), results[0][0])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype is expected.dtype
        assert torch.equal(actual, expected)


@KINDS
def test_detach_restores_the_original_modules(kind: str):
    module = base("micro-llama3")
    before, models = logits(module), dict(module.named_modules())
    attach(module, random_adapter(module.config, **SETTINGS[kind]), trainable=True)
    assert not torch.equal(logits(module), before)
    detach(module, "default")
    assert dict(module.named_modules()) == models
    assert torch.equal(logits(module), before)


def test_switching_and_detaching_one_adapter_keeps_the_other():
    module = base("micro-qwen2")
    plain, expected = logits(module), {}
    for seed, name in enumerate(("one", "two")):
        alone = base("micro-qwen2")
        attach(alone, random_adapter(alone.config, seed=seed, target_modules=ALL[seed : seed + 3]))
        attach(module, random_adapter(alone.config, seed=seed, target_modules=ALL[seed : seed + 3]), name=name)
        expected[name] = logits(alone)
    assert adapter_names(module) == ["one", "two"]
    for name in ("one", "two", "one"):
        activate(module, name)
        assert torch.equal(logits(module), expected[name])
    activate(module, None)
    assert torch.equal(logits(module), plain)
    detach(module, "one")
    activate(module, "two")
    assert torch.equal(logits(module), expected["two"])


def test_optimizer_steps_change_the_adapter_only():
    module = base("micro-llama3")
    attach(module, random_adapter(module.config, **SETTINGS["dora on embedding and head"]), trainable=True)
    before, optimizer = digest(module), torch.optim.AdamW(trainable_parameters(module).values(), lr=0.01)
    first = adapter_of(module)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(logits_of(module, batch()), batch()).backward()
        optimizer.step()
    assert digest(module) == before
    assert [key for key, p in module.named_parameters() if p.grad is not None and "lora_" not in key] == []
    assert all((a != b).any() for a, b in zip(first.flat().values(), adapter_of(module).flat().values(), strict=True))
    with torch.no_grad():
        module.model.norm.weight[0] += 1  # the digest can tell
    assert digest(module) != before


def test_attaching_a_trainable_adapter_freezes_the_base():
    module = base("micro-qwen2")
    module.model.norm.weight.requires_grad_(True)
    attach(module, random_adapter(module.config), name="frozen")
    attach(module, random_adapter(module.config), name="trained", trainable=True)
    wanting = [p for p in module.parameters() if p.requires_grad]
    assert {id(p) for p in wanting} == {id(p) for p in trainable_parameters(module, "trained").values()}


def test_dropout_acts_in_training_on_the_input_of_the_adapter_only():
    module = base("micro-qwen2", torch.float64)
    adapter = random_adapter(module.config, target_modules=("q_proj",), lora_dropout=0.5)
    attach(module, adapter)
    lora_module, x = module.get_submodule("model.layers.0.self_attn.q_proj"), random_values(1, 4000, 96).double()
    assert isinstance(lora_module, LoraModule)
    whole, product = lora_module(x), lora_module.base_layer(x)
    module.train()
    keys = token_keys(np.arange(1), 4000, seed=0, step=3)
    with keyed(module, keys):
        dropped = lora_module(x)
    kept = drop_mask(keys, 0.5, salt=salt_of("layers.0.q_proj"), width=96)
    tensors = adapter.tensors["layers.0.q_proj"]
    matrix = adapter.scaling("layers.0.q_proj") * torch.from_numpy(tensors.lora_B @ tensors.lora_A).double()
    torch.testing.assert_close(dropped, product + (x * kept * 2) @ matrix.T, rtol=1e-6, atol=1e-5)
    assert abs(float(kept.double().mean()) - 0.5) < 0.01
    module.eval()
    assert torch.equal(lora_module(x), whole)


def test_dora_with_dropout_scales_the_base_output_of_the_dropped_input():
    module = base("micro-qwen2", torch.float64)
    adapter = random_adapter(module.config, target_modules=("q_proj",), lora_dropout=0.5, use_dora=True)
    attach(module, adapter)
    lora_module, x = module.get_submodule("model.layers.0.self_attn.q_proj"), random_values(1, 40, 96).double()
    assert isinstance(lora_module, LoraModule)
    module.train()
    keys = token_keys(np.arange(1), 40, seed=0, step=3)
    with keyed(module, keys):
        actual = lora_module(x)
    left = x * drop_mask(keys, 0.5, salt=salt_of("layers.0.q_proj"), width=96) * 2
    tensors, weight = adapter.tensors["layers.0.q_proj"], lora_module.base_layer.weight
    assert tensors.magnitude is not None
    changed = weight + adapter.scaling("layers.0.q_proj") * torch.from_numpy(tensors.lora_B @ tensors.lora_A).double()
    whole = torch.from_numpy(tensors.magnitude)[:, None] / changed.norm(dim=1, keepdim=True) * changed
    torch.testing.assert_close(actual, lora_module.base_layer(x) + left @ (whole - weight).mT, rtol=1e-6, atol=1e-5)


def test_dropout_gradients_use_the_mask_of_the_forward_pass():
    module = base("micro-qwen2", torch.float64)
    for dora in (False, True):
        attach(module, random_adapter(module.config, lora_dropout=0.3, use_dora=dora), trainable=True)
        module.train()
        with keyed(module, KEYS):
            assert_slope(module, [key for key in trainable_parameters(module) if not dora or key.endswith("magnitude")])
        detach(module, "default")


def test_training_on_kernels_without_gradient_is_refused():
    module = base("micro-qwen2")
    install_kernels(module, kernels_for(torch.device("cpu"), torch.float32, required=False))
    with refuses(ValueError, "CpuLinear", "gradient", where="model.layers.0.self_attn.q_proj"):
        attach(module, random_adapter(module.config), trainable=True)
    assert adapter_names(module) == []
    attach(module, random_adapter(module.config))  # to run it is well


@pytest.mark.parametrize("name", ["", "a.b", "keys", "a b"])
def test_invalid_adapter_name_is_refused(name: str):
    module = base("micro-qwen2")
    with refuses(ValueError, "name", repr(name)):
        attach(module, random_adapter(module.config), name=name)
    assert list(lora_modules(module)) == []


def test_unknown_adapter_and_wrong_model_are_refused():
    module = base("micro-qwen2")
    attach(module, random_adapter(module.config))
    with refuses(ValueError, "'default'", "already"):
        attach(module, random_adapter(module.config))
    for call in (activate, detach, trainable_parameters, adapter_of):
        with refuses(ValueError, "'other'", "default"):
            call(module, "other")
    with refuses(ValueError, "model", "layers.0.q_proj", where="'foreign'"):
        attach(module, random_adapter(base("micro-qwen3").config), name="foreign")

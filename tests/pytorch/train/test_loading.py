"""The linear layer of frozen weights: the products of `nn.Linear`, forward and backward, and no gradient of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target, target
from llorch.pytorch.kernels import kernel_selection
from llorch.pytorch.kernels.cpu.quantised import TrainedQuantisedLinear
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import sdpa_attention
from llorch.pytorch.load import load_dense
from llorch.pytorch.random_weights import random_fields
from llorch.pytorch.train.loading import FrozenLinear, freeze_linears, prepare
from llorch.runtime.builtin import builtin_path


def loaded(dtype: torch.dtype) -> CausalLM:
    return load_dense(open_weights(builtin_path("micro-qwen2")), dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_those_of_a_linear_layer(bias: bool):
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias)
    frozen = FrozenLinear(plain.weight.detach(), plain.bias.detach() if bias else None)
    x, grad = torch.randn(2, 7, 96), torch.randn(2, 7, 160)
    results = []
    for layer in (plain, frozen):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(grad)
        results.append((y.detach(), own.grad))
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=2e-6)


def test_a_gradient_that_does_not_lie_in_order_is_multiplied_right():
    layer = FrozenLinear(torch.randn(6, 4), None)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).T.contiguous().T.sum(dim=0).mul(torch.arange(6.0)).sum().backward()
    torch.testing.assert_close(x.grad, (torch.arange(6.0) @ layer.weight).expand(3, 4))


def test_every_float32_projection_is_replaced_and_shares_its_weights():
    module = loaded(torch.float32)
    before = dict(module.named_parameters())
    freeze_linears(module)
    assert isinstance(module.lm_head, FrozenLinear)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    q_proj = module.get_submodule("model.layers.1.self_attn.q_proj")
    assert isinstance(q_proj, FrozenLinear)
    assert q_proj.weight is before["model.layers.1.self_attn.q_proj.weight"]
    assert q_proj.bias is before["model.layers.1.self_attn.q_proj.bias"]
    narrow = loaded(torch.bfloat16)
    freeze_linears(narrow)
    assert not any(isinstance(linear, FrozenLinear) for linear in narrow.modules())


def packed_head(config: ModelConfig) -> Any:
    fields = random_fields((config.vocab_size, config.hidden_size), GGMLType.Q8_0, torch.device("cpu"))
    return QuantisedLinear(fields, GGMLType.Q8_0)


def test_packed_matrices_get_compiled_products_with_gradients_on_the_cpu():
    module = loaded(torch.float32)
    head = module.lm_head = packed_head(module.config)
    prepare(module, target("cpu", "float32"))
    assert isinstance(module.lm_head, TrainedQuantisedLinear)
    assert module.lm_head.fields["codes"].data_ptr() == head.fields["codes"].data_ptr()  # shared, not copied
    assert isinstance(module.get_submodule("model.layers.1.self_attn.q_proj"), FrozenLinear)


def test_a_model_without_packed_matrices_is_trained_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_selection, "built_kernels", lambda at, *, training: pytest.fail("asked for kernels"))
    module = loaded(torch.float32)
    prepare(module, target("cpu", "float32"))
    assert isinstance(module.lm_head, FrozenLinear)


@pytest.mark.parametrize("kernels", ["auto", "own"])
def test_a_model_for_training_gets_the_kernels_with_gradients_of_its_target(kernels, monkeypatch: pytest.MonkeyPatch):
    asked, norm = [], nn.Identity()

    def built_kernels(at: Target, *, training: bool) -> dict:
        asked.append((at, training))
        return {"trained norm": lambda plain: norm, "trained act": lambda plain: "act"}

    monkeypatch.setattr(kernel_selection, "built_kernels", built_kernels)
    at, module = replace(target("cpu", "bfloat16"), kernels=kernels), loaded(torch.bfloat16)
    module.lm_head = packed_head(module.config)
    before = module.get_submodule("model.layers.1.self_attn").__dict__["rotate"]
    prepare(module, at)
    assert asked == [(at, True)]
    assert module.model.norm is norm
    layer: Any = module.get_submodule("model.layers.1")
    assert layer.post_attention_layernorm is norm
    assert layer.mlp.act == "act"
    assert layer.self_attn.rotate is before
    assert layer.self_attn.attend is sdpa_attention

"""Adapters beside packed matrices, and PiSSA over a base that is never changed."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.training_passes import ALL, CPU, batch, logits_of, loss_of

from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.config import LoraConfig
from llorch.lora.initial import initial_adapter
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels import quantised_linear
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora import modules as torch_leaves
from llorch.pytorch.lora.adapters import adapter_of, attach, detach, trainable_parameters
from llorch.pytorch.lora.dropout import drop_mask, keyed, salt_of, token_keys
from llorch.runtime.builtin import builtin_path

EVERY = pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


def packed_and_decoded(name: str, folder: Path, dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """The model with its matrices packed, and decoded."""
    weights = open_weights(write_model(name, folder))
    with closing(weights.source):
        return load_packed(weights, dtype=dtype, device=CPU), load_dense(weights, dtype=dtype, device=CPU)


def run_passes(module: CausalLM, *, dora: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradient of every parameter of an adapter."""
    targets = (*ALL, "embed_tokens", "lm_head")
    attach(module, random_adapter(module.config, target_modules=targets, use_dora=dora), trainable=True)
    made, parameters = logits_of(module, batch(90)), trainable_parameters(module)
    gradients = torch.autograd.grad(loss_of(made, batch(90)), list(parameters.values()))
    return made.detach(), dict(zip(parameters, gradients, strict=True))


@pytest.mark.slow_cases(but=["Q4_K-lora", "Q8_0-lora"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@EVERY
def test_logits_and_gradients_on_packed_matrices_equal_decoded_ones(name: str, dora: bool, folder: Path):
    packed, dense = packed_and_decoded(name, folder, torch.float64)
    assert sum(isinstance(module, PackedMatrix) for module in packed.modules()) == 2 + 7 * packed.config.n_layers
    (logits, gradients), (expected, wanted) = run_passes(packed, dora=dora), run_passes(dense, dora=dora)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-9, atol=1e-12 * float(wanted[key].abs().max()))


def test_no_pass_decodes_a_full_matrix(folder: Path, monkeypatch: pytest.MonkeyPatch):
    packed, _ = packed_and_decoded("Q4_K_M", folder, torch.float64)
    rows, decode = [], quantised_linear.decode
    monkeypatch.setattr(quantised_linear, "TILE", 8 * 256)
    monkeypatch.setattr(quantised_linear, "decode", lambda *args: (made := decode(*args), rows.append(made.shape))[0])
    run_passes(packed, dora=True)
    weights = [shape for shape in rows if len(shape) == 2]
    assert len(weights) > 100
    assert max(shape[0] * shape[1] for shape in weights) <= 8 * 256


@pytest.mark.slow_cases(but=["Q4_K_M", "Q8_0"])
@EVERY
def test_training_changes_no_packed_field(name: str, folder: Path):
    packed, _ = packed_and_decoded(name, folder, torch.bfloat16)
    before = {key: buffer.clone() for key, buffer in packed.named_buffers()}
    attach(packed, random_adapter(packed.config, target_modules=(*ALL, "embed_tokens", "lm_head")), trainable=True)
    optimizer = torch.optim.AdamW(trainable_parameters(packed).values(), lr=0.01)
    for _ in range(2):
        loss_of(logits_of(packed, batch(90)), batch(90)).backward()
        optimizer.step()
    after = {key.replace("base_layer.", ""): buffer for key, buffer in packed.named_buffers()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {p.dtype for p in trainable_parameters(packed).values()} == {torch.float32}


def test_row_norms_of_dense_matrices_use_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch):
    _, dense = packed_and_decoded("Q8_0", folder, torch.float64)
    whole, _ = run_passes(dense, dora=True)
    _, dense = packed_and_decoded("Q8_0", folder, torch.float64)
    monkeypatch.setattr(torch_leaves, "TILE", 3 * 256)
    tiled, _ = run_passes(dense, dora=True)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly_cases("packed-False", "packed-True")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_pissa_starts_at_the_base_trains_and_exports_as_a_standard_adapter(kind: str, rslora: bool, tmp_path: Path):
    weights = open_weights(builtin_path("micro-qwen2") if kind == "dense" else write_model("Q4_K_M", tmp_path))
    module = (load_dense if kind == "dense" else load_packed)(weights, dtype=torch.float64, device=CPU)
    modules = (*ALL, "embed_tokens", "lm_head")
    config = LoraConfig(r=4, target_modules=modules, use_rslora=rslora, alpha_pattern={"v_proj": 5.0})
    start, before = initial_adapter(config, weights, init="pissa", seed=0), logits_of(module, batch(90))
    attach(module, start, trainable=True, minus=start)
    torch.testing.assert_close(logits_of(module, batch(90)), before, rtol=0, atol=1e-12)
    optimizer = torch.optim.AdamW(trainable_parameters(module).values(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(loss_of(logits_of(module, batch(90)), batch(90)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    trained, plain = logits_of(module, batch(90)).detach(), adapter_of(module)
    assert plain.config.r == 8
    assert plain.scaling("layers.0.v_proj") == pytest.approx(start.scaling("layers.0.v_proj"), rel=1e-15)
    detach(module, "default")
    assert torch.equal(logits_of(module, batch(90)), before)
    attach(module, plain)
    torch.testing.assert_close(logits_of(module, batch(90)), trained, rtol=0, atol=1e-5)  # adapters are float32


def test_dropout_does_not_mask_the_subtracted_pissa_start():
    weights = open_weights(builtin_path("micro-qwen2"))
    module = load_dense(weights, dtype=torch.float64, device=CPU)
    config = LoraConfig(r=4, target_modules=("q_proj",), lora_dropout=0.5)
    start, x = initial_adapter(config, weights, init="pissa", seed=0), torch.ones(1, 96, dtype=torch.float64)
    lora_module, tensors = module.get_submodule("model.layers.0.self_attn.q_proj"), start.tensors["layers.0.q_proj"]
    base = lora_module(x)
    attach(module, start, trainable=True, minus=start)
    module.train()
    keys = token_keys(np.arange(1), 1, seed=0, step=0)
    with keyed(module, keys):
        actual = module.get_submodule("model.layers.0.self_attn.q_proj")(x[None])[0]
    kept = drop_mask(keys[0], 0.5, salt=salt_of("layers.0.q_proj"), width=96) * 2
    lora_A, lora_B = torch.from_numpy(tensors.lora_A).double(), torch.from_numpy(tensors.lora_B).double()
    expected = base + start.scaling("layers.0.q_proj") * ((x * kept - x) @ lora_A.T) @ lora_B.T
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

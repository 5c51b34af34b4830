"""Adapters beside packed matrices: trained and run as beside the matrices that they decode to."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.training_passes import ALL, CPU, batch, logits_of, loss_of

from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels import quantised_linear
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora import modules as torch_leaves
from llorch.pytorch.lora.adapters import attach, trainable_parameters

EVERY = pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


def both(name: str, folder: Path, dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """The model with its matrices packed, and decoded."""
    weights = open_weights(write_model(name, folder))
    with closing(weights.source):
        return load_packed(weights, dtype=dtype, device=CPU), load_dense(weights, dtype=dtype, device=CPU)


def passed(module: CausalLM, *, dora: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradient of every parameter of an adapter."""
    targets = (*ALL, "embed_tokens", "lm_head")
    attach(module, random_adapter(module.config, target_modules=targets, use_dora=dora), trainable=True)
    made, parameters = logits_of(module, batch(90)), trainable_parameters(module)
    gradients = torch.autograd.grad(loss_of(made, batch(90)), list(parameters.values()))
    return made.detach(), dict(zip(parameters, gradients, strict=True))


@pytest.mark.slow_cases(but=["Q4_K-lora", "Q8_0-lora"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@EVERY
def test_logits_and_gradients_are_those_beside_the_decoded_matrices(name: str, dora: bool, folder: Path):
    packed, dense = both(name, folder, torch.float64)
    assert sum(isinstance(module, PackedMatrix) for module in packed.modules()) == 2 + 7 * packed.config.n_layers
    (logits, gradients), (expected, wanted) = passed(packed, dora=dora), passed(dense, dora=dora)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-9, atol=1e-12 * float(wanted[key].abs().max()))


def test_no_pass_decodes_a_matrix_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch):
    packed, _ = both("Q4_K_M", folder, torch.float64)
    rows, decode = [], quantised_linear.decode
    monkeypatch.setattr(quantised_linear, "TILE", 8 * 256)
    monkeypatch.setattr(quantised_linear, "decode", lambda *args: (made := decode(*args), rows.append(made.shape))[0])
    passed(packed, dora=True)
    weights = [shape for shape in rows if len(shape) == 2]
    assert len(weights) > 100
    assert max(shape[0] * shape[1] for shape in weights) <= 8 * 256


@pytest.mark.slow_cases(but=["Q4_K_M", "Q8_0"])
@EVERY
def test_training_changes_no_field(name: str, folder: Path):
    packed, _ = both(name, folder, torch.bfloat16)
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


def test_lengths_of_dense_rows_come_in_tiles_too(folder: Path, monkeypatch: pytest.MonkeyPatch):
    _, dense = both("Q8_0", folder, torch.float64)
    whole, _ = passed(dense, dora=True)
    _, dense = both("Q8_0", folder, torch.float64)
    monkeypatch.setattr(torch_leaves, "TILE", 3 * 256)
    tiled, _ = passed(dense, dora=True)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)

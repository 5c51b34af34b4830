"""A model whose modules record gradients, its pass over a batch, and the memory of a step, estimated before it."""

import gc
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from helpers.training_runs import run_steps, small_settings
from torch import nn

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.lora.initial import initial_adapter
from llorch.ops.compiled.library import library
from llorch.ops.rope import rope_tables
from llorch.pytorch.causal_lm import CausalLM, swiglu
from llorch.pytorch.device import Target, target
from llorch.pytorch.kernels import kernel_selection
from llorch.pytorch.kernels.cpu.quantised import TrainedQuantisedLinear
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import sdpa_attention, use_sdpa
from llorch.pytorch.load import load_dense
from llorch.pytorch.lora.adapters import attach
from llorch.pytorch.lora.modules import delta
from llorch.pytorch.model import load_torch
from llorch.pytorch.random_weights import random_fields
from llorch.pytorch.train import plan as plans
from llorch.pytorch.train.forward import hidden_states, place_of
from llorch.pytorch.train.loading import FrozenLinear, freeze_linears, load_for_training, prepare, trained_swiglu
from llorch.pytorch.train.memory import kept_bytes, step_memory
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.trainer import Training
from llorch.runtime.builtin import builtin_path
from llorch.training.batch import IGNORED, Batch
from llorch.training.settings import TrainSettings


def load_micro_model(dtype: torch.dtype) -> CausalLM:
    return load_dense(open_weights(builtin_path("micro-qwen2")), dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_equal_a_linear_layer(bias: bool):
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


def test_strided_gradient_is_multiplied():
    layer = FrozenLinear(torch.randn(6, 4), None)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).T.contiguous().T.sum(dim=0).mul(torch.arange(6.0)).sum().backward()
    torch.testing.assert_close(x.grad, (torch.arange(6.0) @ layer.weight).expand(3, 4))


def test_every_float32_projection_is_replaced_and_shares_its_weights():
    module = load_micro_model(torch.float32)
    before = dict(module.named_parameters())
    freeze_linears(module)
    assert isinstance(module.lm_head, FrozenLinear)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    q_proj = module.get_submodule("model.layers.1.self_attn.q_proj")
    assert isinstance(q_proj, FrozenLinear)
    assert q_proj.weight is before["model.layers.1.self_attn.q_proj.weight"]
    assert q_proj.bias is before["model.layers.1.self_attn.q_proj.bias"]
    narrow = load_micro_model(torch.bfloat16)
    freeze_linears(narrow)
    assert not any(isinstance(linear, FrozenLinear) for linear in narrow.modules())


def packed_head(config: ModelConfig) -> Any:
    fields = random_fields((config.vocab_size, config.hidden_size), GGMLType.Q8_0, torch.device("cpu"))
    return QuantisedLinear(fields, GGMLType.Q8_0)


@pytest.mark.skipif(library() is None, reason="NOT RUN: no C compiler")
def test_packed_matrices_get_compiled_products_with_gradients_on_the_cpu():
    module = load_micro_model(torch.float32)
    head = module.lm_head = packed_head(module.config)
    prepare(module, target("cpu", "float32"))
    assert isinstance(module.lm_head, TrainedQuantisedLinear)
    assert module.lm_head.fields["blocks"].data_ptr() == head.fields["blocks"].data_ptr()  # shared, not copied
    assert isinstance(module.get_submodule("model.layers.1.self_attn.q_proj"), FrozenLinear)


def test_a_model_without_packed_matrices_is_trained_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_selection, "built_kernels", lambda target, *, training: pytest.fail("asked for kernels"))
    module = load_micro_model(torch.float32)
    prepare(module, target("cpu", "float32"))
    assert isinstance(module.lm_head, FrozenLinear)


@pytest.mark.parametrize("kernels", ["auto", "own"])
def test_a_model_for_training_gets_the_kernels_with_gradients_of_its_target(kernels, monkeypatch: pytest.MonkeyPatch):
    asked, norm = [], nn.Identity()

    def built_kernels(target: Target, *, training: bool) -> dict:
        asked.append((target, training))
        return {"trained norm": lambda original: norm, "trained act": lambda original: "act"}

    monkeypatch.setattr(kernel_selection, "built_kernels", built_kernels)
    at, module = replace(target("cpu", "bfloat16"), kernels=kernels), load_micro_model(torch.bfloat16)
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


CPU = torch.device("cpu")
DOCUMENTS = ([3, 41, 5, 97, 60, 7], [9, 8, 11, 250, 6, 77, 12, 30, 31], [300, 2, 17])


def model(dtype: torch.dtype = torch.float64, name: str = "micro-qwen3") -> CausalLM:
    return load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)


def batch(rows: list[list[list[int]]]) -> Batch:
    """Rows of documents, padded at the end."""
    seq = max(sum(map(len, row)) for row in rows)
    ids, positions, documents = (np.full((len(rows), seq), fill) for fill in (0, -1, -1))
    for r, row in enumerate(rows):
        at = 0
        for d, document in enumerate(row):
            part = slice(at, at + len(document))
            ids[r, part], positions[r, part], documents[r, part] = document, np.arange(len(document)), d
            at += len(document)
    return Batch(ids, np.where(documents < 0, IGNORED, ids), positions, documents, np.arange(len(rows)))


def final_norms_alone(name: str = "micro-qwen3") -> list[np.ndarray]:
    """The last norm of each document in a pass of its own, by the cached path."""
    whole = load_torch(builtin_path(name), dtype="float64", attention="eager")
    traces: list[dict[str, np.ndarray]] = [{} for _ in DOCUMENTS]
    for document, trace in zip(DOCUMENTS, traces, strict=True):
        whole.forward(document, trace=trace)
    return [trace["final_norm"] for trace in traces]


@pytest.mark.parametrize("name", ["micro-llama3", "micro-qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "rows", [[[0], [1], [2]], [[0, 2], [1]], [[1], [0, 2]], [[2, 1, 0]]], ids=["padded", "first", "second", "one row"]
)
def test_packed_document_equals_the_document_alone(rows: list[list[int]], attention: str, name: str):
    module = model(name=name)
    if attention == "sdpa":
        use_sdpa(module)
    hidden = hidden_states(module, batch([[DOCUMENTS[i] for i in row] for row in rows]), CPU)
    expected = final_norms_alone(name)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            actual = hidden[r, at : at + len(DOCUMENTS[i])].detach().numpy()
            np.testing.assert_allclose(actual, expected[i], rtol=0, atol=1e-12)
            at += len(DOCUMENTS[i])


def test_a_document_longer_than_the_context_is_refused():
    long = batch([[list(range(5)) * 9000]])
    with refuses(ValueError, 45000, 40960, "--max-length", where="train"):
        hidden_states(model(), long, CPU)


@pytest.mark.parametrize("longest", [1, 8, 9, 17])
def test_cached_angles_equal_computed_angles_bit_for_bit(longest: int):
    module = model(torch.float32, "micro-llama3")
    one = batch([[list(range(longest)), [1, 2]], [[3]]])
    place = place_of(module, one, CPU)
    config, positions = module.config, one.positions.clip(min=0)
    kind = {"head_dim": config.rotated, "theta": config.rope_theta, "scaling": config.rope_scaling}
    for actual, table in zip((place.cos, place.sin), rope_tables(positions.reshape(-1), **kind), strict=True):
        assert np.array_equal(actual.numpy(), table.reshape(*positions.shape, -1).astype(np.float32))


def test_angles_are_not_shared_between_models():
    one = batch([[[1, 2, 3, 4]]])
    first, other = (place_of(model(name=name), one, CPU) for name in ("micro-llama3", "micro-qwen2"))
    assert first.cos.shape != other.cos.shape or not torch.equal(first.cos, other.cos)


def load_with_adapter(settings: TrainSettings) -> CausalLM:
    weights = open_weights(builtin_path(settings.model))
    module = load_for_training(weights, target("cpu", "float32"), residency="decoded", batch=1, n_tokens=9)
    attach(module, initial_adapter(settings.lora, weights, init="default", seed=0), trainable=True)
    return module


def measure_kept_bytes(settings: TrainSettings) -> tuple[float, float]:
    return kept_bytes(load_with_adapter(settings), CPU)


def count_tensors() -> int:
    """Count the tensors that live in this process."""
    gc.collect()
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


def test_tensors_of_the_measured_pass_are_freed(tmp_path: Path):
    module = load_with_adapter(small_settings(tmp_path))
    kept_bytes(module, CPU)  # fills caches
    n_tensors = count_tensors()
    kept_bytes(module, CPU)
    assert count_tensors() == n_tensors


@pytest.mark.parametrize("model", ["micro-llama", "micro-qwen2"])
def test_activation_memory_of_a_token_equals_the_formulas_of_a_block(tmp_path: Path, model: str):
    """Norms keep their input, attention q, k, v and its result, SwiGLU gate and up, adapters A x."""
    config = open_weights(builtin_path(model)).config
    hidden, inter, r = config.hidden_size, config.intermediate_size, 6
    block = 2 * hidden + 2 * inter + 2 * config.q_width + 2 * config.kv_width + 7 * r
    found, once = measure_kept_bytes(small_settings(tmp_path, model=model, target_modules="all-linear", r=r))
    assert once < found
    assert found == pytest.approx(4 * block * config.n_layers, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_recomputed_activations_have_the_bits_of_torch(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up, lora_A, lora_B = (torch.randn(shape, generator=generator) for shape in ((5, 8), (5, 8), (2, 8), (3, 2)))

    def gradients(act: Callable[..., torch.Tensor]) -> Sequence[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (gate, up)]
        factors = [x.clone().requires_grad_() for x in (lora_A, lora_B)]
        y = delta(act(*inputs), *factors, scaling=2.0)
        return torch.autograd.grad(y.square().sum(), inputs + factors)

    assert all(map(torch.equal, gradients(trained_swiglu), gradients(swiglu)))


def test_adapter_after_the_blocks_keeps_no_block_activations(tmp_path: Path):
    assert measure_kept_bytes(small_settings(tmp_path, target_modules=("lm_head",))) == (0, 0)


def test_dora_keeps_matrices_and_dropout_keeps_its_outputs(tmp_path: Path):
    plain, dora, dropout = (
        measure_kept_bytes(small_settings(tmp_path, **more)) for more in ({}, {"dora": True}, {"dropout": 0.1})
    )
    assert dora[1] > plain[1] + 4 * open_weights(builtin_path("micro-qwen3")).config.hidden_size ** 2
    assert dropout[0] > plain[0]


def estimate(**changes: Any) -> tuple[int, int, int]:
    config = open_weights(builtin_path("micro-llama")).config
    values: dict[str, Any] = {"n_tokens": 100, "width": 4, "chunk": 10, "recomputed": False, "trained": 7}
    values |= {"copies": (1000, 50)} | changes
    found = step_memory(config, (1e6, 8.0), device=CPU, **values)
    assert found.peak == found.now + found.trained + found.activations + found.logits
    return found.trained, found.activations, found.logits


def test_options_of_a_run_change_the_estimate_as_they_change_the_run():
    config = open_weights(builtin_path("micro-llama")).config
    head, holes = 1000, 50
    in_hand = 100 * (5 * config.intermediate_size * 4 + 2 * config.hidden_size * 4)
    assert estimate() == (7, 10**8 + 8 + holes, max(in_hand, head + 10 * config.vocab_size * 4))
    assert estimate(chunk=0)[2] == head + 3 * 100 * config.vocab_size * 4
    inputs = config.n_layers * config.hidden_size * 4
    assert estimate(recomputed=True)[1] == 100 * inputs + int((10**8 + 8) / config.n_layers) + holes
    assert estimate(n_tokens=200)[1] == 2 * 10**8 + 8 + holes


@pytest.mark.parametrize("packing", [False, True])
def test_the_longest_row_of_the_data_decides(tmp_path: Path, packing: bool):
    training = run_steps(small_settings(tmp_path, batch_size=2, packing=packing), steps=0)
    found = training.memory
    assert found is not None
    longest = training.data.settings.max_length if packing else max(training.data.train.lengths)
    assert found.n_tokens == min(2, len(training.data.rows(training.data.train))) * longest
    n_parameters = sum(parameter.numel() for parameter in training.parameters.values())
    assert found.trained >= 3 * 4 * n_parameters  # gradients and two moments


def test_plan_training_gives_every_setting_a_value(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path, lr=None, max_length=None))
    assert None not in (plan.settings.lr, plan.settings.dtype, plan.settings.max_length, plan.settings.template_date)


def test_training_reads_no_data_after_planning(tmp_path: Path):
    plan = plan_training(small_settings(tmp_path))
    shutil.rmtree(tmp_path / "data")
    assert Training(plan).run_step().step == 1


def test_identity_of_a_packed_run_depends_on_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed, decoded = (plan_training(small_settings(tmp_path, weights=weights)) for weights in ("packed", "decoded"))
    monkeypatch.setattr(plans, "library", object)  # as on a machine with a compiler
    before, plain = packed.identity(), decoded.identity()
    monkeypatch.setattr(plans, "library", lambda: None)
    assert before | {"compiled_kernels": False} == packed.identity() != before
    assert plain == decoded.identity()

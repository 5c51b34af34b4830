"""The hand-derived backward against torch's automatic one, both in float64, for every stage and every tensor."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from builders.families import MICRO
from builders.random_adapters import random_adapter
from helpers.torch_detours import model_with_detours
from torch import Tensor
from torch.nn.functional import cross_entropy

from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.ops.cross_entropy import IGNORED, shifted
from llorch.pytorch.cache import NoCache
from llorch.pytorch.train.forward import hidden_states, place_of
from llorch.runtime.builtin import builtin_path
from llorch.stages.table import keys
from llorch.training.batch import Batch
from llorch.training.numpy_step import document_gradients, loss_and_gradients

CPU = torch.device("cpu")
SEQ = 11
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
RANKS = {"q_proj": 5, "k_proj": 2, "o_proj": 1, "up_proj": 4, "down_proj": 6, "embed_tokens": 7, "lm_head": 2}
KINDS = {
    "plain": {"alpha_pattern": {"v_proj": 1.5, "layers.1.mlp.gate_proj": 9.0}},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "few": {"target_modules": ("k_proj", "down_proj"), "layers_to_transform": (1,)},
}
RELATIVE = 1e-10


@pytest.fixture(scope="module", params=MICRO)
def weights(request: pytest.FixtureRequest) -> Weights:
    return open_weights(builtin_path(request.param)).astype(np.float64)


@pytest.fixture(params=KINDS)
def adapter(request: pytest.FixtureRequest, weights: Weights) -> Adapter:
    return adapter_of(weights, **KINDS[request.param])


def adapter_of(weights: Weights, **settings) -> Adapter:
    return random_adapter(weights.config, **{"target_modules": EVERY, "rank_pattern": RANKS} | settings)


def batch_of(rng, weights: Weights, *documents: tuple[int, ...]) -> Batch:
    """Rows of packed documents of these lengths, padded; about a third of the labels are ignored."""
    ids = rng.integers(0, weights.config.vocab_size, (len(documents), max(sum(row) for row in documents)))
    positions, numbers = np.full((2, *ids.shape), -1)
    for row, lengths in enumerate(documents):
        positions[row, : sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
        numbers[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    labels = np.where((rng.random(ids.shape) < 0.3) & (positions != 1) | (positions < 1), IGNORED, ids)
    return Batch(ids, labels, positions, numbers, np.arange(len(ids)))


def torch_loss_sum(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    labels = torch.from_numpy(np.stack([shifted(row) for row in batch.labels]))
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )


def assert_close(actual: np.ndarray, expected: Tensor | None, name: str) -> None:
    """Alike to `RELATIVE` of the largest element."""
    assert expected is not None, f"{name}: torch has no gradient"
    limit = RELATIVE * float(expected.abs().max())
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=limit, strict=True, equal_nan=False, err_msg=name)


def stage_gradients(weights: Weights, adapter: Adapter, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Torch's stages of one document, their gradients retained, and the adapter's tensors, after the backward pass."""
    model, tensors = model_with_detours(weights, adapter)
    stages: dict[str, Tensor] = {}

    def keep(name: str, array: Tensor) -> Tensor:
        if not array.requires_grad:
            array = array.detach().requires_grad_()  # below the first adapter
        array.retain_grad()
        stages[name] = array
        return array

    logits = model(torch.from_numpy(batch.ids), place_of(model, batch, CPU), NoCache(CPU), keep=keep)
    (torch_loss_sum(logits, batch, 0.1) / batch.n_trained).backward()
    return stages, tensors


def test_every_stage_and_every_tensor_has_the_gradient_of_torch(weights, adapter, rng):
    batch = batch_of(rng, weights, (SEQ,))
    wanted = shifted(batch.labels[0])
    adapted = AdaptedWeights(weights, adapter)
    _, grads = document_gradients(batch.ids[0], wanted, adapted, label_smoothing=0.1, n_trained=batch.n_trained)
    stages, tensors = stage_gradients(weights, adapter, batch)
    assert list(tensors) == list(adapter.flat())
    for name, tensor in tensors.items():
        assert_close(grads[name], tensor.grad, name)
    for name, _, _ in keys(weights.config):
        gradient = stages[name].grad
        assert_close(grads[name], None if gradient is None else gradient[0], name)
    for layer in range(weights.config.n_layers):
        block_in = stages["embed" if layer == 0 else f"l{layer - 1}.block_out"].grad
        assert_close(grads[f"l{layer}.block_in"], None if block_in is None else block_in[0], f"l{layer}.block_in")


def assert_step_is_torch_s(weights: Weights, adapter: Adapter, batches: Sequence[Batch], smoothing: float) -> float:
    """Loss and every gradient of a step; gives back the largest logit."""
    loss, grads = loss_and_gradients(weights, adapter, batches, label_smoothing=smoothing)
    model, tensors = model_with_detours(weights, adapter)
    logits = [model.lm_head(hidden_states(model, batch, CPU)) for batch in batches]
    expected = sum(torch_loss_sum(rows, batch, smoothing) for rows, batch in zip(logits, batches, strict=True))
    assert isinstance(expected, Tensor)
    expected = expected / sum(batch.n_trained for batch in batches)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert list(grads) == list(tensors)
    for name, tensor in tensors.items():
        assert_close(grads[name], tensor.grad, name)
    return max(float(rows.detach().abs().max()) for rows in logits)


@pytest.mark.slow_cases(
    "micro-llama-dora",
    "micro-llama-plain",
    "micro-llama-rslora",
    "micro-llama3-dora",
    "micro-llama3-plain",
    "micro-qwen2-dora",
)
def test_a_step_of_packed_documents_in_several_batches_has_the_loss_and_gradients_of_torch(weights, adapter, rng):
    assert_step_is_torch_s(weights, adapter, [batch_of(rng, weights, (5, 2), (8,)), batch_of(rng, weights, (4,))], 0.1)


def test_without_smoothing_and_with_logits_of_hundreds_the_gradients_are_those_of_torch(rng):
    weights = open_weights(builtin_path("micro-llama")).astype(np.float64)
    adapter = adapter_of(weights, alpha_pattern={"lm_head": 200.0, "q_proj": 100.0})  # and peaked attention
    assert assert_step_is_torch_s(weights, adapter, [batch_of(rng, weights, (9,))], 0.0) > 300


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_masks_reach_forward_and_backward_alike(rng, use_dora):
    weights = open_weights(builtin_path("micro-qwen3")).astype(np.float64)
    adapter, batch = adapter_of(weights, use_dora=use_dora), batch_of(rng, weights, (SEQ,))
    masks = {
        name: (rng.random((SEQ, target.n_in)) < 0.75) / 0.75
        for name, target in adapter.targets.items()
        if not target.is_embedding
    }
    adapted, wanted = AdaptedWeights(weights, adapter, masks=masks), shifted(batch.labels[0])
    loss, grads = document_gradients(batch.ids[0], wanted, adapted, label_smoothing=0.0, n_trained=batch.n_trained)
    model, tensors = model_with_detours(weights, adapter, masks=masks)
    expected = torch_loss_sum(model.lm_head(hidden_states(model, batch, CPU)), batch, 0.0)
    (expected / batch.n_trained).backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, tensor in tensors.items():
        assert_close(grads[name], tensor.grad, name)


def test_without_an_adapter_the_gradient_still_reaches_every_block_and_nothing_is_trained(rng):
    weights = open_weights(builtin_path("micro-llama")).astype(np.float64)
    batch = batch_of(rng, weights, (SEQ,))
    wanted = shifted(batch.labels[0])
    _, grads = document_gradients(batch.ids[0], wanted, weights, label_smoothing=0.0, n_trained=batch.n_trained)
    assert not [name for name in grads if name.endswith(("lora_A", "lora_B"))]
    assert all(grads[f"l{layer}.block_in"].any() for layer in range(weights.config.n_layers))

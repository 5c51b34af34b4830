"""Adapters on the torch page against PEFT: what each adds, logits, loss, and the gradient of every parameter."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders.families import MICRO, SMALL, random_folder
from builders.family_adapters import family_adapter
from builders.random_adapters import random_adapter
from helpers.refusals import refuses
from helpers.training_passes import SETTINGS, attach_in_peft, base, batch, logits_of, loss_of, peft_name, record_deltas
from torch import Tensor

from llorch.files import Weights, open_weights
from llorch.ops.cross_entropy import shifted
from llorch.pytorch.load import load_dense
from llorch.pytorch.lora.adapters import activate, adapter_of, attach, detach, lora_modules, trainable_parameters
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.training.batch import IGNORED, Batch
from llorch.training.numpy_step import loss_and_gradients


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly_cases(but=["micro-qwen3-rslora"])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MICRO)
def test_deltas_logits_loss_and_gradients_equal_peft(name: str, kind: str):
    ours, of = base(name), batch()
    adapter = random_adapter(ours.config, **SETTINGS[kind])
    theirs = attach_in_peft(name, adapter, **SETTINGS[kind])
    attach(ours, adapter, trainable=True)
    modules = {target.name: lora_module for _, target, lora_module in lora_modules(ours)}
    peft_modules = {key: theirs.get_submodule(f"base_model.model.{adapter.targets[key].path}") for key in modules}
    with record_deltas(modules) as our_deltas, record_deltas(peft_modules) as peft_deltas:
        logits = logits_of(ours, of)
        peft_logits = theirs(input_ids=torch.from_numpy(of.ids), use_cache=False).logits
    assert modules.keys() == adapter.targets.keys()
    for key, delta in our_deltas.items():
        assert distance(delta, peft_deltas[key]) < 2e-5, key
    assert distance(logits, peft_logits) < 1e-5
    loss, peft_loss = loss_of(logits, of), loss_of(peft_logits, of)
    assert abs(float(loss - peft_loss)) < 1e-5 * float(peft_loss)
    loss.backward()
    peft_loss.backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in trainable_parameters(ours).items():
        gradient, peft_gradient = parameter.grad, expected[peft_name(key, adapter.targets)].grad
        assert gradient is not None
        assert peft_gradient is not None
        assert distance(gradient, peft_gradient) < 5e-5, key


CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=SMALL)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder: Path = random_folder(request.param, tmp_path_factory.mktemp("base"), 0, **SMALL[request.param])
    return open_weights(folder).astype(np.float64, keep=True)


def make_batch(rng: np.random.Generator, weights: Weights, rows: list[list[int]]) -> Batch:
    """Rows of documents of these lengths, padded; nothing is learned of the first tokens."""
    ids = rng.integers(0, weights.config.vocab_size, (len(rows), max(map(sum, rows))))
    positions, numbers = np.full((2, *ids.shape), -1)
    for row, lengths in enumerate(rows):
        positions[row, : sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
        numbers[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return Batch(ids, np.where(positions < 2, IGNORED, ids), positions, numbers, np.arange(len(rows)))


def torch_loss(model, batch: Batch) -> torch.Tensor:
    logits = model.lm_head(hidden_states(model, batch, CPU))
    labels = torch.from_numpy(np.stack([shifted(row) for row in batch.labels]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.n_trained


@pytest.mark.live
@pytest.mark.nightly_cases(but=["ministral3-True"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_training_step_loss_and_gradients_equal_numpy(weights, rng, recomputed):
    adapter = family_adapter(weights.config)
    batch = make_batch(rng, weights, [[9, 12], [17]] if weights.config.delta_net is None else [[21], [17]])
    loss, grads = loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0)
    model = load_dense(weights, dtype=torch.float64, device=CPU)
    attach(model, adapter, trainable=True)
    if recomputed:
        checkpoint_gradients(model)
    expected = torch_loss(model, batch)
    expected.backward()
    assert expected.item() == pytest.approx(loss, rel=1e-11)
    parameters = trainable_parameters(model)
    assert parameters.keys() == grads.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        limit = 1e-10 * np.abs(grads[name]).max()
        np.testing.assert_allclose(parameter.grad.numpy(), grads[name], rtol=0, atol=limit, strict=True, err_msg=name)


@pytest.mark.live
def test_attached_adapter_is_returned_and_detached(weights, rng):
    adapter, model = family_adapter(weights.config), load_dense(weights, dtype=torch.float64, device=CPU)
    batch = make_batch(rng, weights, [[11]])
    with torch.no_grad():
        plain = torch_loss(model, batch)
        attach(model, adapter)
        adapted = torch_loss(model, batch)
        again = adapter_of(model)
        assert {n: a.tobytes() for n, a in again.flat().items()} == {n: a.tobytes() for n, a in adapter.flat().items()}
        activate(model, None)
        assert torch_loss(model, batch) == plain != adapted
        detach(model, "default")
        assert torch_loss(model, batch) == plain


@pytest.mark.live
def test_packed_documents_are_refused_for_models_with_a_recurrent_state(tmp_path, rng):
    weights = open_weights(random_folder("qwen3_5", tmp_path, 0, **SMALL["qwen3_5_moe"]))
    model = load_dense(weights, dtype=torch.float32, device=CPU)
    with refuses(ValueError, "delta nets", "packing", where="train"):
        torch_loss(model, make_batch(rng, weights, [[5, 6]]))

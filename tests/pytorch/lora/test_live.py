"""Adapters on the torch page against PEFT: what each adds, logits, loss, and the gradient of every parameter."""

import pytest
import torch
from builders.families import MICRO
from builders.random_adapters import random_adapter
from helpers.training_passes import SETTINGS, base, batch, in_peft, logits_of, loss_of, peft_name, watched
from torch import Tensor

from llorch.pytorch.lora.adapters import attach, lora_modules, trainable_parameters

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # PEFT's advice on tied embeddings


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.nightly_cases(but=["micro-qwen3-rslora"])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MICRO)
def test_deltas_logits_loss_and_gradients_are_those_of_peft(name: str, kind: str):
    ours, of = base(name), batch()
    adapter = random_adapter(ours.config, **SETTINGS[kind])
    theirs = in_peft(name, adapter, **SETTINGS[kind])
    attach(ours, adapter, trainable=True)
    modules = {target.name: lora_module for _, target, lora_module in lora_modules(ours)}
    peft_modules = {key: theirs.get_submodule(f"base_model.model.{adapter.targets[key].path}") for key in modules}
    with watched(modules) as our_deltas, watched(peft_modules) as peft_deltas:
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

"""QLoRA on torch, live: losses of AdamW steps on packed NF4 matrices, against PEFT on bitsandbytes and PEFT in float64.

PEFT and bitsandbytes run in training mode, without dropout. The tolerance of llorch is 4 times the distance of PEFT on
bitsandbytes in float32 from PEFT in float64 on the weights that bitsandbytes dequantised.
"""

from typing import Any

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.training_passes import CPU, logits_of
from torch.nn.functional import cross_entropy

from llorch.files import Weights, open_weights
from llorch.lora.adapter import Adapter
from llorch.ops.cross_entropy import IGNORED
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora.adapters import attach, trainable_parameters
from llorch.training.batch import Batch
from tests.model.test_backward_peft import PEFT_FIELDS, document, peft_name
from tests.model.test_backward_qlora import FOLDER, ROUNDING, dense_model, dense_weights, quantised_model

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]
STEPS = 6
ADAMW: dict[str, Any] = {"lr": 5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def losses(parameters: list[Any], logits: Any, batch: Batch) -> np.ndarray:
    """Losses of some steps of AdamW; the last is that after the last step."""
    optimizer, seen = torch.optim.AdamW(parameters, **ADAMW), []
    for _ in range(STEPS + 1):
        loss = cross_entropy(logits()[0, :-1], torch.from_numpy(batch.labels[0, 1:]), ignore_index=IGNORED)
        seen.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array(seen)


def peft_losses(base: Any, adapter: Adapter, batch: Batch, *, double: bool = False) -> np.ndarray:
    import peft

    fields = {name: getattr(adapter.config, name) for name in PEFT_FIELDS}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(adapter.config.target_modules), **fields)
    model: Any = peft.get_peft_model(base, config)
    model = (model.double() if double else model).train()
    parameters = {name: model.get_parameter(peft_name(adapter, name)) for name in adapter.flat()}
    with torch.no_grad():
        for name, array in adapter.flat().items():
            parameters[name].copy_(torch.from_numpy(array))
    ids = torch.from_numpy(batch.ids)
    return losses(list(parameters.values()), lambda: model(input_ids=ids, use_cache=False).logits, batch)


def llorch_losses(weights: Weights, adapter: Adapter, batch: Batch, dtype: torch.dtype, *, packed: bool) -> np.ndarray:
    model = (load_packed if packed else load_dense)(weights, dtype=dtype, device=CPU)
    assert any(isinstance(module, PackedMatrix) for module in model.modules()) == packed
    attach(model, adapter, trainable=True)
    parameters = trainable_parameters(model)
    assert parameters.keys() == adapter.flat().keys()
    return losses(list(parameters.values()), lambda: logits_of(model, batch), batch)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return open_weights(FOLDER)


@pytest.fixture(scope="module")
def adapter(weights: Weights) -> Adapter:
    return random_adapter(weights.config)


@pytest.fixture(scope="module")
def reference_losses(weights: Weights, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """Losses of PEFT on bitsandbytes in float32, and of PEFT in float64."""
    from llorch.engines.transformers_capture import float64_everywhere

    quantised = quantised_model()
    state = dense_weights(quantised)
    with float64_everywhere(refuse=False):
        reference = peft_losses(dense_model(state), adapter, document(weights), double=True)
    return peft_losses(quantised, adapter, document(weights)), reference


@pytest.mark.nightly_cases(but=["decoded"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "decoded"])
def test_qlora_losses_of_adamw_steps_equal_peft(
    weights: Weights, adapter: Adapter, reference_losses: tuple[np.ndarray, np.ndarray], packed: bool
):
    theirs, reference = reference_losses
    assert reference[-1] < 0.9 * reference[0]
    tolerance = np.maximum(4 * np.abs(theirs - reference), ROUNDING * reference)
    ours = llorch_losses(weights, adapter, document(weights), torch.float32, packed=packed)
    assert (np.abs(ours - reference) < np.maximum.accumulate(tolerance)).all(), (ours - reference, theirs - reference)

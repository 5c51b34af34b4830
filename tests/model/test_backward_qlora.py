"""QLoRA live: losses, gradients and steps on a packed NF4 base, against PEFT on bitsandbytes and PEFT in float64.

Two engines of others run: PEFT with bitsandbytes' 4-bit layers in float32, and PEFT in float64 on dense weights that
bitsandbytes dequantised. The tolerance of llorch's float32 is 4 times the distance of the first from the second. The
4-bit layers run in training mode: in evaluation bitsandbytes computes in bfloat16 on CPUs with AVX512. The rows of the
folder are multiples of 64, because bitsandbytes' compiled dequantiser is wrong for others.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from builders.random_adapters import random_adapter

from llorch.files import Weights, open_weights
from llorch.judging.tolerances.training import FLOAT64_TOLERANCE
from llorch.lora.adapter import Adapter
from llorch.ops.cross_entropy import IGNORED, shifted
from llorch.training.batch import Batch
from llorch.training.numpy_step import loss_and_gradients
from tests.model.test_backward_peft import PEFT_FIELDS, document, peft_name

pytestmark = pytest.mark.live

FOLDER = FOLDERS / "bnb-nf4-double"
N_STEPS, RATE = 3, 0.02
ROUNDING = 4.8e-7  # the least tolerance of llorch verify
Run = list[tuple[float, dict[str, np.ndarray]]]  # loss and gradients of each step


@pytest.fixture(scope="module")
def weights() -> Weights:
    return open_weights(FOLDER)


@pytest.fixture(scope="module")
def adapter(weights: Weights) -> Adapter:
    return random_adapter(weights.config)


def quantised_model() -> Any:
    """Load the folder by transformers and bitsandbytes; products, and all that is not quantised, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, device_map={"": "cpu"}, attn_implementation="eager")
    for module in model.modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            assert module.weight.quant_state.shape[1] % 64 == 0
            module.weight.quant_state.dtype = module.compute_dtype = torch.float32
    for parameter in model.parameters():
        if parameter.dtype is torch.bfloat16:
            parameter.data = parameter.data.float()
    return model


def dense_weights(quantised: Any) -> dict[str, Any]:
    """Dequantise the matrices by bitsandbytes in torch; all weights in float64."""
    import torch

    from llorch.engines.dequantisers import dequantised

    state = {}
    for name, value in quantised.named_parameters():
        decoded = dequantised(str(FOLDER), name) if hasattr(value, "quant_state") else None
        state[name] = (value.data if decoded is None else torch.from_numpy(decoded)).double()
    return state


def dense_model(state: dict[str, Any]) -> Any:
    """Make the float64 model of dequantised weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(FOLDER)
    delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    model.load_state_dict(state)
    return model


def peft_run(base: Any, adapter: Adapter, batch: Batch, *, double: bool = False) -> Run:
    """Let PEFT compute losses and gradients of some steps of gradient descent."""
    import peft
    import torch

    fields = {name: getattr(adapter.config, name) for name in PEFT_FIELDS}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(adapter.config.target_modules), **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers for an attribute by its old name
        model: Any = peft.get_peft_model(base, config)
    model = (model.double() if double else model).train()
    parameters = {name: model.get_parameter(peft_name(adapter, name)) for name in adapter.flat()}
    with torch.no_grad():
        for name, array in adapter.flat().items():
            parameters[name].copy_(torch.from_numpy(array))
    run, ids, labels = [], torch.from_numpy(batch.ids), torch.from_numpy(shifted(batch.labels[0]))
    for _ in range(N_STEPS):
        model.zero_grad()
        logits = model(input_ids=ids).logits[0]  # transformers' own loss rounds them to float32
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        loss.backward()
        run.append((loss.item(), {name: one.grad.numpy().copy() for name, one in parameters.items()}))
        with torch.no_grad():
            for one in parameters.values():
                one -= RATE * one.grad
    return run


def numpy_run(weights: Weights, adapter: Adapter, batch: Batch) -> Run:
    parameters, run = dict(adapter.flat()), []
    for _ in range(N_STEPS):
        loss, gradients = loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0, parameters=parameters)
        run.append((loss, gradients))
        parameters = {name: array - RATE * gradients[name] for name, array in parameters.items()}
    return run


def distances(actual: Run, expected: Run) -> Iterator[tuple[str, float]]:
    """Relative distance of each loss, and of all gradients of each step together."""
    for step, ((loss, gradients), (wanted, all_wanted)) in enumerate(zip(actual, expected, strict=True)):
        yield f"loss of step {step}", abs(loss - wanted) / wanted
        one, other = (
            np.concatenate([each[name].reshape(-1) for name in all_wanted]) for each in (gradients, all_wanted)
        )
        yield f"gradients of step {step}", float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.fixture(scope="module")
def foreign(weights: Weights, adapter: Adapter) -> tuple[Run, Run]:
    """Run PEFT on bitsandbytes in float32, and PEFT in float64."""
    from llorch.engines.transformers_capture import float64_everywhere

    batch = document(weights)
    quantised = quantised_model()
    state = dense_weights(quantised)
    with float64_everywhere(refuse=False):  # the frequencies of RoPE too
        reference = peft_run(dense_model(state), adapter, batch, double=True)
    return peft_run(quantised, adapter, batch), reference


@pytest.mark.nightly_cases(but=["decoded"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "decoded"])
def test_qlora_losses_and_gradients_of_three_steps_are_those_of_peft(
    weights: Weights, adapter: Adapter, foreign: tuple[Run, Run], packed: bool
):
    quantised, reference = foreign
    base, batch = weights.using(packed=packed), document(weights)
    for name, error in distances(numpy_run(base.astype(np.float64), adapter, batch), reference):
        assert error < FLOAT64_TOLERANCE, (name, error)
    narrow = distances(numpy_run(base, adapter, batch), reference)
    for (name, error), (_, theirs) in zip(narrow, distances(quantised, reference), strict=True):
        assert error < max(4 * theirs, ROUNDING), (name, error)


def test_peft_on_bitsandbytes_is_not_the_float64_reference(foreign: tuple[Run, Run]):
    quantised, reference = foreign
    assert 1e-8 < dict(distances(quantised, reference))["gradients of step 0"] < 1e-5

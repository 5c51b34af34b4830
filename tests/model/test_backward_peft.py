"""Loss and gradients against PEFT in float32, live: plain, rsLoRA, DoRA, and dropout with the masks that PEFT drew."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.random_adapters import EVERY, random_adapter, tiny_base

from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.targets import LoraTarget
from llorch.ops.cross_entropy import IGNORED, shifted
from llorch.ops.precision import own_dtype_only
from llorch.training.batch import Batch
from llorch.training.numpy_step import document_gradients, loss_and_gradients

pytestmark = pytest.mark.live

FAMILIES = {"llama": ("llama", False), "tied qwen2": ("qwen2", True), "qwen3": ("qwen3", False)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"rank_pattern": {"q_proj": 5, "lm_head": 2}, "alpha_pattern": {"v_proj": 2.0}},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.4},
    "dora with dropout": {"use_dora": True, "lora_dropout": 0.4},
}
PEFT_FIELDS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
LOSS, GRADIENT = 1e-6, 1e-5  # relative; of a gradient by its Euclidean norm


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = FAMILIES[request.param]
    return tiny_base(tmp_path_factory.mktemp("base"), family, tied=tied)


@pytest.fixture(scope="module")
def weights(base: Path) -> Weights:
    return open_weights(base)


@pytest.fixture(params=SETTINGS)
def adapter(request: pytest.FixtureRequest, weights: Weights) -> Adapter:
    return random_adapter(weights.config, target_modules=(*EVERY, "embed_tokens", "lm_head"), **SETTINGS[request.param])


def peft_with(base: Path, adapter: Adapter) -> tuple[Any, dict[str, Any]]:
    """PEFT's model in training mode, holding the numbers of an adapter, and its parameters under our names."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    fields = {name: getattr(adapter.config, name) for name in PEFT_FIELDS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on tied embeddings
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(adapter.config.target_modules), **fields)
        model = peft.get_peft_model(model, config).train()
    ours = {name: model.get_parameter(peft_name(adapter, name)) for name in adapter.flat()}
    assert len(ours) == sum(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for name, array in adapter.flat().items():
            ours[name].copy_(torch.from_numpy(array))
    return model, ours


def peft_name(adapter: Adapter, name: str) -> str:
    """What PEFT calls a tensor of an adapter."""
    matrix, _, kind = name.rpartition(".")
    target: LoraTarget = adapter.targets[matrix]
    plain = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}
    of_embedding = {"lora_A": "lora_embedding_A.default", "lora_B": "lora_embedding_B.default"}
    kinds = (of_embedding if target.is_embedding else plain) | {"magnitude": "lora_magnitude_vector.default.weight"}
    return f"base_model.model.{target.path}.{kinds[kind]}"


def captured_masks(model: Any, adapter: Adapter) -> dict[str, np.ndarray]:
    """Filled when the model runs: what each of PEFT's dropouts multiplied its input with."""
    masks: dict[str, np.ndarray] = {}

    def hook_for(name: str):
        def hook(module: Any, _inputs: tuple, output: Any) -> None:
            masks[name] = (output[0] != 0).numpy() / np.float32(1 - module.p)

        return hook

    for name, target in adapter.targets.items():
        if not target.is_embedding:
            dropout = model.get_submodule(f"base_model.model.{target.path}.lora_dropout.default")
            dropout.register_forward_hook(hook_for(name))
    return masks


def document(weights: Weights) -> Batch:
    """One row, a third of it not learned."""
    ids = np.random.default_rng(3).integers(0, weights.config.vocab_size, (1, 12))
    labels = np.where(np.arange(12) % 3 == 0, IGNORED, ids)
    return Batch(ids, labels, np.arange(12)[None], np.zeros_like(ids), np.zeros(1, np.int64))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.nightly_cases(but=["llama-rslora-float32 sums"])
@pytest.mark.parametrize("numbers", ["float64", "float32 sums"])
def test_loss_and_every_gradient_are_those_of_peft(base: Path, weights: Weights, adapter: Adapter, numbers: str):
    import torch
    from torch.nn.functional import cross_entropy

    model, parameters = peft_with(base, adapter)
    batch = document(weights)
    masks = captured_masks(model, adapter) if adapter.config.lora_dropout else {}
    logits = model(input_ids=torch.from_numpy(batch.ids)).logits[0]
    wanted = shifted(batch.labels[0])
    expected = cross_entropy(logits, torch.from_numpy(wanted), ignore_index=IGNORED, label_smoothing=0.1)
    expected.backward()

    adapted = AdaptedWeights(weights.astype(np.float64 if numbers == "float64" else np.float32), adapter, masks=masks)
    with own_dtype_only():
        loss, grads = document_gradients(batch.ids[0], wanted, adapted, label_smoothing=0.1, n_trained=batch.n_trained)
    assert loss / batch.n_trained == pytest.approx(expected.item(), rel=LOSS)
    for name, parameter in parameters.items():
        assert relative_error(grads[name], parameter.grad.numpy()) < GRADIENT, name
    if masks:
        assert {name for name, mask in masks.items() if (mask == 0).any()} == masks.keys()


def test_a_padded_batch_has_the_loss_of_peft_and_transformers_own_loss(base: Path, weights: Weights):
    import torch

    adapter = random_adapter(weights.config)
    model, parameters = peft_with(base, adapter)
    rng = np.random.default_rng(4)
    lengths, width = (9, 5, 7), 9
    ids = rng.integers(0, weights.config.vocab_size, (3, width))
    positions = np.where(np.arange(width) < np.array(lengths)[:, None], np.arange(width), -1)
    labels = np.where((positions < 1) | (positions == 3), IGNORED, ids)
    batch = Batch(ids, labels, positions, np.minimum(positions, 0), np.arange(len(ids)))
    mask = torch.from_numpy((positions >= 0).astype(np.int64))
    result = model(input_ids=torch.from_numpy(ids), attention_mask=mask, labels=torch.from_numpy(labels))
    result.loss.backward()
    loss, grads = loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0)
    assert loss == pytest.approx(result.loss.item(), rel=LOSS)
    for name, parameter in parameters.items():
        assert relative_error(grads[name], parameter.grad.numpy()) < GRADIENT, name


def test_at_peft_s_own_start_every_A_gets_exactly_0_from_both(base: Path, weights: Weights):
    import torch

    adapter = random_adapter(weights.config)
    fresh = {name: array * (0 if name.endswith("lora_B") else 1) for name, array in adapter.flat().items()}
    model, parameters = peft_with(base, adapter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(fresh[name]))
    batch = document(weights)
    model(input_ids=torch.from_numpy(batch.ids), labels=torch.from_numpy(batch.labels)).loss.backward()
    _, grads = loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0, parameters=fresh)
    for name, parameter in parameters.items():
        expected = parameter.grad.numpy()
        assert expected.any() == grads[name].any() == name.endswith("lora_B"), name
        if expected.any():
            assert relative_error(grads[name], expected) < GRADIENT, name

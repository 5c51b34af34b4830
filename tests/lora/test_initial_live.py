"""Starts and shapes against PEFT: PiSSA splits the same part off, and a Qwen2.5-0.5B is trained in as many numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_passes import ALL, SETTINGS, base, batch, logits_of, peft_name

from llorch.files import open_weights
from llorch.lora.adapter import wanted_shapes
from llorch.lora.config import LoraConfig
from llorch.pytorch.lora.adapters import adapter_of, attach, trainable_parameters
from llorch.runtime.builtin import builtin_path
from tests.lora.test_initial import drawn, qwen_05b

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # PEFT's advice on tied embeddings
PISSA = {
    "plain": {"target_modules": ALL},
    "rslora and patterns": {
        "target_modules": ("q_proj", "v_proj", "down_proj"), "use_rslora": True, "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 3.0},
    },
}  # fmt: skip


def peft_pissa(name: str, **settings: Any) -> Any:
    import peft

    from llorch.engines.transformers import Transformers

    config: Any = {"r": 4, "lora_alpha": 16.0} | settings
    config["target_modules"] = list(config["target_modules"])
    model = Transformers(builtin_path(name))._model
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights="pissa", **config)
    ).eval()


@pytest.mark.nightly_cases(but=["micro-qwen2-rslora and patterns"])
@pytest.mark.parametrize("kind", PISSA)
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen2"])
def test_pissa_splits_every_matrix_as_peft_does(name: str, kind: str):
    weights, theirs = open_weights(builtin_path(name)), peft_pissa(name, **PISSA[kind])
    ours = drawn(weights, init="pissa", **PISSA[kind])
    numbers = {key: parameter.detach().numpy() for key, parameter in theirs.named_parameters()}
    for key, tensors in ours.tensors.items():
        lora_A, lora_B = (numbers[peft_name(f"{key}.{side}", ours.targets)] for side in ("lora_A", "lora_B"))
        assert (lora_A.shape, lora_B.shape) == (tensors.lora_A.shape, tensors.lora_B.shape)
        product = tensors.lora_B @ tensors.lora_A  # singular vectors have no sign of their own
        np.testing.assert_allclose(product, lora_B @ lora_A, atol=2e-4 * np.abs(product).max())
        rest = weights[ours.targets[key].weight] - ours.scaling(key) * product
        stored = numbers[f"base_model.model.{ours.targets[key].path}.base_layer.weight"]
        np.testing.assert_allclose(rest, stored, atol=2e-4 * np.abs(stored).max())


@pytest.mark.parametrize("kind", PISSA)
def test_trained_with_pissa_the_plain_adapter_gives_the_logits_that_peft_has_over_its_changed_base(kind: str):
    module, theirs, of = base("micro-qwen2"), peft_pissa("micro-qwen2", **PISSA[kind]), batch()
    start = drawn(open_weights(builtin_path("micro-qwen2")), init="pissa", **PISSA[kind])
    before = logits_of(module, of).detach()
    attach(module, start, trainable=True, minus=start)
    torch.testing.assert_close(logits_of(module, of).detach(), before, rtol=0, atol=1e-3)
    move(module, theirs, start)
    expected = theirs(input_ids=torch.from_numpy(of.ids), use_cache=False).logits.detach()
    assert float((expected - before).abs().max()) > 0.1
    torch.testing.assert_close(logits_of(module, of).detach(), expected, rtol=0, atol=1e-3)
    plain = base("micro-qwen2")
    attach(plain, adapter_of(module))
    torch.testing.assert_close(logits_of(plain, of).detach(), expected, rtol=0, atol=1e-3)


def move(module, theirs, start) -> None:
    """Change the product of every adapter by the same matrix on both sides: their factors differ in sign."""
    numbers = dict(theirs.named_parameters())
    ours = trainable_parameters(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key in start.tensors:
            left = torch.randn(len(start.tensors[key].lora_A), generator=generator)
            for side, other in ((ours[f"{key}.lora_B"], ours[f"{key}.lora_A"]), peft_sides(numbers, key, start)):
                signs = torch.sign(other[:, 0])  # fixes the sign of each pair of singular vectors
                side += 0.3 * left * signs * torch.ones(len(side), 1)


def peft_sides(numbers, key: str, start) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers[peft_name(f"{key}.lora_B", start.targets)], numbers[peft_name(f"{key}.lora_A", start.targets)]


@pytest.mark.parametrize("kind", SETTINGS)
def test_shapes_and_counts_of_qwen_05b_are_those_of_peft(kind: str):
    import peft
    import transformers

    model, settings = qwen_05b(), SETTINGS[kind]
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    plain: Any = settings | {"target_modules": [*settings["target_modules"]]}
    made = peft.LoraConfig(task_type="CAUSAL_LM", r=8, **plain)
    with torch.device("meta"):
        theirs = peft.get_peft_model(transformers.Qwen2ForCausalLM(config), made, low_cpu_mem_usage=True)
    lora = LoraConfig(r=8, **settings)
    targets = lora.targets(model)
    named = {peft_name(key, targets): shape for key, shape in wanted_shapes(lora, model).items()}
    assert named == {key: tuple(p.shape) for key, p in theirs.named_parameters() if p.requires_grad}

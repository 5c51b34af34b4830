"""PiSSA over a base that is never changed: it starts as the base, and what is trained comes out as a plain adapter."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training_passes import ALL, CPU, batch, logits_of, loss_of

from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.config import LoraConfig
from llorch.lora.initial import initial_adapter
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora.adapters import adapter_of, attach, detach, trainable_parameters
from llorch.pytorch.lora.dropout import drop_mask, keyed, salt_of, token_keys
from llorch.runtime.builtin import builtin_path

EVERY = (*ALL, "embed_tokens", "lm_head")


@pytest.mark.nightly_cases("packed-False", "packed-True")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_it_starts_as_the_base_learns_and_comes_out_as_a_plain_adapter(kind: str, rslora: bool, tmp_path: Path):
    weights = open_weights(builtin_path("micro-qwen2") if kind == "dense" else write_model("Q4_K_M", tmp_path))
    module = (load_dense if kind == "dense" else load_packed)(weights, dtype=torch.float64, device=CPU)
    config = LoraConfig(r=4, target_modules=EVERY, use_rslora=rslora, alpha_pattern={"v_proj": 5.0})
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


def test_with_dropout_what_was_taken_off_the_base_stays_whole():
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

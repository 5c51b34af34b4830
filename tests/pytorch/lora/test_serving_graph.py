"""Adapters where decoding is compiled or replayed as a CUDA graph: the same tokens, or a refusal."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_adapters import random_adapter

import llorch
from llorch.sampling import SamplingSettings

PROMPTS = [[3, 17, 8], [5, 26, 17, 33, 2], [19]]


def test_a_compiled_model_refuses_to_mix_adapters_in_a_call():
    model = llorch.load_torch("story", compiled=True)
    model.add_adapter("one", random_adapter(model.config))
    with pytest.raises(ValueError, match="takes one adapter per call"):
        list(model.generate_batch(["a", "b"], adapter=["one", None]))


@pytest.mark.slow
def test_compiled_steps_make_the_tokens_of_eager_ones_with_every_adapter():
    script = Path(__file__).parents[2] / "support" / "compiled_adapters.py"
    done = subprocess.run(
        [sys.executable, script, "micro-qwen3"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_make_the_tokens_of_numpy_with_every_adapter(dora: bool, compiled: bool):
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
    numpy, cuda = llorch.load("micro-qwen3"), llorch.load_torch("micro-qwen3", device="cuda", compiled=compiled)
    for model in (numpy, cuda):
        for seed, name in enumerate(("one", "two")):
            model.add_adapter(name, random_adapter(model.config, seed=seed, use_dora=dora))
    how = {"settings": SamplingSettings(), "max_tokens": 40, "ignore_eos": True}
    names = ["one", None, "two"]
    want = [
        [token.id for token in numpy.generate(prompt, adapter=name, **how)]
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    for _ in range(2):  # the second time through graphs that were recorded
        alone = [
            [token.id for token in cuda.generate(prompt, adapter=name, **how)]
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        assert alone == want
    if not compiled:
        batch = list(cuda.generate_batch(PROMPTS, adapter=names, **how))
        assert [[token.id for row, token in batch if row == at] for at in range(3)] == want

"""Adapters beside a model that runs in NumPy: chosen per request, over decoded and packed weights, from files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_adapters import random_adapter

from llorch.errors import FormatError
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.model import Model, load
from llorch.verify.quantised_models import write_model

IDS = [3, 17, 8, 39, 0, 25]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
START = "Once upon a time"


def small(model: Model, seed: int, **settings) -> Adapter:
    return random_adapter(model.config, seed=seed, **{"lora_alpha": 0.5} | settings)


def text(model: Model, adapter: str | None) -> list[int]:
    return [token.id for token in model.generate(START, max_tokens=8, ignore_eos=True, adapter=adapter)]


def merged_logits(model: Model, adapter: Adapter) -> np.ndarray:
    """Of the same model with the products added to its arrays."""
    other = load(model.weights.path)
    for name, target in adapter.targets.items():
        tensors = adapter.tensors[name]
        product = adapter.scaling(name) * (tensors.lora_B.astype(np.float64) @ tensors.lora_A)
        whole = other.weights.array(target.weight) + (product.T if target.is_embedding else product)
        other.weights._loaded[target.weight] = whole.astype(np.float32)
    return other.forward(IDS)


def test_logits_are_those_of_the_merged_weights_and_removal_gives_back_those_of_the_base():
    model = load("micro-qwen3")
    before, adapter = model.forward(IDS), small(model, 1, target_modules=EVERY, lora_alpha=3.0)
    model.add_adapter("one", adapter)
    got = model.forward(IDS, adapter="one")
    np.testing.assert_allclose(got, merged_logits(model, adapter), rtol=0, atol=1e-4 * np.abs(got).max())
    assert np.abs(got - before).max() > 0.1
    assert np.array_equal(model.forward(IDS), before)
    model.remove_adapter("one")
    assert model.adapters == []
    assert np.array_equal(model.forward(IDS), before)


@pytest.mark.parametrize("name", ["Q4_K_M", "Q8_0", "IQ2_S"])
def test_packed_weights_take_adapters_as_decoded_ones_do(name: str, tmp_path: Path):
    path = write_model(name, tmp_path)
    packed, decoded = (load(path, residency=kind) for kind in ("packed", "decoded"))
    for model in (packed, decoded):
        model.add_adapter("one", small(model, 1, target_modules=EVERY, use_dora=True))
    before = packed.forward(IDS)
    got, want = (model.forward(IDS, adapter="one") for model in (packed, decoded))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert np.abs(got - before).max() > 0.01
    packed.remove_adapter("one")
    assert np.array_equal(packed.forward(IDS), before)


def test_answers_that_are_begun_together_keep_their_adapters():
    model = load("story")
    for seed, name in enumerate(("one", "two")):
        model.add_adapter(name, small(model, seed, lora_alpha=2.0))
    names = [None, "one", "two", "one"]
    want = [text(model, name) for name in names]
    running = [model.generate(START, max_tokens=8, ignore_eos=True, adapter=name) for name in names]
    got = [[next(answer).id for answer in running] for _ in range(8)]
    assert [list(row) for row in zip(*got, strict=True)] == want
    assert len({tuple(row) for row in want}) == 3
    begun = model.generate(START, max_tokens=8, ignore_eos=True, adapter="one")
    first = next(begun).id
    model.remove_adapter("one")
    assert [first, *(token.id for token in begun)] == want[1]


def test_a_trace_has_the_stages_of_the_adapted_pass():
    model, trace = load("micro-qwen2"), {}
    model.add_adapter("one", small(model, 1))
    logits = model.forward(IDS, trace=trace, adapter="one")
    assert np.array_equal(trace["logits"], logits)
    assert not np.array_equal(trace["l0.q_proj"], _plain_trace(model)["l0.q_proj"])


def _plain_trace(model: Model) -> dict[str, np.ndarray]:
    trace: dict[str, np.ndarray] = {}
    model.forward(IDS, trace=trace)
    return trace


def test_adapters_come_from_both_kinds_of_files(tmp_path: Path):
    model = load("micro-llama")
    adapter = small(model, 1)
    write_peft(adapter, tmp_path / "peft", base=identity_of(model.weights))
    write_lora_gguf(adapter, tmp_path / "lora.gguf", model.config)
    model.add_adapter("memory", adapter)
    assert model.add_adapter("peft", tmp_path / "peft") == "base: the same, number by number"
    assert "unknown" in model.add_adapter("gguf", str(tmp_path / "lora.gguf"))
    want = model.forward(IDS, adapter="memory")
    assert np.array_equal(model.forward(IDS, adapter="peft"), want)
    np.testing.assert_allclose(model.forward(IDS, adapter="gguf"), want, rtol=0, atol=1e-5)


def test_an_adapter_of_another_base_is_refused_unless_any_will_do(tmp_path: Path):
    model, folder = load("micro-qwen2"), tmp_path / "adapter"
    write_peft(small(model, 1), folder, base=replace(identity_of(model.weights), vectors="0" * 64))
    with pytest.raises(FormatError, match="BaseMismatch"):
        model.add_adapter("one", folder)
    assert model.adapters == []
    assert "another" in model.add_adapter("one", folder, any_base=True)
    assert model.adapters == ["one"]


def test_mistakes_are_named():
    model = load("micro-qwen2")
    model.add_adapter("one", small(model, 1))
    for problem, call in {
        "none called 'two'; there are one": lambda: model.forward(IDS, adapter="two"),
        "none called 'three'": lambda: model.remove_adapter("three"),
        "'one' already": lambda: model.add_adapter("one", small(model, 1)),
        "letters, digits, _ and -, got ''": lambda: model.add_adapter("", small(model, 1)),
        r"made for another model, .* layers\.0\.q_proj": lambda: model.add_adapter("x", small(load("micro-qwen3"), 1)),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()
    with pytest.raises(FileNotFoundError, match="no such adapter"):
        model.add_adapter("x", "nowhere")

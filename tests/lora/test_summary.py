"""What `lora inspect` tells of an adapter: the numbers, with and without a base, and the faults that it survives."""

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import random_adapter, tiny_base
from helpers.refusals import assert_tells

from llorch.files import open_weights
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.lora.summary import product_norm, summarise

SETTINGS = {"target_modules": ("q_proj", "embed_tokens"), "use_rslora": True, "rank_pattern": {"q_proj": 5}}


@pytest.fixture
def made(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base"))
    adapter = random_adapter(weights.config, **SETTINGS)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights, "the base"))
    return tmp_path, weights, adapter


def test_the_norm_of_a_product_needs_no_product(rng):
    lora_A, lora_B = rng.standard_normal((3, 20)), rng.standard_normal((30, 3))
    assert product_norm(lora_A, lora_B) == pytest.approx(np.linalg.norm(lora_B @ lora_A), rel=1e-12)


def test_ranks_scales_and_norms_are_those_of_the_adapter(made):
    folder, weights, adapter = made
    summary = summarise(folder / "adapter", weights)
    assert summary.n_parameters == adapter.n_parameters
    assert (summary.base, summary.dtypes, summary.problems) == ("the base", ["F32"], [])
    by_path = {matrix.path: matrix for matrix in summary.matrices}
    assert by_path.keys() == {target.path for target in adapter.targets.values()}
    for name, target in adapter.targets.items():
        actual, tensors = by_path[target.path], adapter.tensors[name]
        delta = adapter.scaling(name) * tensors.lora_B @ tensors.lora_A
        assert (actual.rank, actual.scaling) == (adapter.config.rank_of(target), adapter.scaling(name))
        assert actual.norm == pytest.approx(np.linalg.norm(delta), rel=1e-5)
        assert actual.relative == pytest.approx(actual.norm / np.linalg.norm(weights.array(target.weight)), rel=1e-5)


def test_a_gguf_file_tells_the_same_norms(made):
    folder, weights, adapter = made
    write_lora_gguf(adapter, folder / "a.gguf", weights.config)
    norms = [sorted(m.norm for m in summarise(folder / name).matrices) for name in ("adapter", "a.gguf")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)
    assert summarise(folder / "a.gguf").base is None


def test_halves_and_nan_are_named(made):
    folder, _, _ = made
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = container.load_file(path)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][0, 0] = np.nan
    container.save_file(tensors, path, {"format": "pt"})
    problems = summarise(folder / "adapter").problems
    half, odd = (next(one for one in problems if f"layers.{layer}." in one) for layer in (0, 1))
    assert_tells(half, "lora_A", "lora_B", where="model.layers.0.self_attn.q_proj")
    assert_tells(odd, "NaN", where="model.layers.1.self_attn.q_proj")

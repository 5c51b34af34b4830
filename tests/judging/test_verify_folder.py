"""Live verification of Hugging Face folders: what no built-in model has, against both engines."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders.quantised_folders import in_fp8
from builders.tiny_models import (
    GGUF_METADATA,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    gguf_tensors,
    random_tensors,
    write_file,
    write_folder,
)
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.runners.numpy import run
from llorch.judging.verify import plan_live, verify_live
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.stage_ref import Pass

IDS = (3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 27, 13)
ENGINES = {"llamacpp", "transformers", FLOAT64_REFERENCE}
WIDTHS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}


def biased(family: str) -> dict[str, np.ndarray]:
    """Random tensors with a bias at every projection of the attention."""
    rng = np.random.default_rng(3)
    tensors = random_tensors(family)
    for layer in range(2):
        for part, width in WIDTHS.items():
            bias = rng.standard_normal(width, dtype=np.float32)
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = bias
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "biased", biased("llama"), attention_bias=True)


def test_a_bias_of_the_output_projection_is_added(folder: Path):
    weights = open_weights(folder).astype(np.float64)
    trace = run(weights, Pass(IDS))
    for layer in range(2):
        w = weights.layer(layer)
        expected = trace[f"l{layer}.attn_context"] @ w["o_proj"].T + w["o_bias"]
        np.testing.assert_allclose(trace[f"l{layer}.attn_out"], expected, rtol=1e-12, strict=True)
    plain = forward(np.asarray(IDS), weights, KVCache(weights.config, weights.dtype))
    np.testing.assert_array_equal(trace["logits"], plain)


@pytest.mark.live
def test_a_folder_with_every_bias_verifies_live_against_both_engines(folder: Path):
    comparisons = list(verify_live(plan_live(open_weights(folder), IDS, ["llamacpp", "transformers"])))
    assert [c for c in comparisons if c.verdict != PASS] == []
    assert {c.engine for c in comparisons if c.stage_ref.name == "attn_out"} == ENGINES


@pytest.mark.live
@pytest.mark.parametrize("name", ["micro-qwen3-next", "micro-qwen3.5-moe", "micro-qwen3-moe", "micro-llama4"])
def test_quantised_folder_of_a_family_with_a_layout_of_its_own_verifies_live(name: str, tmp_path: Path):
    comparisons = list(verify_live(plan_live(open_weights(in_fp8(tmp_path / "fp8", name)), IDS, ["transformers"])))
    assert [c for c in comparisons if c.verdict == FAIL] == []
    assert {c.engine for c in comparisons if c.stage_ref.name == "logits"} == {"transformers", FLOAT64_REFERENCE}


@pytest.mark.live
def test_near_and_far_cases_are_compared_at_their_positions(folder: Path):
    comparisons = list(verify_live(plan_live(open_weights(folder), IDS, ["llamacpp"])))
    rotated = [c for c in comparisons if c.stage_ref.name == "q_rope" and c.mode != "decode"]
    assert {c.stage_ref.run for c in rotated} == {"near", "far"}
    assert {c.stage_ref.run for c in comparisons if c.mode == "decode"} == {
        *(f"near, {n} cached" for n in (1, 6, 11)),
        *(f"far, {n} cached" for n in (1, 4, 7)),
    }


@pytest.mark.live
def test_a_folder_of_several_files_is_read_whole_by_the_other_reader(tmp_path: Path):
    tensors = random_tensors("qwen3")
    folder = write_folder(tmp_path / "sharded", tensors, "qwen3")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    comparisons = list(verify_live(plan_live(open_weights(folder), IDS, ["llamacpp"])))
    assert comparisons[0].stage_ref.name == "tensors"
    assert [c for c in comparisons if c.verdict == FAIL] == []

    failed: dict[str, str] = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index["weight_map"]}))
    comparisons = list(verify_live(plan_live(open_weights(folder), IDS, ["llamacpp"]), failed=failed))
    assert failed == {FLOAT64_REFERENCE: "KeyError 'metadata'"}  # transformers wants it, llama.cpp and we do not
    assert {c.engine for c in comparisons} == {"reader", "llamacpp"}
    assert [c for c in comparisons if c.verdict == FAIL] == []


@pytest.mark.live
def test_a_file_with_its_own_frequency_factors_verifies_live_against_both_engines(tmp_path: Path):
    factors = np.array([1.0, 1.5, 3.0, 7.0], np.float32)  # no published model has these
    tensors = {name: values * np.float32(0.1) for name, values in gguf_tensors().items()}
    metadata = {**GGUF_METADATA, "tokenizer.ggml.model": "none", "llama.vocab_size": VOCAB}
    path = write_file(tmp_path / "factors.gguf", {**tensors, "rope_freqs.weight": factors}, metadata)
    comparisons = list(verify_live(plan_live(open_weights(path), IDS, ["llamacpp", "transformers"])))
    assert [c for c in comparisons if c.verdict != PASS] == []
    assert {c.engine for c in comparisons if c.stage_ref.name == "q_rope"} == ENGINES


@pytest.mark.live
def test_a_folder_that_transformers_would_fill_up_with_random_weights_is_refused(tmp_path: Path):
    from llorch.engines.transformers import _load_folder

    tensors = random_tensors("qwen3")
    config = open_weights(write_folder(tmp_path, tensors, "qwen3")).config
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    write_folder(tmp_path, tensors, "qwen3")
    with refuses(RuntimeError, where=("transformers", tmp_path)) as caught:
        _load_folder(tmp_path, config, "float32")
    assert "layers.1.self_attn.k_norm" in str(caught.value)

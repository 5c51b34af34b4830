"""Safetensors and config.json of the folders that are written."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import FAMILIES, random_tensors, write_folder
from helpers.refusals import Refusal, refuses, row

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.read_huggingface import config_from_huggingface
from llorch.files import Weights, open_safetensors, open_weights
from llorch.files.export_huggingface import huggingface_config, huggingface_size, write_safetensors
from llorch.files.quant import GGMLType
from llorch.ops.rope import frequencies, llama3_factors

LLAMA_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16, attention_factor=1.25, beta_fast=20.0)


def written_config(config: ModelConfig) -> dict[str, object]:
    return huggingface_config(config, GGMLType.F32, path=Path("m.gguf"))


def llama(config: ModelConfig, **changes: object) -> ModelConfig:
    return replace(config, family="llama", qk_norm=False, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_come_back_with_every_bit(tmp_path: Path, family: str):
    tensors = random_tensors(family)
    weights = open_weights(write_folder(tmp_path / "a", tensors, family))
    (tmp_path / "b").mkdir()
    write_safetensors(weights, tmp_path / "b", ggml_type=GGMLType.F32)
    with open_safetensors(tmp_path / "b" / "model.safetensors") as back:
        assert back.tensors.keys() == tensors.keys()
        assert all(back.array(name).tobytes() == tensors[name].tobytes() for name in tensors)
        assert back.metadata == {"format": "pt"}
        assert all(info.offset % 4 == 0 for info in back.tensors.values())
        size = sum(info.n_bytes for info in back.tensors.values())
    assert size == huggingface_size(weights.config, GGMLType.F32)


@pytest.mark.parametrize("ggml_type", [GGMLType.F16, GGMLType.BF16], ids=lambda ggml_type: ggml_type.name)
def test_half_precision_is_rounded_to_nearest(tmp_path: Path, ggml_type: GGMLType):
    weights = open_weights(write_folder(tmp_path / "a", random_tensors("llama")))
    write_folder(tmp_path / "b", {})
    write_safetensors(weights, tmp_path / "b", ggml_type=ggml_type)
    back = open_weights(tmp_path / "b")
    spacing = 2.0**-11 if ggml_type is GGMLType.F16 else 2.0**-8
    for name in ("embed_tokens", "layers.1.q_proj", "final_norm"):
        assert np.allclose(back.array(name), weights.array(name), rtol=spacing, atol=1e-7)
        assert not np.array_equal(back.array(name), weights.array(name))


def read_shard_names(weights: Weights, folder: Path, ggml_type: GGMLType, shard_bytes: int) -> list[int]:
    """The bytes of tensors in each file, whose names and sum must be those that the index tells."""
    folder.mkdir()
    write_safetensors(weights, folder, ggml_type=ggml_type, shard_bytes=shard_bytes)
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path) as file:
            found[path.name] = sum(info.n_bytes for info in file.tensors.values())
    if len(found) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert list(found) == [f"model-{n:05}-of-{len(found):05}.safetensors" for n in range(1, len(found) + 1)]
        assert index["metadata"]["total_size"] == sum(found.values())
        assert {*index["weight_map"].values()} == found.keys()
    return list(found.values())


@pytest.mark.parametrize("ggml_type", [GGMLType.F32, GGMLType.F16], ids=lambda ggml_type: ggml_type.name)
def test_shards_are_filled_none_is_empty_and_all_come_back(tmp_path: Path, ggml_type: GGMLType):
    weights = open_weights(write_folder(tmp_path / "a", random_tensors("llama")))
    whole = huggingface_size(weights.config, ggml_type)
    assert read_shard_names(weights, tmp_path / "one", ggml_type, whole) == [whole]
    sizes = read_shard_names(weights, tmp_path / "some", ggml_type, whole // 3)
    assert max(sizes) <= whole // 3
    assert all(one + following > whole // 3 for one, following in pairwise(sizes))
    assert len(read_shard_names(weights, tmp_path / "each", ggml_type, 1)) == len(weights)
    (tmp_path / "each" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    back = open_weights(tmp_path / "each")
    assert all(np.allclose(back.array(name), weights.array(name), rtol=2**-11, atol=1e-7) for name in weights)


def test_the_config_names_the_dtype_of_the_tensors(config: ModelConfig):
    for kind, name in {GGMLType.F32: "float32", GGMLType.F16: "float16", GGMLType.BF16: "bfloat16"}.items():
        assert huggingface_config(config, kind, path=Path("m"))["torch_dtype"] == name


def test_a_weight_beyond_float16_is_refused_by_name(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70000
    weights = open_weights(write_folder(tmp_path / "a", tensors))
    with refuses("OutOfRange", where="model.layers.1.mlp.up_proj.weight", expected=65504, got=70000):
        write_safetensors(weights, tmp_path, ggml_type=GGMLType.F16)


@pytest.mark.parametrize("scaling", [None, LinearScaling(factor=2.5), LLAMA_3_1, YARN])
def test_a_config_is_read_as_it_was(config: ModelConfig, scaling: Any):
    for family in ("llama", "qwen2", "qwen3"):
        norm, bias = family == "qwen3", family == "qwen2"
        own = replace(config, family=family, rope_scaling=scaling, qk_norm=norm, qkv_bias=bias)
        assert config_from_huggingface(written_config(own), path="config.json") == own


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (16.0, 4096)])
def test_frequency_factors_become_the_llama3_scaling_that_gives_them(config: ModelConfig, factor: float, context: int):
    scaling = replace(LLAMA_3_1, factor=factor, original_max_position_embeddings=context)
    values = llama3_factors(frequencies(128, 500000.0), scaling).astype(np.float32)
    own = llama(config, head_dim=128, rope_theta=500000.0, rope_scaling=FactorScaling(factors=tuple(values.tolist())))
    assert config_from_huggingface(written_config(own), path="c").rope_scaling == scaling


def with_factors(config: ModelConfig, *factors: float) -> object:
    return written_config(llama(config, rope_scaling=FactorScaling(factors=factors)))


def with_near_factors(config: ModelConfig) -> object:
    values = llama3_factors(frequencies(128, 500000.0), LLAMA_3_1).astype(np.float32) * np.float32(1.0001)
    return with_factors(replace(config, head_dim=128, rope_theta=500000.0), *values.tolist())


REFUSALS = [
    row("other factors", lambda config: with_factors(config, 1.0, 3.0, 2.0), "Unsupported", where="rope_freqs.weight",
        expected="Llama 3"),
    row("factors that are near", with_near_factors, "Unsupported", where="rope_freqs.weight", expected="Llama 3"),
    row("bias without o", lambda config: written_config(llama(config, qkv_bias=True)), "Unsupported", "v only",
        where="attention_bias"),
    row("bias of o", lambda config: written_config(llama(config, o_bias=True)), "Unsupported", "o only",
        where="attention_bias"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_model_that_transformers_cannot_load_is_refused(config: ModelConfig, refusal: Refusal):
    refusal.check(config)


def test_biases_of_all_four_matrices_are_one_setting(config: ModelConfig):
    assert written_config(llama(config, qkv_bias=True, o_bias=True))["attention_bias"] is True

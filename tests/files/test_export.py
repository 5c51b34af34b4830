import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES
from builders.tiny_models import (
    FAMILIES,
    GGUF_METADATA,
    VOCAB,
    gguf_tensors,
    huggingface_shapes,
    random_tensors,
    with_biases,
    write_file,
    write_folder,
)
from helpers.refusals import Refusal, refuses, row

from llorch.families.config import FactorScaling, LinearScaling, YarnScaling
from llorch.files import StringArray, Weights, open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import FILE_TYPES, gguf_size, gguf_types, write_gguf
from llorch.files.export_blocks import find_blocks
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import interleave, inventory
from llorch.model.cache import KVCache
from llorch.model.forward import forward
from llorch.runtime.builtin import builtin_path

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.25}
SCALINGS: dict[str, dict[str, Any] | None] = {"none": None, "llama3": LLAMA3, "linear": LINEAR, "yarn": YARN}
NOT_IN_LLAMACPP = {("llama3", "qwen2"), ("llama3", "qwen3")}  # refused by write_gguf
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 48}


def wide_tensors() -> dict[str, np.ndarray]:
    """A llama whose rows are whole blocks of every type."""
    widths = {32: 256, 56: 512, 40: 48}
    rng = np.random.default_rng(9)
    tensors = {}
    for name, shape in huggingface_shapes("llama").items():
        shape = tuple(widths.get(size, size) for size in shape)
        if "k_proj" in name or "v_proj" in name:
            shape = (128, 256)
        tensors[name] = rng.normal(0, 0.02, shape).astype(np.float32)
    return tensors


def round_trip(weights: Weights, path: Path) -> Weights:
    write_gguf(weights, path)
    return open_weights(path)


def assert_same_arrays(actual: Weights, expected: Weights) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        assert np.array_equal(actual[name], expected[name]), name


def metadata_of(path: Path) -> dict[str, Any]:
    with open_gguf(path) as file:
        return dict(file.metadata)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_equal_from_a_gguf_file(tmp_path: Path, family: str, tied: bool):
    tensors = random_tensors(family)
    if tied:
        del tensors["lm_head.weight"]
    weights = open_weights(write_folder(tmp_path, tensors, family, tie_word_embeddings=tied))
    back = round_trip(weights, tmp_path / "out.gguf")
    assert_same_arrays(back, weights)
    for field in ("family", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_position_embeddings", "qkv_bias"):
        assert getattr(back.config, field) == getattr(weights.config, field)
    assert back.config.rms_norm_eps == pytest.approx(weights.config.rms_norm_eps, rel=1e-7)
    assert back.config.tie_word_embeddings is tied


def test_biases_of_a_llama_are_reordered_and_come_back(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, with_biases(random_tensors("llama")), attention_bias=True))
    back = round_trip(weights, tmp_path / "out.gguf")
    assert_same_arrays(back, weights)
    assert back.source.array("blk.0.attn_q.bias")[:4].tolist() == [0, 4, 1, 5]
    assert back.source.array("blk.0.attn_output.bias")[:4].tolist() == [0, 1, 2, 3]


def test_linear_scaling_comes_back(tmp_path: Path):
    folder = write_folder(tmp_path, random_tensors("llama"), rope_scaling=LINEAR)
    assert round_trip(open_weights(folder), tmp_path / "out.gguf").config.rope_scaling == LinearScaling(factor=2.0)


def test_yarn_scaling_comes_back(tmp_path: Path):
    folder = write_folder(tmp_path, random_tensors("llama"), rope_scaling=YARN)
    back = round_trip(open_weights(folder), tmp_path / "out.gguf").config.rope_scaling
    assert isinstance(back, YarnScaling)
    assert back.attention_factor == pytest.approx(1.25, rel=1e-6)
    assert (back.factor, back.original_max_position_embeddings) == (4.0, 16)
    assert (back.beta_fast, back.beta_slow) == (32.0, 1.0)


def test_llama3_scaling_becomes_the_factors_of_the_converter(tmp_path: Path):
    folder = write_folder(tmp_path, random_tensors("llama"), rope_scaling=LLAMA3)
    back = round_trip(open_weights(folder), tmp_path / "out.gguf").config.rope_scaling
    assert isinstance(back, FactorScaling)
    wanted = []
    for pair in range(4):  # the rule by wavelength: keep short ones, divide long ones, blend between
        wavelength = 2 * math.pi * 10000.0 ** (2 * pair / 8)
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        blend = 1 / ((1 - smooth) / 8.0 + smooth)
        wanted.append(1.0 if wavelength < 32 / 4.0 else 8.0 if wavelength > 32 / 1.0 else blend)
    assert back.factors == pytest.approx(wanted, rel=1e-6)
    assert round_trip(open_weights(tmp_path / "out.gguf"), tmp_path / "again.gguf").config.rope_scaling == back


def test_llama3_scaling_of_another_family_is_refused(tmp_path: Path):
    folder = write_folder(tmp_path, random_tensors("qwen2"), "qwen2", rope_scaling=LLAMA3)
    with refuses("Unsupported", "llama", got="qwen2"):
        write_gguf(open_weights(folder), tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def file_of(tmp_path: Path) -> Weights:
    return open_weights(write_file(tmp_path / "m.gguf", gguf_tensors(), GGUF_METADATA))


def other_betas(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors("llama"), rope_scaling=YARN | {"beta_fast": 16.0})
    write_gguf(open_weights(folder), tmp_path / "out.gguf")


REFUSALS = [
    row("yarn with other betas", other_betas, "Unsupported", "YaRN", "betas 32 and 1", got=(16.0, 1.0)),
    row("metadata of another kind",
        lambda path: write_gguf(file_of(path), path / "out.gguf", tokenizer_metadata={"x": None}), TypeError, where="x",
        got="NoneType"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_model_that_gguf_cannot_store_is_refused(tmp_path: Path, refusal: Refusal):
    refusal.check(tmp_path)


def test_the_file_that_is_read_can_be_written_over(tmp_path: Path):
    path = write_file(tmp_path / "m.gguf", gguf_tensors(), GGUF_METADATA)
    weights = open_weights(path)
    write_gguf(weights, path)
    assert_same_arrays(open_weights(path), open_weights(write_file(tmp_path / "n.gguf", gguf_tensors(), GGUF_METADATA)))
    assert np.array_equal(weights["layers.0.q_proj"], open_weights(path)["layers.0.q_proj"])


def test_write_gguf_failure_keeps_the_old_file_and_adds_no_other(tmp_path: Path):
    tensors = gguf_tensors()
    tensors["output_norm.weight"][0] = np.nan
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    (tmp_path / "out.gguf").write_bytes(b"old")
    with refuses("NonFinite", "has nan", "(0,)", where="output_norm.weight"):
        write_gguf(weights, tmp_path / "out.gguf")
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out.gguf"]
    assert (tmp_path / "out.gguf").read_bytes() == b"old"


def test_tokenizer_metadata_is_carried_over_type_by_type(tmp_path: Path):
    told: dict[str, object] = {
        "tokens": [f"t{index}" for index in range(VOCAB)], "model": "gpt2", "add_bos_token": True, "eos_token_id": 7,
        "some_scale": 0.5, "token_type": [1] * VOCAB, "scores": [0.5] * VOCAB, "flags": [True, False],
    }  # fmt: skip
    metadata = GGUF_METADATA | {f"tokenizer.ggml.{key}": value for key, value in told.items()}
    weights = open_weights(write_file(tmp_path / "m.gguf", gguf_tensors(), metadata))
    source = {key: value for key, value in metadata_of(tmp_path / "m.gguf").items() if key.startswith("tokenizer.")}
    write_gguf(weights, tmp_path / "out.gguf", tokenizer_metadata=source | {"tokenizer.negative": -1})
    back = metadata_of(tmp_path / "out.gguf")
    for key, value in source.items():
        assert type(back[key]) is type(value), key
        assert list(back[key]) == list(value) if isinstance(value, StringArray | np.ndarray) else back[key] == value
    assert back["tokenizer.ggml.scores"].dtype == np.float32
    assert back["tokenizer.ggml.token_type"].dtype == np.int32
    assert back["tokenizer.negative"] == -1


def test_plain_lists_of_strings_are_written_too(tmp_path: Path):
    weights = file_of(tmp_path)
    tokens = [f"t{index}" for index in range(VOCAB)]
    write_gguf(weights, tmp_path / "out.gguf", tokenizer_metadata={"tokenizer.ggml.tokens": tokens})
    assert metadata_of(tmp_path / "out.gguf")["tokenizer.ggml.tokens"][3] == b"t3"


@pytest.mark.parametrize("ggml_type", FILE_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_matrices_get_the_type_and_vectors_stay_f32(tmp_path: Path, ggml_type: GGMLType):
    weights = open_weights(write_folder(tmp_path, tensors := wide_tensors(), **WIDE))
    write_gguf(weights, tmp_path / "out.gguf", ggml_type=ggml_type)
    expected = gguf_types(weights.config, ggml_type)
    with open_gguf(tmp_path / "out.gguf") as file:
        for weight in inventory(weights.config).values():
            kind = file.tensors[weight.gguf].ggml_type
            assert kind is expected[weight.name]
            ternary = ggml_type in (GGMLType.TQ1_0, GGMLType.TQ2_0) and weight.name in ("embed_tokens", "lm_head")
            assert kind is (GGMLType.F32 if len(weight.shape) == 1 else GGMLType.F16 if ternary else ggml_type)
        assert file.metadata["general.file_type"] == FILE_TYPES[ggml_type]
        assert ("general.quantization_version" in file.metadata) == (ggml_type.name[0] in "QTM")
        assert sum(info.n_bytes for info in file.tensors.values()) == gguf_size(weights.config, ggml_type)
        assert np.array_equal(file.array("blk.1.attn_norm.weight"), tensors["model.layers.1.input_layernorm.weight"])


def test_rows_that_are_no_whole_number_of_blocks_become_f16(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("llama")))  # 56 columns in down_proj
    write_gguf(weights, tmp_path / "out.gguf", ggml_type=GGMLType.Q8_0)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.tensors["blk.0.ffn_down.weight"].ggml_type is GGMLType.F16
        assert file.tensors["blk.0.ffn_up.weight"].ggml_type is GGMLType.Q8_0


def test_a_file_of_the_same_type_keeps_its_bytes(tmp_path: Path):
    path = tmp_path / "a.gguf"
    write_gguf(open_weights(write_folder(tmp_path, wide_tensors(), **WIDE)), path, ggml_type=GGMLType.Q4_0)
    with open_gguf(path) as file:
        start = file.tensors["blk.1.attn_q.weight"].offset
    data = bytearray(path.read_bytes())
    data[start + 2 : start + 18] = b"\x79" * 16  # a block without its outermost code, as better quantisers make them
    path.write_bytes(data)
    write_gguf(open_weights(path), tmp_path / "b.gguf", ggml_type=GGMLType.Q4_0)
    assert (tmp_path / "b.gguf").read_bytes() == data


@pytest.mark.live
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_saved_by_transformers_opens_and_exports(tmp_path: Path, family: str, dtype: str):
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    weights = open_weights(tmp_path)
    state = model.state_dict()
    assert np.array_equal(weights["layers.1.v_proj"], state["model.layers.1.self_attn.v_proj.weight"].float().numpy())
    assert_same_arrays(round_trip(weights, tmp_path / "out.gguf"), weights)


IDS = np.array([1, 5, 9, 2, 17, 11, 3])
EXPECTED = {
    "gptq-2bit-asym": {"Q4_0"}, "gptq-3bit": {"Q4_0"}, "gptq-4bit-channel": {"Q4_0"}, "gptq-4bit-asym": {"Q5_0"},
    "awq-gemm": {"Q5_0"}, "ct-w8a8": {"Q8_0"}, "ct-mxfp4": {"MXFP4"}, "mlx-4bit": {"Q4_1"}, "mlx-5bit": {"Q5_1"},
    "ct-mixed": {"Q4_0"}, "bnb-nf4": set(), "ct-fp8-block": set(), "gptq-4bit-act-order": set(),
}  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of float32; a zero without its sign, since MXFP4 of ggml has one zero."""
    return (array.astype(np.float32) + np.float32(0)).view(np.uint32)


def tensors_by_gguf(path: Path) -> Mapping[str, tuple[str, np.ndarray]]:
    """Type and numbers of every tensor, read and decoded by the gguf package."""
    tensors = gguf.GGUFReader(path).tensors
    return {one.name: (one.tensor_type.name, gguf.dequantize(one.data, one.tensor_type)) for one in tensors}


@pytest.mark.parametrize("name", NAMES)
def test_gguf_of_quantised_folder_has_the_numbers_of_the_folder_in_the_gguf_package(name: str, tmp_path: Path):
    done = convert(FOLDERS / name, tmp_path / "m.gguf")
    weights, made = open_weights(FOLDERS / name), tensors_by_gguf(tmp_path / "m.gguf")
    for weight in inventory(weights.config).values():
        kind, numbers = made[weight.gguf]
        wanted = weights.array(weight.name)
        wanted = interleave(wanted, weight.interleaved_heads) if weight.interleaved_heads else wanted
        assert kind == done.kept.get(weight.name, "F32")
        assert np.array_equal(bits(numbers), bits(wanted)), weight.name
    assert done.kept.keys().isdisjoint(done.decoded)


@pytest.mark.parametrize("name", EXPECTED)
def test_gguf_of_quantised_folder_keeps_every_matrix_that_a_type_of_ggml_holds(name: str, tmp_path: Path):
    done = convert(FOLDERS / name, tmp_path / "m.gguf")
    assert {*done.kept.values()} == EXPECTED[name]
    assert bool(done.decoded) == (name == "ct-mixed" or not EXPECTED[name])
    one, other = open_weights(FOLDERS / name).astype(np.float64), open_weights(tmp_path / "m.gguf").astype(np.float64)
    logits = [forward(IDS, weights, KVCache(weights.config, weights.dtype)) for weights in (one, other)]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6, atol=1e-6)  # epsilon is a float32 in GGUF files


def test_gguf_of_quantised_folder_has_the_predicted_size_and_the_type_of_most_numbers(tmp_path: Path):
    done = convert(FOLDERS / "gptq-4bit", tmp_path / "m.gguf")
    weights = open_weights(FOLDERS / "gptq-4bit")
    with open_gguf(tmp_path / "m.gguf") as file:
        stored = sum(info.n_bytes for info in file.tensors.values())
        assert file.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert stored == gguf_size(weights.config, GGMLType.F32, find_blocks(weights).kept)
    assert done.ggml_type is GGMLType.Q4_0
    assert stored < 0.3 * gguf_size(weights.config, GGMLType.F32)


def test_gguf_of_quantised_folder_with_a_type_asked_for_has_that_type_alone(tmp_path: Path):
    done = convert(FOLDERS / "gptq-4bit", tmp_path / "m.gguf", ggml_type=GGMLType.F16)
    assert (done.kept, done.decoded, done.ggml_type) == ({}, {}, GGMLType.F16)
    assert {kind for kind, _ in tensors_by_gguf(tmp_path / "m.gguf").values()} == {"F16", "F32"}


def test_find_blocks_of_a_file_that_is_no_quantised_folder_is_empty(tmp_path: Path):
    for path in (builtin_path("micro-llama"), convert(FOLDERS / "mlx-4bit", tmp_path / "m.gguf").target):
        found = find_blocks(open_weights(path))
        assert (found.kept, found.decoded) == ({}, {})

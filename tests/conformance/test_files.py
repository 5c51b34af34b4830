"""Folders and files of every family, by transformers and by llama.cpp's converter, both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.families import COMMON, FAMILIES, WITH_TEXT_CLASS, random_folder, twin
from helpers.refusals import refuses

from llorch.families.table import BY_GGUF
from llorch.families.table import FAMILIES as TABLE
from llorch.files import Weights, open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.quant import GGMLType
from llorch.ops.rope import rope_tables

pytestmark = pytest.mark.live
# Another name, rounded, or no matter.
UNSAID = ("family", "rms_norm_eps", "rope_theta", "temperature", "rope_sections", "part_of_whole")


def require_equal(actual: Weights, expected: Weights, *, ulp: int) -> None:
    assert list(actual) == list(expected)
    for name in actual:
        if name.endswith("decay"):  # the converter's exponential, of torch, is not always rounded to the nearest
            np.testing.assert_array_max_ulp(actual.array(name), expected.array(name), ulp)
        else:
            assert actual.array(name).tobytes() == expected.array(name).tobytes(), name
    ours, theirs = vars(actual.config), vars(expected.config)
    assert {key: ours[key] for key in ours if key not in UNSAID} == {key: theirs[key] for key in UNSAID ^ ours.keys()}


@pytest.mark.nightly_cases(but=["1-mistral"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_file_of_the_llamacpp_converter_has_the_weights_of_its_folder(family: str, seed: int, tmp_path: Path):
    folder = random_folder(family, tmp_path / "folder", seed, nested=bool(seed) and family in WITH_TEXT_CLASS)
    require_equal(open_weights(folder), open_weights(twin(folder, tmp_path / "twin.gguf")), ulp=1)


@pytest.mark.nightly_cases(but=["MOSTLY_Q8_0-qwen3_vl_moe"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["MOSTLY_F16", "MOSTLY_Q8_0"])
def test_llorch_file_has_the_tensors_of_the_llamacpp_converter(family: str, kind: str, tmp_path: Path):
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32}
    known = {} if TABLE[family].transformers.keys else COMMON | dict(FAMILIES[family].config)  # sizes under other names
    folder = random_folder(family, tmp_path / "folder", 3, **{key: sizes[key] for key in sizes.keys() & known})
    theirs = open_gguf(twin(folder, tmp_path / "twin.gguf", kind=kind))
    convert(folder, tmp_path / "ours.gguf", ggml_type=GGMLType[kind.removeprefix("MOSTLY_")])
    ours = open_gguf(tmp_path / "ours.gguf")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert (ours.tensors[name].shape, ours.tensors[name].ggml_type) == (tensor.shape, tensor.ggml_type), name
        if name.endswith("ssm_a"):
            np.testing.assert_array_max_ulp(ours.array(name), theirs.array(name), 1)
        else:
            assert ours.packed(name).raw.tobytes() == theirs.packed(name).raw.tobytes(), name
    said = {key: value for key, value in theirs.metadata.items() if not key.startswith("general.")}
    free = ("dimension_sections", "n_deepstack_layers")  # of text no number depends on them
    wrong = {key for key, value in said.items() if str(ours.metadata.get(key)) != str(value)}
    assert {key for key in wrong if not key.endswith(free)} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_round_trip_is_bit_exact_and_complete_for_transformers(family: str, tmp_path: Path):
    import transformers

    first = open_weights(random_folder(family, tmp_path / "first", 5))
    convert(tmp_path / "first", tmp_path / "there.gguf")
    convert(tmp_path / "there.gguf", tmp_path / "back")
    require_equal(first, open_weights(tmp_path / "there.gguf"), ulp=0)
    require_equal(first, open_weights(tmp_path / "back"), ulp=0)
    assert open_weights(tmp_path / "back").config.family == (TABLE[family].written_as or BY_GGUF[TABLE[family].gguf])
    _, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)  # pyright: ignore
    assert {key: names for key, names in found.items() if names} == {}


def test_llama_4_scaling_round_trips(tmp_path: Path):
    step = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope = step | {"original_max_position_embeddings": 128, "rope_theta": 5e5}
    first = open_weights(random_folder("llama4", tmp_path / "first", 6, rope_parameters=rope))
    convert(tmp_path / "first", tmp_path / "there.gguf")
    convert(tmp_path / "there.gguf", tmp_path / "back")
    back, factors = open_weights(tmp_path / "back").config, open_weights(tmp_path / "there.gguf").config.rope_scaling
    positions = np.arange(500)
    made = [
        rope_tables(positions, head_dim=16, theta=5e5, scaling=scaling)
        for scaling in (first.config.rope_scaling, factors, back.rope_scaling)
    ]
    np.testing.assert_allclose(made[1:], [made[0]] * 2, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_gains_and_decays_are_made_in_the_dtype_of_the_run(family: str, tmp_path: Path):
    weights = open_weights(random_folder(family, tmp_path, 1)).astype(np.float64)
    stored = weights.source.array("model.layers.0.input_layernorm.weight").astype(np.float64)
    assert np.array_equal(weights["layers.0.attn_norm"], 1 + stored)
    assert not np.array_equal(weights["layers.0.attn_norm"], (1 + stored).astype(np.float32))
    logarithm = weights.source.array("model.layers.0.linear_attn.A_log").astype(np.float64)
    assert np.array_equal(weights["layers.0.decay"], -np.exp(logarithm))


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_only_requested_experts_are_read(family: str, tmp_path: Path):
    weights = open_weights(random_folder(family, tmp_path, 1))
    name = "layers.1.experts_down_proj"
    stack = weights[name]
    assert (len(stack), stack[2].shape) == (stack.shape[0], stack.shape[1:])
    assert np.array_equal(stack[2], weights.array(name)[2])
    assert [key for key in weights._loaded if "expert" in key] == [f"{name}.2"]
    with refuses(IndexError, f"from 0 to {len(stack) - 1}", where=name, got=len(stack)):
        stack[len(stack)]

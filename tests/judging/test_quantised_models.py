"""The micro models of quantised types: their bytes are fixed, their numbers are like weights, every code occurs."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from helpers.stored_goldens import quantised_golden

from llorch.files import GGUFFile, open_weights
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType, decode
from llorch.files.tensor_names import inventory
from llorch.judging.expectations.files import fingerprint
from llorch.judging.expectations.quantised_models import MODELS, matrix_bytes, random_blocks, write_model
from llorch.judging.goldens.quantised import types

PURE = [name for name in MODELS if name != "Q4_K_M"]


def each_type():
    return pytest.mark.parametrize("kind", types(), ids=lambda kind: kind.name)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_bytes_that_the_goldens_come_from(name: str, tmp_path: Path):
    assert fingerprint(write_model(name, tmp_path)) == quantised_golden().files[name]


def test_every_type_that_rounds_its_inputs_has_a_model_of_its_own():
    assert {kind.name for kind, rounded in ACTIVATION_TYPE.items() if rounded != "F32"} == {*PURE}
    assert all(MODELS[name].types == {GGMLType[name]} for name in PURE)


@pytest.mark.parametrize("name", MODELS)
def test_all_matrices_have_the_type_of_the_recipe(name: str, tmp_path: Path):
    recipe, weights = MODELS[name], open_weights(write_model(name, tmp_path))
    stored = {weight: weights.stored_type(weight) for weight in weights if len(weights.shape(weight)) == 2}
    assert stored == {weight: recipe.exceptions.get(weight, recipe.ggml_type) for weight in stored}
    assert {weights.stored_type(weight) for weight in weights if len(weights.shape(weight)) == 1} == {GGMLType.F32}
    assert weights.config == recipe.config
    assert isinstance(weights.source, GGUFFile)
    weights.source.close()


def test_the_mixed_model_is_mixed_as_llama_quantize_mixes_it():
    recipe = MODELS["Q4_K_M"]
    more_bits = {"lm_head", "layers.1.v_proj", "layers.1.down_proj"}
    assert recipe.types == {GGMLType.Q4_K, GGMLType.Q6_K}
    assert {name for name, kind in recipe.exceptions.items() if kind is GGMLType.Q6_K} == more_bits


def test_all_families_occur_and_common_types_are_llama():
    assert {recipe.family for recipe in MODELS.values()} == {"llama", "qwen2", "qwen3"}
    assert {MODELS[name].family for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")} == {"llama"}


@pytest.mark.parametrize("name", MODELS)
def test_widths_fill_blocks_of_256_and_dimensions_differ(name: str):
    config = MODELS[name].config
    assert all(width % 256 == 0 for width in (config.hidden_size, config.q_width, config.intermediate_size))
    dimensions = {
        config.hidden_size, config.q_width, config.kv_width, config.intermediate_size, config.vocab_size,
        config.head_dim, config.n_heads, config.n_kv_heads,
    }  # fmt: skip
    assert len(dimensions) == (8 if config.family != "qwen2" else 7)  # llama.cpp loads no other q_width for qwen2
    assert config.group_size > 1
    assert config.n_kv_heads > 1
    assert config.n_layers > 1


@each_type()
def test_decoded_weights_have_the_size_of_weights_and_no_offset(kind: GGMLType):
    shape = (256, 2048)
    values = decode(matrix_bytes(kind, shape, key="test"), kind, shape)
    assert np.isfinite(values).all()
    assert 0.03 < values.std() < 0.08
    assert abs(values.mean()) < 0.05 * values.std()
    assert (values > 0).mean() == pytest.approx((values < 0).mean(), abs=0.05)


@each_type()
def test_every_value_of_every_byte_of_codes_occurs(kind: GGMLType):
    if BLOCK_SIZES[kind][0] == 1 or kind is GGMLType.TQ1_0:
        return  # no codes; and only 243 of 256 bytes are five digits of base three
    blocks = random_blocks(kind, 20_000, key="test")
    free = [column for column in blocks.T if len(np.unique(column)) == 256]
    n_scales = {GGMLType.MXFP4: 1, GGMLType.NVFP4: 4}.get(kind, 4)
    assert len(free) >= blocks.shape[1] - n_scales


def test_blocks_depend_on_their_key_and_on_nothing_else():
    one, same, other = (random_blocks(GGMLType.Q4_K, 5, key=key) for key in ("a", "a", "b"))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.array_equal(random_blocks(GGMLType.Q4_K, 3, key="a"), one[:3])


def test_matrices_and_layers_differ(tmp_path: Path):
    weights = open_weights(write_model("Q8_0", tmp_path))
    raw = [weights.source.packed(weight.gguf).raw.tobytes() for weight in inventory(weights.config).values()]
    assert len(set(raw)) == len(raw)
    weights.source.close()


def test_gains_are_uneven_and_have_outliers(tmp_path: Path):
    weights = open_weights(write_model("Q8_0", tmp_path))
    gain = weights["layers.0.attn_norm"]
    assert sorted(np.argsort(-gain)[:2]) == [5, 133]
    assert np.delete(gain, [5, 133]).std() > 0.2
    weights.source.close()


def test_biases_and_norms_of_heads_are_there_where_the_family_has_them(tmp_path: Path):
    for name, weight in (("IQ1_S", "layers.0.q_bias"), ("IQ4_NL", "layers.0.q_norm")):
        weights = open_weights(write_model(name, tmp_path))
        assert weights[weight].std() > 0.1
        weights.source.close()
    assert astuple(MODELS["IQ1_S"])[0] == "qwen2"

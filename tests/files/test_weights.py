import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders.tiny_models import (
    FAMILIES,
    GGUF_METADATA,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    gguf_tensors,
    huggingface_shapes,
    random_tensors,
    write_file,
    write_folder,
)
from gguf import MODEL_ARCH, get_tensor_name_map
from helpers.refusals import assert_tells, refuses

from llorch.files import Weights, open_weights
from llorch.files.convert import convert
from llorch.files.matrix import Matrix
from llorch.files.tensor_names import interleave, inventory, undo_interleave
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.numerics import EXACT, GGML, Numerics
from llorch.runtime.builtin import builtin_path


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_folder_and_of_the_gguf_package(tmp_path: Path, family: str):
    tensors = random_tensors(family)
    weights = open_weights(write_folder(tmp_path, tensors, family))
    assert weights.config.family == family
    assert len(weights) == len(tensors)
    assert np.array_equal(weights["embed_tokens"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(weights["layers.1.k_proj"], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert np.array_equal(weights["layers.0.down_proj"], tensors["model.layers.0.mlp.down_proj.weight"])
    assert {w.huggingface: w.shape for w in inventory(weights.config).values()} == huggingface_shapes(family)
    theirs = get_tensor_name_map(MODEL_ARCH[family.upper()], 2)
    for weight in inventory(weights.config).values():
        assert weight.gguf == theirs.get_name(weight.huggingface, try_suffixes=(".weight", ".bias"))


def test_layer_collects_the_weights_of_one_layer_by_short_name(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("qwen3"), "qwen3"))
    layer = weights.layer(1)
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layer.keys() == projections | {"attn_norm", "ffn_norm", "q_norm", "k_norm"}
    assert layer["q_norm"] is weights["layers.1.q_norm"]
    for wrong in (-1, 2):
        with refuses(IndexError, "from 0 to 1", where="layer", got=wrong):
            weights.layer(wrong)


def test_an_unknown_name_is_a_key_error_as_in_any_mapping(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("llama")))
    assert "layers.0.q_bias" not in weights
    assert weights.get("layers.2.q_proj") is None


def test_float32_weights_are_views_and_loaded_once(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("llama")))
    values = weights["embed_tokens"]
    assert not values.flags.owndata
    assert not values.flags.writeable
    assert weights["embed_tokens"] is values


def test_astype_widens_on_access_and_shares_what_was_loaded(tmp_path: Path):
    weights = open_weights(write_folder(tmp_path, random_tensors("llama")))
    wide = weights.astype(np.float64)
    assert wide["layers.0.q_proj"].dtype == np.float64
    assert np.array_equal(wide["layers.0.q_proj"], weights["layers.0.q_proj"])
    assert wide.layer(0)["attn_norm"].dtype == np.float64
    assert wide.config is weights.config
    assert wide.astype(np.float32)["final_norm"] is weights["final_norm"]


def test_opening_reads_no_tensor(tmp_path: Path):
    tensors = random_tensors("llama")
    for values in tensors.values():
        values.fill(np.nan)
    weights = open_weights(write_folder(tmp_path, tensors))  # the NaN is found on first access only
    assert len(weights) == 21


@pytest.mark.parametrize("repeated", [False, True])
def test_a_tied_folder_may_repeat_the_embedding_as_output_matrix(tmp_path: Path, repeated: bool):
    tensors = random_tensors("llama")
    del tensors["lm_head.weight"]
    again = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()} if repeated else {}
    weights = open_weights(write_folder(tmp_path, tensors | again, tie_word_embeddings=True))
    assert "lm_head" not in weights
    assert np.array_equal(weights["embed_tokens"], tensors["model.embed_tokens.weight"])


def test_the_rotary_buffers_of_old_folders_are_ignored(tmp_path: Path):
    tensors = random_tensors("llama") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert len(open_weights(write_folder(tmp_path, tensors))) == len(tensors) - 1


def with_an_index_that_does_not_list(folder: Path, name: str) -> Path:
    """Turn the file of a folder into a shard that also has a tensor which the index leaves out."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    safetensors.numpy.save_file(tensors | {name: np.ones(4, np.float32)}, folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("model", "name"),
    [("micro-llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("micro-qwen3.5", "mtp.fc.weight")],
)
def test_an_ignored_tensor_that_the_index_does_not_list_is_noted(
    model: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    convert(builtin_path(model), tmp_path / model)
    n_weights = len(open_weights(tmp_path / model))
    caplog.clear()
    assert len(open_weights(with_an_index_that_does_not_list(tmp_path / model, name))) == n_weights
    (message,) = caplog.messages
    assert_tells(message, "model.safetensors.index.json", name, "1 tensors")


def test_a_weight_that_the_index_does_not_list_is_refused(tmp_path: Path):
    folder = with_an_index_that_does_not_list(write_folder(tmp_path, random_tensors("llama")), "mtp.fc.weight")
    with refuses("Unexpected", "1 tensors", "mtp.fc.weight", where="model.safetensors.index.json"):
        open_weights(folder)


def test_custom_code_is_ignored_with_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_folder(tmp_path, random_tensors("llama"), auto_map={"AutoModel": "evil.Model"})
    assert len(open_weights(folder)) == 21
    (record,) = caplog.records
    assert_tells(record.message, folder, "config.json", "code (auto_map)")


def test_the_row_order_of_one_head_worked_by_hand():
    huggingface = np.arange(6)  # half is 3: pairs (0, 3), (1, 4), (2, 5)
    assert interleave(huggingface, 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert undo_interleave(np.array([0, 3, 1, 4, 2, 5]), 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_row_order_is_per_head_and_keeps_columns():
    rows = np.arange(2 * 4 * 3).reshape(8, 3)  # two heads of four
    assert interleave(rows, 2)[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    assert np.array_equal(undo_interleave(interleave(rows, 2), 2), rows)


def test_a_llama_file_has_its_q_and_k_rows_reordered_and_nothing_else(tmp_path: Path):
    tensors = gguf_tensors()
    tensors |= {f"blk.{layer}.attn_{part}.bias": np.arange(16, dtype=np.float32) for layer in (0, 1) for part in "kv"}
    tensors |= {f"blk.{layer}.attn_q.bias": np.arange(32, dtype=np.float32) for layer in (0, 1)}
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    order_of_one_head = [0, 2, 4, 6, 1, 3, 5, 7]
    q_order = [8 * head + row for head in range(HEADS) for row in order_of_one_head]
    k_order = q_order[: KV_HEADS * HEAD_DIM]
    assert np.array_equal(weights["layers.1.q_proj"], tensors["blk.1.attn_q.weight"][q_order])
    assert np.array_equal(weights["layers.1.k_proj"], tensors["blk.1.attn_k.weight"][k_order])
    assert weights["layers.0.q_bias"].tolist() == q_order
    assert weights["layers.0.k_bias"].tolist() == k_order
    assert weights["layers.0.v_bias"].tolist() == list(range(16))
    assert np.array_equal(weights["layers.0.v_proj"], tensors["blk.0.attn_v.weight"])


def test_a_qwen_file_keeps_its_rows(tmp_path: Path):
    tensors = gguf_tensors()
    for layer in (0, 1):
        tensors |= {f"blk.{layer}.attn_{part}.bias": np.ones(32 if part == "q" else 16, np.float32) for part in "qkv"}
    metadata = {key.replace("llama.", "qwen2."): value for key, value in GGUF_METADATA.items()}
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, metadata, "qwen2"))
    assert np.array_equal(weights["layers.1.q_proj"], tensors["blk.1.attn_q.weight"])


def test_a_file_without_output_matrix_is_tied(tmp_path: Path):
    tensors = gguf_tensors()
    assert not open_weights(write_file(tmp_path / "untied.gguf", tensors, GGUF_METADATA)).config.tie_word_embeddings
    del tensors["output.weight"]
    weights = open_weights(write_file(tmp_path / "tied.gguf", tensors, GGUF_METADATA))
    assert weights.config.tie_word_embeddings
    assert "lm_head" not in weights


def test_rope_factors_become_part_of_the_configuration(tmp_path: Path):
    tensors = gguf_tensors() | {"rope_freqs.weight": np.array([1, 1.5, 2, 8], np.float32)}
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert weights.config.rope_scaling is not None
    assert "rope_freqs" not in weights


MATRIX = "layers.1.q_proj"  # with rows in pairs in the file
IDS = np.array([3, 90, 3])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("Q8_0", tmp_path_factory.mktemp("model"))


@pytest.fixture
def weights(path: Path) -> Weights:
    return open_weights(path)


def folder_of(dtype: type, tmp_path: Path) -> Weights:
    tensors = {name: array.astype(dtype) for name, array in random_tensors("llama").items()}
    return open_weights(write_folder(tmp_path, tensors))


def test_a_variant_keeps_what_is_not_named(weights: Weights):
    both = weights.using(GGML, packed=True)
    assert both.using(EXACT).packed
    assert both.using(packed=False).numerics == GGML
    assert (both.using().numerics, both.using().packed) == (GGML, True)
    assert (weights.numerics, weights.packed) == (EXACT, False)


def test_a_matrix_is_made_once_and_anew_for_another_variant(weights: Weights):
    rounding = weights.using(GGML)
    first = rounding[MATRIX]
    assert rounding[MATRIX] is first
    assert first.activations == "Q8_0"
    assert rounding.using(EXACT, packed=True)[MATRIX].activations == "F32"
    assert isinstance(rounding.using(EXACT)[MATRIX], np.ndarray)
    assert rounding["embed_tokens"].rows(IDS).dtype == np.float32
    assert rounding.astype(np.float64)["embed_tokens"].rows(IDS).dtype == np.float64


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_an_array_is_the_same_in_every_variant_and_has_its_dtype(weights: Weights, packed: bool):
    variant = weights.using(GGML, packed=packed)
    for name in (MATRIX, "embed_tokens", "final_norm"):
        np.testing.assert_array_equal(variant.array(name), weights[name], strict=True)
        for _ in range(2):
            wide = variant.astype(np.float64).array(name)
            np.testing.assert_array_equal(wide, weights[name].astype(np.float64), strict=True)
    np.testing.assert_array_equal(variant[MATRIX].dequantize(), weights[MATRIX], strict=True)


def test_decoded_weights_are_shared_by_all_variants(weights: Weights):
    array = weights.using(GGML).array(MATRIX)
    assert weights.array(MATRIX) is array
    assert weights.using(GGML)[MATRIX].dequantize() is array
    assert weights.using(GGML).astype(np.float64)[MATRIX].dequantize() is array


def test_a_packed_matrix_is_decoded_anew_and_all_else_is_kept(weights: Weights):
    packed = weights.using(packed=True)
    assert packed[MATRIX].dequantize() is not packed[MATRIX].dequantize()
    assert packed.array(MATRIX) is not packed.array(MATRIX)
    assert packed["final_norm"] is packed["final_norm"]


@pytest.mark.parametrize(("dtype", "numerics"), [(np.float32, GGML), (np.float32, EXACT), (np.float64, EXACT)])
def test_matrices_of_float32_and_float64_are_never_packed(tmp_path: Path, dtype: type, numerics: Numerics):
    variant = folder_of(dtype, tmp_path).using(numerics, packed=True)
    assert variant.packed
    assert all(isinstance(array, np.ndarray) for array in variant.values())


def test_vectors_of_float16_are_arrays_whatever_the_variant(tmp_path: Path):
    variant = folder_of(np.float16, tmp_path).using(GGML, packed=True)
    assert {len(variant.shape(name)): type(variant[name]) for name in variant} == {1: np.ndarray, 2: Matrix}


def tied(tmp_path: Path, embedding: np.ndarray, output: np.ndarray) -> Weights:
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    return open_weights(write_folder(tmp_path, random_tensors("llama") | both, tie_word_embeddings=True))


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_a_tied_matrix_that_differs_is_found_in_every_variant(tmp_path: Path, packed: bool):
    embedding = random_tensors("llama")["model.embed_tokens.weight"].astype(np.float16)
    other = embedding.copy()
    other[-1, -1] += 1
    tied(tmp_path, embedding, embedding.copy()).using(GGML, packed=packed)["embed_tokens"]
    facts = ("lm_head.weight", "config.json", "tie_word_embeddings to false")
    with refuses("Inconsistent", *facts, expected="model.embed_tokens.weight"):
        tied(tmp_path, embedding, other).using(GGML, packed=packed)["embed_tokens"]


def test_the_remedy_for_a_tied_matrix_that_differs_opens_the_folder(tmp_path: Path):
    embedding = random_tensors("llama")["model.embed_tokens.weight"]
    folder = tied(tmp_path, embedding, embedding + 1).path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert np.array_equal(open_weights(folder)["lm_head"], embedding + 1)


def test_a_missing_output_matrix_is_refused_with_the_setting_that_needs_none(tmp_path: Path):
    tensors = random_tensors("llama")
    del tensors["lm_head.weight"]
    with refuses("Missing", "lm_head.weight", "config.json", "tie_word_embeddings to true"):
        open_weights(write_folder(tmp_path, tensors, tie_word_embeddings=False))


def test_tied_tensors_are_compared_as_numbers_and_not_as_bytes(tmp_path: Path):
    half = random_tensors("llama")["model.embed_tokens.weight"].astype(np.float16)
    assert np.array_equal(tied(tmp_path, half, half.astype(np.float32))["embed_tokens"], half)
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | {"lm_head.weight": half}, file)
    content = file.read_bytes()
    start = content.index(b'"lm_head.weight"')
    # The same bytes, said to be bfloat16: one more letter, one space less of padding.
    header = content[start:].replace(b'"F16"', b'"BF16"', 1)
    size = int.from_bytes(content[:8], "little")
    assert content[size + 7 : size + 8] == b" ", "the header has room"
    file.write_bytes(content[:start] + header[: 8 + size - start] + content[8 + size :])
    with refuses("Inconsistent", "lm_head.weight", expected="model.embed_tokens.weight"):
        open_weights(tmp_path)["embed_tokens"]


def test_a_vector_that_llama_cpp_would_abort_at_has_no_ggml_numerics(tmp_path: Path):
    tensors = gguf_tensors()
    tensors["blk.1.ffn_norm.weight"] = tensors["blk.1.ffn_norm.weight"].astype(np.float16)
    weights = open_weights(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    with refuses("Unsupported", "blk.1.ffn_norm.weight", "type F16", "in F32"):
        weights.using(GGML)
    assert weights.using(packed=True).array("layers.1.ffn_norm").dtype == np.float32


@pytest.mark.parametrize("keep", [True, False])
def test_a_widened_array_is_made_once_where_it_is_kept(keep: bool):
    wide = open_weights(builtin_path("micro-qwen2")).astype(np.float64, keep=keep)
    assert (wide["layers.0.q_proj"] is wide["layers.0.q_proj"]) == keep

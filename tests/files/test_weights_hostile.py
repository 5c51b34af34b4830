"""Tables 2b and 2d of the reliability page, as far as weights go; hyperparameters alone are in `test_config*`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, HIDDEN, gguf_tensors, random_tensors, write_file, write_folder
from helpers.refusals import assert_tells, refuses

from llorch.files import open_weights
from llorch.runtime.errors import FormatError

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], object]


def poke(name: str, number: float) -> Change:
    return lambda tensors: np.put(tensors[name], 3, number)


def replaced(name: str, values: np.ndarray) -> Change:
    return lambda tensors: tensors.update({name: values})


def nothing(tensors: Tensors) -> None:
    pass


def read_all(path: Path) -> None:
    weights = open_weights(path)
    for name in weights:
        weights[name]


def refusal(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    return caught.value


GGUF_METADATA_ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "block_count 0": ("OutOfRange", {"llama.block_count": 0}),
    "block_count 3 with 2 layers": ("Missing", {"llama.block_count": 3}),
    "block_count 1 with 2 layers": ("Unexpected", {"llama.block_count": 1}),
    "heads 3": ("OutOfRange", {"llama.attention.head_count": 3}),
    "kv heads 3": ("OutOfRange", {"llama.attention.head_count_kv": 3}),
    "rms eps 0": ("OutOfRange", {"llama.attention.layer_norm_rms_epsilon": 0.0}),
    "41 tokens for 40 rows": ("Inconsistent", {"tokenizer.ggml.tokens": [f"t{index}" for index in range(41)]}),
}


@pytest.mark.parametrize("name", GGUF_METADATA_ROWS)
def test_bad_hyperparameters_of_a_file_are_refused_by_code(tmp_path: Path, name: str):
    code, changes = GGUF_METADATA_ROWS[name]
    path = write_file(tmp_path / "m.gguf", gguf_tensors(), GGUF_METADATA | changes)
    error = refusal(path)
    assert error.code == code
    assert str(path) in str(error)


GGUF_TENSOR_ROWS: dict[str, tuple[Any, ...]] = {
    "missing": ("Missing", lambda tensors: tensors.pop("blk.0.attn_q.weight"), "1 Missing: blk.0.attn_q.weight"),
    "no embedding": ("Missing", lambda tensors: tensors.pop("token_embd.weight"), "token_embd.weight, got none"),
    "extra": ("Unexpected", replaced("blk.0.extra.weight", np.ones(3, np.float32)), "1 Unexpected: blk.0.extra.weight"),
    "bias in one layer only": (
        "Unexpected",
        replaced("blk.1.attn_q.bias", np.ones(32, np.float32)),
        "1 Unexpected: blk.1.attn_q.bias",
    ),
    "transposed": (
        "Shape",
        replaced("blk.1.ffn_up.weight", np.ones((HIDDEN, 56), np.float32)),
        "blk.1.ffn_up.weight expected (56, 32) got (32, 56)",
    ),
    "wrong shape": ("Shape", replaced("output_norm.weight", np.ones(31, np.float32)), "expected (32,) got (31,)"),
    "integers": ("DType", replaced("output_norm.weight", np.ones(32, np.int32)), "output_norm.weight", "integers"),
    "weights NaN": ("NonFinite", poke("blk.1.attn_q.weight", np.nan), "blk.1.attn_q.weight", "nan at (0, 3)"),
    "norm Inf": ("NonFinite", poke("output_norm.weight", np.inf), "output_norm.weight", "inf at (3,)"),
    "norm -Inf": ("NonFinite", poke("output_norm.weight", -np.inf), "output_norm.weight", "-inf at (3,)"),
    "rope factor 0": (
        "OutOfRange",
        replaced("rope_freqs.weight", np.array([1, 1, 0, 1], np.float32)),
        "rope_freqs.weight",
    ),
    "3 rope factors": ("OutOfRange", replaced("rope_freqs.weight", np.ones(3, np.float32)), "rope_freqs.weight"),
}


@pytest.mark.parametrize("name", GGUF_TENSOR_ROWS)
def test_bad_tensors_of_a_file_are_refused_by_code(tmp_path: Path, name: str):
    code, change, *facts = GGUF_TENSOR_ROWS[name]
    tensors = gguf_tensors()
    change(tensors)
    error = refusal(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert error.code == code
    assert_tells(str(error), *facts)


def test_all_faults_are_listed_at_once(tmp_path: Path):
    tensors = gguf_tensors()
    del tensors["blk.0.attn_q.weight"], tensors["blk.1.ffn_norm.weight"]
    tensors |= {"extra.weight": np.ones(1, np.float32), "output_norm.weight": np.ones(31, np.float32)}
    error = refusal(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert error.code == "Missing"
    assert_tells(str(error), "21 tensors", "llama", where="weights")
    assert str(error).endswith(
        "got 2 Missing: blk.0.attn_q.weight, blk.1.ffn_norm.weight; 1 Unexpected: extra.weight; "
        "1 Shape: output_norm.weight expected (32,) got (31,)"
    )


def test_first_names_of_many_faults_are_shown_with_a_count(tmp_path: Path):
    tensors = gguf_tensors() | {f"extra.{i}.weight": np.ones(1, np.float32) for i in range(9)}
    error = refusal(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert str(error).endswith("9 Unexpected: " + ", ".join(f"extra.{i}.weight" for i in range(3)) + " and 6 more")


FOLDER_ROWS: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "tensor missing": ("Missing", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), {}),
    "config has 3 layers, file 2": ("Missing", nothing, {"num_hidden_layers": 3}),
    "config has 1 layer, file 2": ("Unexpected", nothing, {"num_hidden_layers": 1}),
    "extra tensor": ("Unexpected", replaced("model.extra.weight", np.ones(1, np.float32)), {}),
    "I32 norm weight": ("DType", replaced("model.norm.weight", np.ones(32, np.int32)), {}),
    "NaN weight": ("NonFinite", poke("model.layers.0.self_attn.q_proj.weight", np.nan), {}),
    "shape wrong": ("Shape", nothing, {"intermediate_size": 57}),
    "untied without output matrix": ("Missing", lambda tensors: tensors.pop("lm_head.weight"), {}),
    "tied with another output matrix": ("Inconsistent", nothing, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", FOLDER_ROWS)
def test_a_bad_folder_is_refused_by_code(tmp_path: Path, name: str):
    code, change, changes = FOLDER_ROWS[name]
    tensors = random_tensors("llama")
    change(tensors)
    error = refusal(write_folder(tmp_path, tensors, **changes))
    assert error.code == code
    assert str(tmp_path) in str(error)


CONFIG_ROWS: dict[str, tuple[str, Callable[[str], bytes]]] = {
    "not JSON": ("Malformed", lambda text: text[:-1].encode()),
    "NaN": ("Malformed", lambda text: text.replace("1e-05", "NaN").encode()),
    "duplicate key": ("Malformed", lambda text: text.replace("{", '{"hidden_size": 48, ', 1).encode()),
    "a list": ("Malformed", lambda text: b"[]"),
    "over 1 MiB": ("TooLarge", lambda text: text.encode().ljust((1 << 20) + 1)),
}


@pytest.mark.parametrize("name", CONFIG_ROWS)
def test_a_bad_config_json_is_refused_by_code(tmp_path: Path, name: str):
    code, damage = CONFIG_ROWS[name]
    path = write_folder(tmp_path, random_tensors("llama")) / "config.json"
    path.write_bytes(damage(path.read_text()))
    assert refusal(tmp_path).code == code


@pytest.mark.parametrize(
    ("name", "code"), [(".", "Missing"), ("x.bin", "Unsafe"), ("x.pth", "Unsafe"), ("x.safetensors", "Unsupported")]
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, name: str, code: str):
    if name != ".":
        (tmp_path / name).write_bytes(b"PK\3\4")
    assert refusal(tmp_path / name).code == code


def test_a_folder_with_a_pickle_only_is_unsafe(tmp_path: Path):
    write_folder(tmp_path, {}).joinpath("model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path).code == "Unsafe"


def test_a_path_with_nothing_there_is_file_not_found(tmp_path: Path):
    with refuses(FileNotFoundError, where=tmp_path / "nothing.gguf"):
        open_weights(tmp_path / "nothing.gguf")


def test_weights_cut_while_open_are_an_error_not_a_dead_process(tmp_path: Path):
    folder = write_folder(tmp_path, random_tensors("llama"))
    weights = open_weights(folder)
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", 4096)
    with refuses("Truncated", size, 4096, where=folder / "model.safetensors"):
        weights["lm_head"]


@pytest.mark.parametrize("place", [262_144, 300_000, 524_287])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found_far_behind_the_start(tmp_path: Path, place: int, wrong: float):
    tensors = random_tensors("llama")
    wide = {f"model.layers.{i}.mlp.{part}_proj.weight": (16384, HIDDEN) for i in range(2) for part in ("gate", "up")}
    wide |= {f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, 16384) for i in range(2)}
    tensors |= {name: np.resize(np.array([1, -2, 3], np.float32), shape) for name, shape in wide.items()}
    tensors["model.layers.1.mlp.up_proj.weight"].reshape(-1)[place] = wrong
    write_folder(tmp_path, tensors, intermediate_size=16384)
    with refuses("NonFinite", f"has {wrong}", f"at {divmod(place, HIDDEN)}", where="model.layers.1.mlp.up_proj.weight"):
        read_all(tmp_path)


def test_an_index_that_leads_out_of_the_folder_is_unsafe(tmp_path: Path):
    folder = write_folder(tmp_path / "model", random_tensors("llama"))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(random_tensors("llama"), "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(folder).code == "Unsafe"

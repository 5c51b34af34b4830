"""Tables 2b and 2d of the reliability page, as far as weights go; hyperparameters alone are in `test_config*`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, HIDDEN, gguf_tensors, random_tensors, write_file, write_folder
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.runtime.errors import FormatError

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], object]
Write = Callable[[Path], Path]


def poke(name: str, number: float) -> Change:
    return lambda tensors: np.put(tensors[name], 3, number)


def replaced(name: str, values: np.ndarray) -> Change:
    return lambda tensors: tensors.update({name: values})


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def nothing(tensors: Tensors) -> None:
    pass


def read_all(path: Path) -> None:
    weights = open_weights(path)
    for name in weights:
        weights[name]


def file(change: Change = nothing, **hyperparameters: object) -> Write:
    changes: dict[str, object] = {f"llama.{key.replace('__', '.')}": value for key, value in hyperparameters.items()}

    def write(folder: Path) -> Path:
        change(tensors := gguf_tensors())
        return write_file(folder / "m.gguf", tensors, GGUF_METADATA | changes)

    return write


def folder(change: Change = nothing, **settings: Any) -> Write:
    def write(folder: Path) -> Path:
        change(tensors := random_tensors("llama"))
        return write_folder(folder, tensors, **settings)

    return write


def config(damage: Callable[[str], bytes]) -> Write:
    def write(folder: Path) -> Path:
        path = write_folder(folder, random_tensors("llama")) / "config.json"
        path.write_bytes(damage(path.read_text()))
        return folder

    return write


def archive(name: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(b"PK\3\4")
        return folder / name

    return write


def with_41_tokens(folder: Path) -> Path:
    tokens = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(41)]}
    return write_file(folder / "m.gguf", gguf_tensors(), GGUF_METADATA | tokens)


def with_a_pickle_only(folder: Path) -> Path:
    write_folder(folder, {}).joinpath("model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def with_an_index_that_leads_out(folder: Path) -> Path:
    model = write_folder(folder / "model", random_tensors("llama"))
    (model / "model.safetensors").rename(folder / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(random_tensors("llama"), "../outside.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


ONES = np.ones(32, np.float32)
REFUSED: dict[str, tuple[Any, ...]] = {  # code, what writes the model, and facts
    "block_count 0": ("OutOfRange", file(block_count=0)),
    "block_count 3 with 2 layers": ("Missing", file(block_count=3)),
    "block_count 1 with 2 layers": ("Unexpected", file(block_count=1)),
    "heads 3": ("OutOfRange", file(attention__head_count=3)),
    "kv heads 3": ("OutOfRange", file(attention__head_count_kv=3)),
    "rms eps 0": ("OutOfRange", file(attention__layer_norm_rms_epsilon=0.0)),
    "41 tokens for 40 rows": ("Inconsistent", with_41_tokens),
    "missing": ("Missing", file(without("blk.0.attn_q.weight")), "1 Missing: blk.0.attn_q.weight"),
    "no embedding": ("Missing", file(without("token_embd.weight")), "token_embd.weight, got none"),
    "extra": ("Unexpected", file(replaced("blk.0.extra.weight", ONES[:3])), "1 Unexpected: blk.0.extra.weight"),
    "bias in one layer only": ("Unexpected", file(replaced("blk.1.attn_q.bias", ONES)),
                               "1 Unexpected: blk.1.attn_q.bias"),
    "transposed": ("Shape", file(replaced("blk.1.ffn_up.weight", np.ones((HIDDEN, 56), np.float32))),
                   "blk.1.ffn_up.weight expected (56, 32) got (32, 56)"),
    "wrong shape": ("Shape", file(replaced("output_norm.weight", ONES[:31])), "expected (32,) got (31,)"),
    "integers": ("DType", file(replaced("output_norm.weight", ONES.astype(np.int32))), "output_norm.weight",
                 "integers"),
    "weights NaN": ("NonFinite", file(poke("blk.1.attn_q.weight", np.nan)), "blk.1.attn_q.weight", "nan at (0, 3)"),
    "norm Inf": ("NonFinite", file(poke("output_norm.weight", np.inf)), "output_norm.weight", "inf at (3,)"),
    "norm -Inf": ("NonFinite", file(poke("output_norm.weight", -np.inf)), "output_norm.weight", "-inf at (3,)"),
    "rope factor 0": ("OutOfRange", file(replaced("rope_freqs.weight", np.array([1, 1, 0, 1], np.float32))),
                      "rope_freqs.weight"),
    "3 rope factors": ("OutOfRange", file(replaced("rope_freqs.weight", ONES[:3])), "rope_freqs.weight"),
    "tensor missing": ("Missing", folder(without("model.layers.1.mlp.up_proj.weight"))),
    "config has 3 layers, file 2": ("Missing", folder(num_hidden_layers=3)),
    "config has 1 layer, file 2": ("Unexpected", folder(num_hidden_layers=1)),
    "extra tensor": ("Unexpected", folder(replaced("model.extra.weight", ONES[:1]))),
    "I32 norm weight": ("DType", folder(replaced("model.norm.weight", ONES.astype(np.int32)))),
    "NaN weight": ("NonFinite", folder(poke("model.layers.0.self_attn.q_proj.weight", np.nan))),
    "shape wrong": ("Shape", folder(intermediate_size=57)),
    "untied without output matrix": ("Missing", folder(without("lm_head.weight"))),
    "tied with another output matrix": ("Inconsistent", folder(tie_word_embeddings=True)),
    "not JSON": ("Malformed", config(lambda text: text[:-1].encode())),
    "NaN in JSON": ("Malformed", config(lambda text: text.replace("1e-05", "NaN").encode())),
    "duplicate key": ("Malformed", config(lambda text: text.replace("{", '{"hidden_size": 48, ', 1).encode())),
    "a list": ("Malformed", config(lambda text: b"[]")),
    "over 1 MiB": ("TooLarge", config(lambda text: text.encode().ljust((1 << 20) + 1))),
    "an empty folder": ("Missing", lambda folder: folder),
    "x.bin": ("Unsafe", archive("x.bin")),
    "x.pth": ("Unsafe", archive("x.pth")),
    "x.safetensors": ("Unsupported", archive("x.safetensors")),
    "a pickle only": ("Unsafe", with_a_pickle_only),
    "an index that leads out of the folder": ("Unsafe", with_an_index_that_leads_out),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_model_is_refused_by_code(tmp_path: Path, name: str):
    code, write, *facts = REFUSED[name]
    with refuses(code, *facts, where=tmp_path) as caught:
        read_all(write(tmp_path))
    assert "\n" not in str(caught.value)


def test_all_faults_are_listed_at_once(tmp_path: Path):
    tensors = gguf_tensors()
    del tensors["blk.0.attn_q.weight"], tensors["blk.1.ffn_norm.weight"]
    tensors |= {"extra.weight": np.ones(1, np.float32), "output_norm.weight": np.ones(31, np.float32)}
    with refuses("Missing", "21 tensors", "llama", where="weights") as caught:
        read_all(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))
    assert str(caught.value).endswith(
        "got 2 Missing: blk.0.attn_q.weight, blk.1.ffn_norm.weight; 1 Unexpected: extra.weight; "
        "1 Shape: output_norm.weight expected (32,) got (31,)"
    )


def test_first_names_of_many_faults_are_shown_with_a_count(tmp_path: Path):
    tensors = gguf_tensors() | {f"extra.{i}.weight": np.ones(1, np.float32) for i in range(9)}
    shown = ", ".join(f"extra.{i}.weight" for i in range(3))
    with pytest.raises(FormatError, match=f"9 Unexpected: {shown} and 6 more$"):
        read_all(write_file(tmp_path / "m.gguf", tensors, GGUF_METADATA))


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

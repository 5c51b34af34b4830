"""Files of the right length whose bytes did not all come: which are refused, which are named, which may be so."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from builders.quantised_folders import FOLDERS, NAMES, tensors_of, written
from builders.random_adapters import fresh, random_adapter
from builders.tiny_models import (
    GGUF_METADATA,
    HIDDEN,
    INTER,
    VOCAB,
    gguf_tensors,
    random_tensors,
    with_biases,
    write_file,
    write_folder,
)
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells, refuses

from llorch.files import SafetensorsFile, Weights, open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import write_gguf
from llorch.files.mapped import Entry
from llorch.files.quant import GGMLType
from llorch.judging.expectations import quantised_models
from llorch.lora.base import identity_of
from llorch.lora.peft_format import read_peft, write_peft
from llorch.runtime.builtin import builtin_path

N_CUTS = 40
MAY_BE_ZERO = (  # ends of names of tensors: rows of some tokens, and what no product needs
    "biases", "qzeros", "g_idx", "zero_point", "lm_head.weight", "embed_tokens.weight", "output.weight",
)  # fmt: skip
NEEDED = ("weight", "scales", "weight_scale")


def write_shards(folder: Path) -> Path:
    """A folder in two files, the second of which begins in the middle of the first layer."""
    tensors = random_tensors("llama")
    write_folder(folder, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:8], "model-00002-of-00002.safetensors": names[8:]}
    for shard, names in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_type(kind: GGMLType, folder: Path) -> Path:
    folder.mkdir()
    source = write_file(folder / "source.gguf", gguf_tensors(), GGUF_METADATA)
    write_gguf(open_weights(source), folder / "model.gguf", ggml_type=kind)
    return folder / "model.gguf"


def write_blocks(kind: str, folder: Path) -> Path:
    folder.mkdir()
    return quantised_models.write_model(kind, folder)


def copy_folder(name: str, folder: Path) -> Path:
    return written(folder, json.loads((FOLDERS / name / "config.json").read_text()), tensors_of(FOLDERS / name))


MODELS: dict[str, Callable[[Path], Path]] = {
    "F32": partial(write_type, GGMLType.F32),
    **{kind: partial(write_blocks, kind) for kind in quantised_models.MODELS},
    "folder": lambda folder: write_folder(folder, random_tensors("llama")),
    "shards": write_shards,
    **{name: partial(copy_folder, name) for name in NAMES},
}
CHEAP = ("F32", "Q8_0", "Q6_K", "folder", "shards", "gptq-4bit", "fp8-tensor-static", "mlx-4bit", "bnb-nf4")


def damage(path: Path, start: int, stop: int | None = None) -> None:
    """Write zeros into a file, which keeps its length."""
    data = bytearray(path.read_bytes())
    stop = len(data) if stop is None else stop
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


def read_all(path: Path) -> Weights:
    weights = open_weights(path)
    for name in weights:
        weights.array(name)
    return weights


def row_bytes(entry: Entry) -> int:
    return max(32, entry.n_bytes // int(np.prod(entry.shape[:-1])))


@pytest.mark.slow_cases(but=CHEAP)
@pytest.mark.parametrize("model", MODELS)
def test_file_cut_at_any_byte_is_refused_with_the_tensor_of_the_cut(model: str, tmp_path: Path):
    path = MODELS[model](tmp_path / "model")
    source = open_weights(path).source
    entries = source.entries_by_file()[-1]
    file = source.file_of(entries[0].name)
    whole, last = file.read_bytes(), [entry for entry in entries if entry.name.endswith(NEEDED)][-1]
    stop = last.offset + last.n_bytes - row_bytes(last)
    random = np.random.default_rng(3).integers(entries[0].offset, stop, N_CUTS).tolist()
    for cut in {*random, *(entry.offset for entry in entries if entry.offset <= stop)}:
        file.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        with refuses("Truncated", where=file) as caught:
            open_weights(path)
        touched = [entry for entry in entries if entry.offset + entry.n_bytes > cut]
        named = next(entry for entry in touched if f" {entry.name}: " in str(caught.value))
        for entry in touched[: touched.index(named)]:
            is_needed = len(entry.shape) > 1 or entry.name.endswith("norm.weight")
            is_zero = entry.offset + entry.n_bytes - cut >= row_bytes(entry)
            assert not (is_needed and is_zero) or entry.name.endswith(MAY_BE_ZERO), (cut, entry.name, named.name)


def test_vocabulary_decides_which_rows_of_an_output_matrix_at_the_end_may_be_zero(tmp_path: Path):
    tensors = gguf_tensors()
    tensors["output.weight"] = tensors.pop("output.weight")  # the last tensor of the file
    for n_zero, types, is_refused in [
        (2, None, False), (3, None, True), (9, [1] * 31 + [5] * 9, False), (10, [1] * 31 + [5] * 9, True),
        (9, [1] * 31 + [3] * 9, False), (1, [1] * 40, True),
    ]:  # fmt: skip
        tokens = {"tokenizer.ggml.tokens": [str(i) for i in range(VOCAB)], "tokenizer.ggml.token_type": types}
        path = write_file(tmp_path / "model.gguf", tensors, GGUF_METADATA | (tokens if types else {}))
        damage(path, path.stat().st_size - n_zero * 4 * HIDDEN)
        if is_refused:
            with refuses("Truncated", "output.weight", VOCAB - n_zero, where=path):
                open_weights(path)
        else:
            read_all(path)


def test_tokenizer_of_a_folder_decides_which_rows_of_its_embedding_may_be_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tensors = random_tensors("llama")
    tensors["model.embed_tokens.weight"][30:] = 0
    vocabulary = {str(i): i for i in range(32)}
    for n_added in (2, 1):
        folder = write_folder(tmp_path / str(n_added), tensors)
        added = [{"id": 31 - i} for i in range(n_added)]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
        read_all(folder)
        assert len(caplog.records) == (0 if n_added == 2 else 1)
    assert_tells(caplog.records[0].getMessage(), "model.embed_tokens.weight", 30, where=tmp_path / "1")


def test_lawful_zeros_are_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = with_biases(random_tensors("llama"))
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor[:] = 0
        elif name.endswith("norm.weight"):
            tensor[:] = 1
    for part in ("gate", "up"):  # neurons that pad the layer
        tensors[f"model.layers.1.mlp.{part}_proj.weight"][-6:] = 0
    tensors["model.layers.1.mlp.down_proj.weight"][:, -6:] = 0
    tensors["model.layers.0.self_attn.q_proj.weight"][8:16] = 0  # a head that was pruned
    read_all(write_folder(tmp_path, tensors, attention_bias=True))
    assert not caplog.records


def test_gains_stored_less_one_may_be_zero_in_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    convert(builtin_path("micro-qwen3-next"), tmp_path / "folder")
    with SafetensorsFile(tmp_path / "folder" / "model.safetensors") as file:
        tensors = {name: np.array(file.array(name)) for name in file.tensors}
    for name, tensor in tensors.items():
        if name.endswith(("layernorm.weight", "model.norm.weight", "A_log", "dt_bias")):
            tensor[:] = 0
    safetensors.numpy.save_file(tensors, tmp_path / "folder" / "model.safetensors")
    read_all(tmp_path / "folder")
    assert not caplog.records


def test_columns_that_pad_the_last_matrix_of_a_file_are_no_damage(tmp_path: Path):
    tensors = gguf_tensors()
    tensors["blk.1.ffn_down.weight"] = tensors.pop("blk.1.ffn_down.weight")
    tensors["blk.1.ffn_down.weight"][:, -16:] = 0
    read_all(write_file(tmp_path / "padded.gguf", tensors, GGUF_METADATA))
    tensors["blk.1.ffn_down.weight"][-2, -16:] = 1
    path = write_file(tmp_path / "cut.gguf", tensors, GGUF_METADATA)
    with refuses("Truncated", "blk.1.ffn_down.weight", where=path):
        open_weights(path)


def test_zero_tensor_before_other_numbers_is_named_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = gguf_tensors()
    for name in ("blk.0.attn_output.weight", "blk.1.attn_output.weight"):  # of layers that were added and not trained
        tensors[name][:] = 0
    path = write_file(tmp_path / "model.gguf", tensors, GGUF_METADATA)
    read_all(path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert_tells(record.getMessage(), "blk.0.attn_output.weight", f"all {HIDDEN} rows", where=path)


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_zeros_across_two_tensors_are_refused_when_the_first_or_the_second_is_read(tmp_path: Path, packed: bool):
    path = write_type(GGMLType.F16, tmp_path / "model")
    gate, up = (f"blk.1.ffn_{part}.weight" for part in ("gate", "up"))
    with open_gguf(path) as file:
        start, stop = (file.tensors[name].offset for name in (gate, up))
    whole = path.read_bytes()
    for before in (10, INTER):  # rows
        damage(path, stop - before * 2 * HIDDEN, stop + 3 * 2 * HIDDEN)
        weights = open_weights(path).using(packed=packed)
        with refuses("Truncated", gate, INTER if before == INTER else INTER - before, where=path):
            weights.layer(1)["gate_proj"]
        path.write_bytes(whole)
    assert start < stop


def test_blocks_with_zero_scales_that_were_made_of_a_damaged_file_are_refused(tmp_path: Path):
    path = write_type(GGMLType.Q4_0, tmp_path / "model")
    with open_gguf(path) as file:
        up, down = (file.tensors[f"blk.0.ffn_{part}.weight"] for part in ("up", "down"))
    assert (up.n_bytes, down.ggml_type) == (INTER * 18, GGMLType.F16)  # 56 columns are no blocks
    data = bytearray(path.read_bytes())
    data[up.offset + 20 * 18 : up.offset + up.n_bytes] = (bytes(2) + b"\x88" * 16) * (INTER - 20)  # 8 is code 0
    data[down.offset : down.offset + down.n_bytes] = bytes(down.n_bytes)
    path.write_bytes(data)
    with refuses("Truncated", up.name, "row 20", INTER, where=path):
        read_all(path)


def test_matrix_of_one_number_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = random_tensors("llama")
    tensors["model.layers.0.mlp.up_proj.weight"][:] = 0.5
    read_all(write_folder(tmp_path, tensors))
    (record,) = caplog.records
    assert_tells(record.getMessage(), "model.layers.0.mlp.up_proj.weight", 0.5, where=tmp_path)


def test_expert_without_numbers_is_named_when_it_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    convert(builtin_path("micro-qwen3-moe"), tmp_path / "moe.gguf", ggml_type=GGMLType.F16)
    with open_gguf(tmp_path / "moe.gguf") as file:
        name = next(name for name in file.tensors if name.endswith("ffn_up_exps.weight"))
        entry = file.tensors[name]
    size = entry.n_bytes // entry.shape[0]
    damage(tmp_path / "moe.gguf", entry.offset + size, entry.offset + 2 * size)
    layer = open_weights(tmp_path / "moe.gguf").layer(0)
    _ = layer["experts_up_proj"][0]
    assert not caplog.records
    _ = layer["experts_up_proj"][1]
    (record,) = caplog.records
    assert_tells(record.getMessage(), name, "expert 1", where=tmp_path / "moe.gguf")


def test_adapter_cut_at_any_byte_of_a_lora_A_is_refused_and_a_fresh_one_is_read(tmp_path: Path):
    weights = open_weights(builtin_path("micro-qwen3"))
    adapter = fresh(random_adapter(weights.config, r=4, target_modules=("q_proj", "up_proj")))
    write_peft(adapter, tmp_path, base=identity_of(weights))
    read_peft(tmp_path, weights.config)
    path = tmp_path / "adapter_model.safetensors"
    with SafetensorsFile(path) as file:
        halves = sorted((entry for entry in file.tensors.values() if "lora_A" in entry.name), key=lambda e: e.offset)
    whole = path.read_bytes()
    stop = halves[-1].offset + halves[-1].n_bytes - row_bytes(halves[-1])
    for cut in np.random.default_rng(4).integers(halves[0].offset, stop, N_CUTS).tolist():
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        with refuses("Truncated", where=path):
            read_peft(tmp_path, weights.config)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "folder"])
def test_commands_refuse_a_model_whose_second_half_did_not_come(kind: str, tmp_path: Path):
    model = tmp_path / ("model" if kind == "folder" else "model.gguf")
    convert(builtin_path("micro-qwen3"), model, ggml_type=None if kind == "folder" else GGMLType[kind])
    file = model / "model.safetensors" if kind == "folder" else model
    damage(file, file.stat().st_size // 2)
    with refuses("Truncated") as caught:
        open_weights(model)
    name = str(caught.value).split(": ")[2]
    for verb in (
        ["run", model, "hi", "-n", "1"], ["verify", model], ["convert", model, tmp_path / "copy.gguf"],
        ["run", model, "hi", "-n", "1", "--weights", "packed"], ["quality", model, model, "--text", Path(__file__)],
    ):  # fmt: skip
        assert_cli_refuses(invoke(*map(str, verb)), 2, name, "Truncated", where=file)
    shown = invoke("inspect", str(model))
    assert (shown.exit_code, "sampled" in shown.stdout) == (2, True)
    assert_tells(shown.stderr, name, where=file)


def test_inspect_names_a_zero_tensor_before_other_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_file(tmp_path / "model.gguf", gguf_tensors(), GGUF_METADATA)
    assert json.loads(invoke("inspect", str(path), "--json").stdout)["sampled"] == len(gguf_tensors())
    with open_gguf(path) as file:
        entry = file.tensors["blk.0.attn_k.weight"]
    damage(path, entry.offset + 3 * entry.n_bytes // entry.shape[0], entry.offset + entry.n_bytes)
    invoke("inspect", str(path))
    assert_tells(caplog.records[0].getMessage(), "blk.0.attn_k.weight", "row 3")

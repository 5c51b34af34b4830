"""Settings that change a result, and files of another format than their names say, are refused with the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.tiny_models import random_tensors, write_folder
from builders.whole_folders import write_whole_folder
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, refuses

from llorch.files import open_gguf, open_safetensors, open_weights
from llorch.files.convert import convert
from llorch.files.mapped import MappedFile, read_regular
from llorch.files.strict_json import read_json
from llorch.files.tokenizer import Tokenizer
from llorch.runtime.builtin import builtin_path
from llorch.training.data.read import read_records

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
OPENING, READING, CONVERTING = "opening", "tokenizer", "convert"
REFUSED = (  # file, key, value, and the first of opening, tokenizer and convert that refuses it
    (CONFIG, "vocab_size", "x", OPENING), (CONFIG, "rope_theta", "x", OPENING), (CONFIG, "rms_norm_eps", -1, OPENING),
    (CONFIG, "hidden_act", -1, OPENING), (CONFIG, "attention_bias", "x", OPENING), (CONFIG, "mlp_bias", "x", OPENING),
    (CONFIG, "tie_word_embeddings", "x", OPENING), (CONFIG, "rope_scaling", "x", OPENING),
    (CONFIG, "max_position_embeddings", "x", OPENING), (CONFIG, "quantization_config", "x", OPENING),
    (CONFIG, "bos_token_id", "x", READING), (CONFIG, "bos_token_id", [1, 2], READING),
    (CONFIG, "eos_token_id", "x", READING), (CONFIG, "eos_token_id", -1, READING),
    (GENERATION, "bos_token_id", [1, 2], READING), (GENERATION, "eos_token_id", ["x"], READING),
    (TOKENIZER, "bos_token", -1, READING), (TOKENIZER, "bos_token", {"a": 1}, READING),
    (TOKENIZER, "eos_token", "nowhere", READING), (TOKENIZER, "eos_token", {}, READING),
    (GENERATION, "do_sample", "x", CONVERTING), (GENERATION, "temperature", -1, CONVERTING),
    (GENERATION, "temperature", "x", CONVERTING), (GENERATION, "top_p", -1, CONVERTING),
    (GENERATION, "top_k", 1.5, CONVERTING), (GENERATION, "top_k", 2**70, CONVERTING),
    (GENERATION, "min_p", 2, CONVERTING), (GENERATION, "repetition_penalty", 0, CONVERTING),
)  # fmt: skip
LEFT_ALONE = (  # llorch computes and writes the same with any value
    (CONFIG, "use_cache"), (CONFIG, "architectures"), (CONFIG, "torch_dtype"), (CONFIG, "initializer_range"),
    (CONFIG, "pad_token_id"), (CONFIG, "attention_dropout"), (CONFIG, "pretraining_tp"),
    (GENERATION, "max_length"), (GENERATION, "max_new_tokens"), (GENERATION, "pad_token_id"),
    (TOKENIZER, "model_max_length"), (TOKENIZER, "unk_token"), (TOKENIZER, "legacy"), (TOKENIZER, "tokenizer_class"),
    (TOKENIZER, "clean_up_tokenization_spaces"), (TOKENIZER, "add_prefix_space"),
    (TOKENIZER, "additional_special_tokens"),
)  # fmt: skip
STRANGE = (-1, 2**70, 1.5, "abc", [1, 2], {"a": 1})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_whole_folder(tmp_path / "model", "llama-bpe")


def change(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def steps(folder: Path) -> dict[str, Callable[[], object]]:
    return {
        OPENING: lambda: open_weights(folder),
        READING: lambda: Tokenizer.from_huggingface(folder),
        CONVERTING: lambda: convert(folder, folder.parent / "m.gguf"),
    }


@pytest.mark.parametrize(("file", "key", "value", "refused_by"), REFUSED)
def test_a_setting_that_changes_a_result_is_refused_by_its_key(
    file: str, key: str, value: object, refused_by: str, folder: Path
):
    change(folder / file, key, value)
    for name, step in steps(folder).items():
        if name == refused_by:
            with refuses(ValueError, key, where=file):
                step()
            return
        step()


@pytest.mark.slow_cases(but=[
    "config.json-initializer_range", "config.json-torch_dtype", "generation_config.json-pad_token_id",
    "tokenizer_config.json-addi*",
])  # fmt: skip
@pytest.mark.parametrize(("file", "key"), LEFT_ALONE)
def test_a_setting_that_changes_no_result_is_left_alone(file: str, key: str, folder: Path):
    wanted = convert(folder, folder.parent / "before.gguf").target.read_bytes()
    for value in STRANGE:
        change(folder / file, key, value)
        for step in steps(folder).values():
            step()
        made = folder.parent / "m.gguf"
        assert made.read_bytes() == wanted
        made.unlink()


def test_sampling_of_a_folder_that_does_not_sample_is_left_alone(folder: Path):
    change(folder / GENERATION, "do_sample", False)
    change(folder / GENERATION, "temperature", "abc")
    convert(folder, folder.parent / "m.gguf")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
READERS: dict[str, Callable[[Path], object]] = {
    "safetensors": open_safetensors, "gguf": open_gguf, "json": lambda path: read_json(path, limit=1000),
}  # fmt: skip
OTHERS = {  # content, and the words that name the format and the remedy
    "pointer": (POINTER, ("git-lfs", "git lfs pull")),
    "page": (b"\n<!DOCTYPE html>\n<html>", ("HTML", "login", "<!DOCTYPE html>")),
    "page with a mark": (b"\xef\xbb\xbf<html><head>", ("HTML", "login")),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied', ("XML", "login")),
    "error": (b'{ "error": "Access to model a/b is restricted"}', ("a/b", "server", "login")),
    "message": (b'{"message":"Not Found"}', ("Not Found", "server", "login")),
    "zip": (b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0archive/data.pkl", ("zip", "PyTorch", "safetensors")),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", ("pickle", "safetensors")),
    "gzip": (b"\x1f\x8b\x08\x00\0\0\0\0\0\x03", ("gzip", "unpack")),
    "empty": (b"", ("empty", "download")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("other_format", OTHERS)
def test_a_file_of_another_format_is_named_with_its_remedy(reader: str, other_format: str, tmp_path: Path):
    content, words = OTHERS[other_format]
    path = tmp_path / f"model.{reader}"
    path.write_bytes(content)
    with refuses("BadMagic" if content else "Truncated", *words, where=path):
        READERS[reader](path)


@pytest.mark.parametrize("reader", ["safetensors", "gguf"])
@pytest.mark.parametrize("text", ["Entry not found", "404: not here"])
def test_a_text_in_place_of_a_model_is_quoted(reader: str, text: str, tmp_path: Path):
    path = tmp_path / f"model.{reader}"
    path.write_text(text)
    with refuses("BadMagic", repr(text), "login", where=path):
        READERS[reader](path)


def test_gguf_and_safetensors_files_with_swapped_names_are_known(tmp_path: Path):
    shutil.copy(builtin_path("micro-llama"), tmp_path / "model.safetensors")
    with refuses("BadMagic", ".gguf", got="a GGUF"):
        open_safetensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "read", [lambda path: read_regular(path, limit=1000), MappedFile, lambda path: [*read_records(path)]]
)
def test_no_reader_takes_the_pointer_of_git_lfs_for_data(read: Callable[[Path], object], tmp_path: Path):
    (tmp_path / "data.jsonl").write_bytes(POINTER)
    with refuses("BadMagic", "git-lfs", "git lfs pull", where="data.jsonl"):
        read(tmp_path / "data.jsonl")


def test_a_text_that_mentions_git_lfs_is_read(tmp_path: Path):
    (tmp_path / "notes.txt").write_bytes(b"# " + POINTER)
    assert read_regular(tmp_path / "notes.txt", limit=1000).endswith(POINTER)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_clone_without_git_lfs_is_refused_by_run(name: str, tmp_path: Path):
    folder = write_folder(tmp_path / "clone", random_tensors("llama"))
    (folder / name).write_bytes(POINTER)
    assert_cli_refuses(invoke("run", str(folder), "Once"), 2, "git lfs pull", where=folder / name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_a_pointer_is_refused(name: str, tmp_path: Path):
    convert(builtin_path("micro-llama"), tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(POINTER)
    with refuses("BadMagic", "git lfs pull", where=name):
        Tokenizer.from_huggingface(tmp_path / "model")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_an_error_document_is_refused(name: str, tmp_path: Path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / name).write_bytes(OTHERS["error"][0])
    assert_cli_refuses(invoke("lora", "inspect", str(tmp_path)), 2, "login", where=name)

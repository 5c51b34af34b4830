"""Settings beside the tensors: those that change a result are refused by key, the others are left alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.whole_folders import write_whole_folder
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.files.tokenizer import Tokenizer

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
    values = json.loads(file.read_text()) | {key: value}
    file.write_text(json.dumps(values))


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

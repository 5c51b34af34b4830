"""Messages stay short, whatever a file holds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.gguf_bytes import STRING, entry, gguf, row, string
from builders.safetensors_bytes import safetensors_bytes, tensor
from builders.whole_folders import write_whole_folder
from helpers.refusals import assert_tells

from llorch.cli.outcome import error_line
from llorch.files import open_weights
from llorch.files.safetensors import SafetensorsFile
from llorch.files.tokenizer import Tokenizer
from llorch.runtime.errors import FormatError, GuardFailed, shortened

LONG = "x" * 300_000
MOST = 600  # characters of a line, beside its path


@pytest.mark.parametrize("quoted", ["'" + LONG + "'", '"' + "it's " * 60_000 + '"', "'" + "two words " * 30_000 + "'"])
def test_a_quoted_value_is_cut_to_eighty_characters_and_tells_its_length(quoted: str):
    line = shortened(f"key: expected 'a', got {quoted}; name another")
    assert line == f"key: expected 'a', got {quoted[:80]}... ({len(quoted)} characters); name another"


@pytest.mark.parametrize(
    "line",
    [
        "the model's file and the user's folder are two, and neither is the other's, as everybody's eyes tell; don't",
        "got '" + "x" * 78 + "'",
        "weights: " + ", ".join(f"model.layers.{n}.mlp.up_proj.weight" for n in range(40)),
    ],
)
def test_short_values_and_apostrophes_stay(line: str):
    assert shortened(line) == line


def test_a_word_without_an_end_is_cut():
    assert_tells(shortened(f"got {LONG}"), "300000 characters")


@pytest.mark.parametrize("kind", [lambda line: FormatError("Malformed", line), ValueError,
                                  lambda line: GuardFailed("ids", line, source="dump")])  # fmt: skip
def test_every_refusal_is_cut(kind: Callable[[str], Exception]):
    assert len(error_line(kind(f"expected 1, got {LONG!r}"))) < 200


def json_changed(folder: Path, file: str, change: Callable[[dict], dict]) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(change(values)))


CHANGES: dict[str, tuple[str, Callable[[dict], dict]]] = {
    "model_type": ("config.json", lambda config: config | {"model_type": LONG}),
    "hidden_act": ("config.json", lambda config: config | {"hidden_act": LONG}),
    "rope_type": ("config.json", lambda config: config | {"rope_scaling": {"rope_type": LONG}}),
    "layer_types": ("config.json", lambda config: config | {"layer_types": [LONG] * 2}),
    "quantization": ("config.json", lambda config: config | {"quantization_config": {"quant_method": LONG}}),
    "bos_token": ("tokenizer_config.json", lambda config: config | {"bos_token": LONG}),
    "normalizer": ("tokenizer.json", lambda tokenizer: tokenizer | {"normalizer": {"type": LONG}}),
    "pre_tokenizer": ("tokenizer.json", lambda tokenizer: tokenizer | {"pre_tokenizer": {"type": LONG}}),
    "merges": ("tokenizer.json", lambda tokenizer: tokenizer | {"model": tokenizer["model"] | {"merges": [LONG]}}),
    "vocab": ("tokenizer.json", lambda tokenizer: tokenizer | {"model": tokenizer["model"] | {"vocab": {LONG: -1}}}),
    "a model key": ("tokenizer.json", lambda tokenizer: tokenizer | {"model": tokenizer["model"] | {LONG: 1}}),
    "added_tokens": ("tokenizer.json", lambda t: t | {"added_tokens": [{"content": LONG, "id": -1}]}),
}  # fmt: skip


def open_both(folder: Path) -> None:
    open_weights(folder)
    Tokenizer.from_huggingface(folder)


def assert_refused_shortly(path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(FormatError) as caught:
        read(path)
    assert len(str(caught.value).replace(str(path), "")) < MOST


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_with_a_text_without_an_end_is_refused_in_a_short_line(name: str, tmp_path: Path):
    folder = write_whole_folder(tmp_path / "model", "llama-bpe")
    json_changed(folder, *CHANGES[name])
    assert_refused_shortly(folder, open_both)


def test_a_file_with_a_text_without_an_end_is_refused_in_a_short_line(tmp_path: Path):
    path, long = tmp_path / "m.gguf", LONG.encode()
    key = entry(long[:60_000], STRING, string(b"a"))
    for content in (
        gguf([entry(b"general.architecture", STRING, string(long))], [row(b"token_embd.weight", [1])], b"\0" * 4),
        gguf([key, key]),
    ):
        path.write_bytes(content)
        assert_refused_shortly(path, open_weights)


@pytest.mark.parametrize("header", [{LONG: tensor(dtype="F31")}, {LONG: tensor(offsets=(0, 9))}, {"a": {LONG: 1}}])
def test_a_tensor_table_with_a_text_without_an_end_is_refused_in_a_short_line(header: dict, tmp_path: Path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(header, b"\0" * 8))
    assert_refused_shortly(path, SafetensorsFile)

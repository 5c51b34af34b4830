"""Messages stay short, whatever a file holds; a built-in name and a path of the same name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.gguf_bytes import STRING, entry, gguf, row, string
from builders.safetensors_bytes import safetensors_bytes, tensor
from builders.whole_folders import write_whole_folder
from helpers.command_line import invoke
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.cli.outcome import error_line
from llorch.files import open_weights
from llorch.files.hub import find
from llorch.files.safetensors import SafetensorsFile
from llorch.files.tokenizer import Tokenizer
from llorch.runtime.builtin import builtin_path, find_data
from llorch.runtime.errors import FormatError, GuardFailed, shortened

LONG = "x" * 300_000
MOST = 600  # characters of a line, beside its path


@pytest.mark.parametrize("quoted", ["'" + LONG + "'", '"' + "it's " * 60_000 + '"', "'" + "two words " * 30_000 + "'"])
def test_quoted_value_is_cut_to_80_characters_with_its_length(quoted: str):
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
def test_short_values_and_apostrophes_are_unchanged(line: str):
    assert shortened(line) == line


def test_very_long_word_is_cut():
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
def test_folder_with_a_very_long_string_is_refused_in_a_short_line(name: str, tmp_path: Path):
    folder = write_whole_folder(tmp_path / "model", "llama-bpe")
    json_changed(folder, *CHANGES[name])
    assert_refused_shortly(folder, open_both)


def test_file_with_a_very_long_string_is_refused_in_a_short_line(tmp_path: Path):
    path, long = tmp_path / "m.gguf", LONG.encode()
    key = entry(long[:60_000], STRING, string(b"a"))
    for content in (
        gguf([entry(b"general.architecture", STRING, string(long))], [row(b"token_embd.weight", [1])], b"\0" * 4),
        gguf([key, key]),
    ):
        path.write_bytes(content)
        assert_refused_shortly(path, open_weights)


@pytest.mark.parametrize("header", [{LONG: tensor(dtype="F31")}, {LONG: tensor(offsets=(0, 9))}, {"a": {LONG: 1}}])
def test_tensor_table_with_a_very_long_string_is_refused_in_a_short_line(header: dict, tmp_path: Path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(header, b"\0" * 8))
    assert_refused_shortly(path, SafetensorsFile)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the current folder one with folders that have built-in names."""
    monkeypatch.chdir(tmp_path)
    for name in ("story", "pirate"):
        Path(name).mkdir()


def test_built_in_model_overrides_a_folder_of_its_name_with_a_hint():
    lines: list[str] = []
    assert find("story", report=lines.append) == builtin_path("story")
    assert_tells(" ".join(lines), "./story")
    assert len(lines) == 1
    assert llorch.load("story").config.hidden_size == 192


def test_explicit_path_opens_the_folder():
    for spec in ("./story", Path("story"), str(Path("story").absolute())):
        assert find(spec) == Path(spec)
        with refuses("Missing", "config.json"):
            llorch.load(spec)
    assert find(Path("micro-llama")) == builtin_path("micro-llama")  # where there is no such path


def test_built_in_data_set_overrides_a_folder_of_its_name():
    lines: list[str] = []
    assert find_data("pirate", lines.append).is_absolute()
    assert_tells(" ".join(lines), "./pirate")
    assert find_data("./pirate") == Path("pirate")


@pytest.mark.parametrize("words", ["tokenize story Hi", "inspect story", "data show -n 0 story pirate",
                                   "lora train story --data pirate -o . --lr 1e-4"])  # fmt: skip
def test_a_command_says_that_both_exist_once(words: str):
    if "lora train" in words:
        pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    result = invoke(*words.split())
    assert result.stderr.count("./story") == 1
    assert result.stderr.count("./pirate") == ("pirate" in words)
    assert result.exit_code == (2 if "train" in words else 0)  # of lora train: the folder exists


def test_no_hint_without_a_folder_of_the_same_name():
    Path("story").rmdir()
    assert invoke("tokenize", "story", "Hi").stderr == ""

"""`llorch lora merge`, `export` and `inspect` as a user runs them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import random_adapter, tiny_base
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells

from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.files.quant import GGMLType
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.model import load


@pytest.fixture
def made(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base"))
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    return str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path


def test_merge_tells_what_the_adapter_and_the_rounding_did(made):
    base, adapter, folder = made
    result = invoke("lora", "merge", base, adapter, str(folder / "m"), "--type", "bf16")
    assert result.exit_code == 0, result.stderr
    assert "BF16" in result.stdout
    assert "lost to rounding" in result.stdout
    assert re.search(r"^logits: .*\d", result.stdout, re.MULTILINE)
    assert "base: the same" in result.stderr


def test_merge_gives_json(made):
    base, adapter, folder = made
    result = invoke("lora", "merge", base, adapter, str(folder / "m.gguf"), "--json", "--no-logits")
    values = json.loads(result.stdout)
    assert values["type"] == "F32"
    assert len(values["matrices"]) == 14
    assert values["logits"] is None


def test_merge_refuses_with_exit_codes(made):
    base, adapter, folder = made
    assert invoke("lora", "merge", base, adapter, adapter, "--force").exit_code == 2
    assert invoke("lora", "merge", base, str(folder / "none"), str(folder / "m")).exit_code == 3
    (folder / "adapter" / "adapter_config.json").write_text("{")
    result = invoke("lora", "merge", base, adapter, str(folder / "m"))
    assert result.exit_code == 2
    assert "adapter_config.json: Malformed" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_merge_into_the_original_of_a_quantised_base_asks_for_any_base(tmp_path):
    base, trained = tiny_base(tmp_path / "base"), tmp_path / "base.gguf"
    write_gguf(open_weights(base), trained, ggml_type=GGMLType.Q4_0)
    weights = open_weights(trained)
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    words = ("lora", "merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert_cli_refuses(invoke(*words), 2, "BaseMismatch", "quantisation error", "Q4_0", trained, "--any-base")
    accepted = invoke(*words, "--any-base")
    assert accepted.exit_code == 0, accepted.stderr
    assert_tells(accepted.stderr, "quantisation error", trained)


def test_export_writes_both_formats(made):
    base, adapter, folder = made
    result = invoke("lora", "export", base, adapter, str(folder / "a.gguf"), "--json")
    assert json.loads(result.stdout)["n_parameters"] > 0
    assert invoke("lora", "export", base, str(folder / "a.gguf"), str(folder / "p"), "--vllm-safe").exit_code == 0
    assert json.loads((folder / "p" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_inspect_shows_every_matrix(made):
    base, adapter, _ = made
    result = invoke("lora", "inspect", adapter, "--base", base)
    assert result.exit_code == 0, result.stderr
    assert "model.layers.1.mlp.down_proj" in result.stdout
    assert "lora_alpha: 5" in result.stdout
    assert "base: the same" in result.stderr
    values = json.loads(invoke("lora", "inspect", adapter, "--json").stdout)
    assert len(values["matrices"]) == 14
    assert values["matrices"][0]["relative"] is None


def test_inspect_with_another_base_is_refused(made, tmp_path):
    _, adapter, _ = made
    result = invoke("lora", "inspect", adapter, "--base", "micro-llama")
    assert result.exit_code == 2
    assert_tells(result.stderr.splitlines()[-1], adapter, "BaseMismatch", tmp_path / "base", "micro-llama.gguf")


@pytest.mark.nightly_cases(but=["lora export BASE ADAPTER OUT", "run BASE x --adapter ADAPTER -n 4"])
@pytest.mark.parametrize(
    "words",
    [
        "lora inspect ADAPTER --base BASE", "lora doctor ADAPTER --base BASE --against none",
        "run BASE x --adapter ADAPTER -n 4",
        "lora merge BASE ADAPTER OUT.gguf", "lora export BASE ADAPTER OUT", "lora eval BASE ADAPTER --data DATA",
    ],
)  # fmt: skip
def test_any_base_exists_wherever_it_is_advised(tmp_path, words):
    adapter = tmp_path / "adapter"
    write_peft(random_adapter(load("story").config), adapter, base=identity_of(load("story").weights, "someone/else"))
    (adapter / "llorch_base.json").unlink()
    (tmp_path / "data.jsonl").write_text('{"text": "Once upon a time there was a fox."}\n')
    places = {"ADAPTER": adapter, "BASE": "story", "OUT": tmp_path / "new", "DATA": tmp_path / "data.jsonl"}
    for name, place in places.items():
        words = words.replace(name, str(place))
    refused, accepted = invoke(*words.split()), invoke(*words.split(), "--any-base")
    assert refused.exit_code != 0
    assert_tells(refused.output, "someone/else", "--any-base")
    assert accepted.exit_code == 0, accepted.stderr
    assert "accepted" in accepted.output


RESIZED = {
    "base_model.model.model.embed_tokens.base_layer.weight": "Shape",
    "base_model.model.lm_head.weight": "Unsupported",
}


@pytest.fixture(scope="module")
def resized(tmp_path_factory):
    """Adapters of `story`, each with one matrix of a vocabulary that has two more tokens."""
    folder = tmp_path_factory.mktemp("resized")
    weights = load("story").weights
    adapter = random_adapter(weights.config, target_modules=("q_proj", "embed_tokens", "lm_head"))
    for name in RESIZED:
        write_peft(adapter, folder / name, base=identity_of(weights))
        path = folder / name / "adapter_model.safetensors"
        rows, width = weights.shape("embed_tokens")
        container.save_file(container.load_file(path) | {name: np.ones((rows + 2, width), np.float32)}, path)
    return folder


@pytest.mark.nightly_cases(but=["*embed_tokens.base_layer.weight-*", "*lora merge*"])
@pytest.mark.parametrize(
    "words",
    [
        "lora merge story ADAPTER OUT", "lora export story ADAPTER OUT.gguf", "lora inspect ADAPTER --base story",
        "lora eval story ADAPTER --data DATA", "run story x -n 4 --adapter ADAPTER",
        "run story x -n 4 --adapter ADAPTER --any-base", "serve story --adapter grown=ADAPTER",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", RESIZED)
def test_an_adapter_of_a_resized_vocabulary_is_refused_by_each_command_as_by_doctor(resized, tmp_path, name, words):
    adapter = resized / name
    (tmp_path / "data.jsonl").write_text('{"text": "Once upon a time there was a fox."}\n')
    for place, path in {"ADAPTER": adapter, "OUT": tmp_path / "new", "DATA": tmp_path / "data.jsonl"}.items():
        words = words.replace(place, str(path))
    result = invoke(*words.split())
    assert result.exit_code == 2, result.stderr
    sentence = result.stderr.splitlines()[-1].removeprefix("llorch: ")
    assert_tells(sentence, adapter, RESIZED[name], name)
    doctor = invoke("lora", "doctor", str(adapter), "--base", "story", "--against", "none")
    assert sentence in doctor.stdout


def test_inspect_shows_a_choice_of_layers(made, tmp_path):
    _, adapter, _ = made
    folder = Path(shutil.copytree(adapter, tmp_path / "some"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [0, 1]}))
    result = invoke("lora", "inspect", str(folder))
    assert result.exit_code == 0, result.stderr
    assert "layers_to_transform: 0, 1\n" in result.stdout

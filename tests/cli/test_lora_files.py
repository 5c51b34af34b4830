"""`llorch lora merge`, `export` and `inspect` as a user runs them."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import random_adapter, tiny_base
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells
from helpers.training_runs import ragged_rows, small_data, write_rows

from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.files.quant import GGMLType
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.model import load
from llorch.training.batch import IGNORED


@pytest.fixture
def adapter_paths(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base"))
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    return str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path


def test_merge_tells_what_the_adapter_and_the_rounding_did(adapter_paths):
    base, adapter, folder = adapter_paths
    result = invoke("lora", "merge", base, adapter, str(folder / "m"), "--type", "bf16")
    assert result.exit_code == 0, result.stderr
    assert "BF16" in result.stdout
    assert "lost to rounding" in result.stdout
    assert re.search(r"^logits: .*\d", result.stdout, re.MULTILINE)
    assert "base: the same" in result.stderr


def test_merge_gives_json(adapter_paths):
    base, adapter, folder = adapter_paths
    result = invoke("lora", "merge", base, adapter, str(folder / "m.gguf"), "--json", "--no-logits")
    values = json.loads(result.stdout)
    assert values["type"] == "F32"
    assert len(values["matrices"]) == 14
    assert values["logits"] is None


def test_merge_refuses_with_exit_codes(adapter_paths):
    base, adapter, folder = adapter_paths
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


def test_export_writes_both_formats(adapter_paths):
    base, adapter, folder = adapter_paths
    result = invoke("lora", "export", base, adapter, str(folder / "a.gguf"), "--json")
    assert json.loads(result.stdout)["n_parameters"] > 0
    assert invoke("lora", "export", base, str(folder / "a.gguf"), str(folder / "p"), "--vllm-safe").exit_code == 0
    assert json.loads((folder / "p" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_export_checks_what_it_wrote(adapter_paths):
    base, adapter, folder = adapter_paths
    sources = {"a.gguf": adapter, "from-gguf": str(folder / "a.gguf"), "plain": adapter, "plain.gguf": adapter}
    for name, source in sources.items():
        words = ("lora", "export", base, source, str(folder / name), *["--vllm-safe"] * name.startswith("plain"))
        result = invoke(*words)
        assert result.exit_code == 0, result.stderr
        assert f"checked: 14 matrices with {source} PASS" in result.stderr
        unchecked = invoke(*words, "--force", "--no-check")
        assert unchecked.exit_code == 0, unchecked.stderr
        assert "checked" not in unchecked.stderr


def test_export_in_a_wrong_order_is_a_mismatch(adapter_paths, monkeypatch):
    base, adapter, folder = adapter_paths
    monkeypatch.setattr("llorch.lora.targets._order_in_gguf", lambda weight: (None, None))
    words = ("lora", "export", base, adapter, str(folder / "a.gguf"))
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"]
    assert_cli_refuses(invoke(*words), 1, folder / "a.gguf", adapter, "4 of 14", *names[:3])
    assert invoke(*words, "--force", "--no-check").exit_code == 0


def test_export_of_a_gguf_source_that_is_read_in_a_wrong_order_is_a_mismatch(adapter_paths, monkeypatch):
    base, adapter, folder = adapter_paths
    assert invoke("lora", "export", base, adapter, str(folder / "a.gguf")).exit_code == 0
    monkeypatch.setattr("llorch.lora.targets._order_in_gguf", lambda weight: (None, None))
    result = invoke("lora", "export", base, str(folder / "a.gguf"), str(folder / "new"))
    assert_cli_refuses(result, 1, folder / "a.gguf", "4 of 14", "model.layers.0.self_attn.q_proj.weight")


def test_export_without_the_scale_is_a_mismatch(adapter_paths, monkeypatch):
    base, adapter, folder = adapter_paths
    monkeypatch.setattr("llorch.lora.gguf_format.common_alpha", lambda adapter: 0.0)
    result = invoke("lora", "export", base, adapter, str(folder / "a.gguf"))
    assert_cli_refuses(result, 1, folder / "a.gguf", "14 of 14", "0.6 times", "11 more")


def test_inspect_shows_every_matrix(adapter_paths):
    base, adapter, _ = adapter_paths
    result = invoke("lora", "inspect", adapter, "--base", base)
    assert result.exit_code == 0, result.stderr
    assert "model.layers.1.mlp.down_proj" in result.stdout
    assert "lora_alpha: 5" in result.stdout
    assert "base: the same" in result.stderr
    values = json.loads(invoke("lora", "inspect", adapter, "--json").stdout)
    assert len(values["matrices"]) == 14
    assert values["matrices"][0]["relative"] is None


def test_inspect_with_another_base_is_refused(adapter_paths, tmp_path):
    _, adapter, _ = adapter_paths
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


def test_inspect_shows_a_choice_of_layers(adapter_paths, tmp_path):
    _, adapter, _ = adapter_paths
    folder = Path(shutil.copytree(adapter, tmp_path / "some"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [0, 1]}))
    result = invoke("lora", "inspect", str(folder))
    assert result.exit_code == 0, result.stderr
    assert "layers_to_transform: 0, 1\n" in result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps; its data stands beside it."""
    folder = tmp_path_factory.mktemp("eval")
    words = ["micro-qwen3", "--data", str(small_data(folder)), "-o", str(folder / "run")]
    result = invoke("lora", "train", *words, "--r", "2", "--steps", "5", "--lr", "0.02", "--warmup-steps", "0")
    assert result.exit_code == 0, result.stderr
    return folder / "run"


def evaluate(run: Path, *options: str, model: str = "micro-qwen3"):
    return invoke("lora", "eval", model, str(run), "--data", str(run.parent / "data"), *options)


def numpy_loss(rows: list[dict[str, list[int]]]) -> float:
    """Token-weighted mean loss of the base by the NumPy path, row by row."""
    model, total, count = load("micro-qwen3"), 0.0, 0
    for row in rows:
        logits = model.forward(row["input_ids"]).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        learned = [place for place, label in enumerate(row["labels"]) if place and label != IGNORED]
        total -= sum(logits[place - 1, row["labels"][place]] for place in learned)
        count += len(learned)
    return total / count


def test_without_the_adapter_the_loss_is_that_of_the_numpy_path(run: Path):
    found = json.loads(evaluate(run, "--json").stdout)
    rows = ragged_rows(5, seed=9)
    assert found["loss"]["without"] == pytest.approx(numpy_loss(rows), rel=1e-5)
    assert found["n_trained"] == sum(label != IGNORED for row in rows for label in row["labels"][1:])
    assert (found["split"], found["n_rows"]) == ("valid", 5)


def test_with_the_adapter_the_loss_is_that_of_the_last_validation(run: Path):
    found = json.loads(evaluate(run, "--json").stdout)
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert found["loss"]["with_adapter"] == pytest.approx(last["valid_loss"], rel=1e-6)
    assert found["loss"]["with_adapter"] < found["loss"]["without"]
    for name, loss in found["loss"].items():
        assert found["perplexity"][name] == pytest.approx(math.exp(loss))


def test_any_split_can_be_asked_for_and_one_that_is_not_there_is_refused(run: Path):
    assert evaluate(run, "--split", "train").stdout.startswith("train: 8 rows, ")
    assert evaluate(run, "--split", "valid").stdout.startswith("valid: 5 rows, ")
    result = evaluate(run, "--split", "test")
    assert_cli_refuses(result, 2, run.parent / "data", "Missing", expected="train, valid", got="test")


def test_lora_eval_uses_the_rows_that_training_held_out(run: Path, tmp_path: Path):
    words = ["micro-qwen3", "--data", str(run.parent / "data" / "train.jsonl"), "--valid", "0.3"]
    trained = invoke("lora", "train", *words, "-o", str(tmp_path / "held"), "--r", "2", "--steps", "2", "--lr", "0.02")
    assert_tells(trained.stderr, "train.jsonl: 2 of 8 rows", "valid 0.3")
    found = json.loads(invoke("lora", "eval", words[0], str(tmp_path / "held"), *words[1:], "--json").stdout)
    last = json.loads((tmp_path / "held" / "log.jsonl").read_text().splitlines()[-1])
    assert (found["split"], found["n_rows"]) == ("valid", 2)
    assert found["loss"]["with_adapter"] == pytest.approx(last["valid_loss"], rel=1e-6)


def test_a_batch_size_changes_rounding_only(run: Path):
    one, all_ = (json.loads(evaluate(run, "--json", "--batch-size", size).stdout)["loss"] for size in ("1", "8"))
    for name in one:
        assert one[name] == pytest.approx(all_[name], rel=1e-6)


def test_lora_eval_data_file_is_evaluated_whole(run: Path, tmp_path: Path):
    data = write_rows(tmp_path / "more.jsonl", ragged_rows(2, seed=1))
    assert invoke("lora", "eval", "micro-qwen3", str(run), "--data", str(data)).stdout.startswith("train: 2 rows")


def test_an_adapter_of_another_base_is_refused(run: Path):
    result = evaluate(run, model="micro-qwen2")
    assert_cli_refuses(result, 2, run, "BaseMismatch", "micro-qwen3", "micro-qwen2.gguf")

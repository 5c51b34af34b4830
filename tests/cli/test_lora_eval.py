"""`llorch lora eval`: losses with and without an adapter."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells
from helpers.training_runs import ragged_rows, small_data, write_rows

from llorch.model.model import load
from llorch.training.batch import IGNORED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps; its data stands beside it."""
    folder = tmp_path_factory.mktemp("eval")
    words = ["micro-qwen3", "--data", str(small_data(folder)), "-o", str(folder / "run")]
    result = invoke("lora", "train", *words, "--r", "2", "--steps", "5", "--lr", "0.02", "--warmup-steps", "0")
    assert result.exit_code == 0, result.stderr
    return folder / "run"


def evaluate(run: Path, *more: str, model: str = "micro-qwen3"):
    return invoke("lora", "eval", model, str(run), "--data", str(run.parent / "data"), *more)


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

"""`llorch verify`: the report, the exit codes and the JSON."""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders.tiny_models import random_tensors, write_folder
from helpers.command_line import REPOSITORY, invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells

if TYPE_CHECKING:
    from llorch.judging.types import Comparison

CHANGED = "micro-qwen2"
TOKENS = "3,1,4,15,9,2,6,5"
FIELDS = "model checkpoint stage layer engine backend mode error engine_error tolerance verdict".split()


@pytest.fixture(scope="module")
def changed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`micro-qwen2` with one weight of layer 1 changed a little, and goldens that claim to be of this file."""
    from llorch.files import open_gguf
    from llorch.judging.goldens.forward import sha256
    from llorch.runtime.builtin import builtin_path, goldens_folder

    folder, name = tmp_path_factory.mktemp("changed"), CHANGED
    path = folder / f"{name}.gguf"
    data = bytearray(builtin_path(name).read_bytes())
    with open_gguf(builtin_path(name)) as file:
        tensor = file.tensors["blk.1.ffn_gate.weight"]
    weight = np.frombuffer(data, np.float32, 1, tensor.offset + 400)
    data[tensor.offset + 400 : tensor.offset + 404] = (weight + np.float32(0.1)).tobytes()
    path.write_bytes(data)
    shutil.copytree(goldens_folder() / name, folder / "goldens" / name)
    record, long = (folder / "goldens" / name / file for file in ("golden.json", "long.json"))
    golden = json.loads(record.read_text())
    golden["provenance"]["weights_sha256"] = sha256(path)
    record.write_text(json.dumps(golden))
    long.write_text(json.dumps(json.loads(long.read_text()) | {"weights_sha256": sha256(path)}))
    return folder


@pytest.fixture
def changed_weight(changed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of that model, which stands for the built-in one."""
    monkeypatch.setattr("llorch.judging.goldens.forward.builtin_path", lambda _: changed_folder / f"{CHANGED}.gguf")
    monkeypatch.setattr("llorch.judging.verify.goldens_folder", lambda: changed_folder / "goldens")
    return CHANGED


@cache
def rows_of(model: str) -> Sequence["Comparison"]:
    """The rows of a model as it is at the first call: no model is judged both as it is and with a changed weight."""
    from llorch.judging.verify import verify_stored

    return tuple(verify_stored(model))


@cache
def training_rows_of(model: str) -> Sequence["Comparison"]:
    from llorch.judging.expectations.training import verify_training_stored

    return tuple(verify_training_stored(model))


@pytest.fixture
def few_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are judged on one backend; `tests/judging/test_long_contexts.py` judges them on all."""
    from llorch.judging.expectations.long_contexts import LongSuite

    comparisons = LongSuite.comparisons
    monkeypatch.setattr(
        LongSuite, "comparisons", lambda suite, on: comparisons(suite, on) if on.name == "numpy" else iter(())
    )


@pytest.fixture
def one_comparison(few_long_contexts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed by the first command that shows them."""
    monkeypatch.setattr("llorch.cli.verify_plan.verify_stored", rows_of)
    monkeypatch.setattr("llorch.cli.verify_plan.verify_training_stored", training_rows_of)


ALONE = ("--threads", "1")  # judged in this process, where `rows_of` remembers


def what_verify_prints() -> str:
    """Take it from a file where `.ci/run` has run the command: README's first. It ends there unless all is right."""
    if kept := os.environ.get("LLORCH_VERIFIED"):
        return Path(kept).read_text(encoding="utf-8")
    result = spawn("verify")
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.slow  # README's first command; the plain test of each comparison is tests/judging/test_checkpoints.py
def test_every_built_in_model_agrees_with_its_goldens():
    from helpers.stored_goldens import golden_of

    from llorch.runtime.builtin import EVERY

    printed = what_verify_prints()
    passed = re.findall(r"^(\S+) +PASS +([\d,]+) of \2 .* \d+\.\d s(   1 NOT RUN)?$", printed, re.MULTILINE)
    assert [name for name, *_ in passed] == [*EVERY, "quantised"]
    assert [name for name, _, not_run in passed if not_run] == ["micro-mistral"]
    n_rows = sum(int(count.replace(",", "")) for _, count, _ in passed)
    last = printed.splitlines()[-1]
    assert last.startswith(f"{len(EVERY) + 1} models, {n_rows:,} of {n_rows:,} ")
    figures = (REPOSITORY / "benchmarks/README.md").read_text()
    assert f"{n_rows} comparisons, all pass" in figures
    traces = [trace for name in EVERY for trace in golden_of(name).reference.engine_output.traces.values()]
    n_places = sum(map(len, traces)) + len(EVERY)  # of each model the selected logits, too
    assert f"{n_places} (stage, layer, model) rows" in figures


@pytest.fixture
def two_models(one_comparison: None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A model with a changed weight, in place of the built-in one, and another: all that `verify` has to judge."""
    names = (CHANGED, "micro-llama3")
    monkeypatch.setattr("llorch.cli.verify_plan.is_wheel", lambda: True)
    monkeypatch.setattr("llorch.cli.verify_plan.GOLDENS_IN_WHEEL", names)
    return names


def test_verify_without_a_model_prints_a_line_a_model_and_the_table_of_the_one_that_fails(
    changed_weight: str, two_models: tuple[str, str]
):
    result = invoke("verify", *ALONE)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    changed, missing = (line.split() for line in lines[:2])
    assert changed[:2] == [CHANGED, "FAIL"]
    assert missing[:4] == ["micro-llama3", "NOT", "RUN", "0"]  # the changed goldens have none of it
    assert [line for line in lines if line.startswith("checkpoint ")] == [lines[4]]
    assert "micro-llama3/golden.json" in result.stdout
    assert re.search(rf" {CHANGED}: .* 00 foundation: tensors, near, exact, numpy against reader\n", result.stdout)
    assert len(lines[-1].split()) <= 25
    n_failed = len([c for c in rows_of(CHANGED) if c.verdict == "FAIL"])
    assert_tells(lines[-1], f"{n_failed:,} FAIL", f"{changed[2]} of {changed[4]}", "14 NOT RUN", "llorch verify -v")


@pytest.mark.parametrize("option", ["-v", "--verbose", "--detail"])
def test_verbose_prints_the_table_of_each_model(option: str, changed_weight: str, two_models: tuple[str, str]):
    every, alone = invoke("verify", option, *ALONE), invoke("verify", *two_models, *ALONE)
    assert [line for line in every.stdout.splitlines() if line in two_models] == [*two_models]
    if option != "--detail":
        assert every.stdout == alone.stdout


@pytest.mark.usefixtures("one_comparison")
def test_table_of_a_model_has_a_line_for_each_checkpoint():
    from llorch.cli.verify_summary import TRAINING, checkpoints_of
    from llorch.files import open_weights
    from llorch.runtime.builtin import builtin_path
    from llorch.stages.table import CHECKPOINTS

    numbers = (*checkpoints_of(open_weights(builtin_path("micro-qwen3")).config), *TRAINING)
    table = [line for line in invoke("verify", "micro-qwen3", *ALONE).stdout.splitlines() if line[:2].isdigit()]
    assert [line[:20].rstrip() for line in table if " PASS" in line] == [f"{n:<3} {CHECKPOINTS[n]}" for n in numbers]


@pytest.mark.usefixtures("one_comparison")
def test_json_has_every_row_and_a_summary_that_counts_them():
    result = invoke("verify", "micro-qwen3", "--json", *ALONE)
    found = json.loads(result.stdout)
    rows, summary = found["comparisons"], found["summary"]
    assert result.exit_code == 0
    assert all(row.keys() >= set(FIELDS) for row in rows)
    foreign = {"reader", "llamacpp", "transformers", "peft", "transformers-float64", "peft-float64"}
    assert {row["engine"] for row in rows} == foreign | {"ours"}
    of_stages = [row for row in rows if row["mode"] != "exact"]
    assert {(row["engine"], row["load_path"]["read"], *row["load_path"]["set_by_llorch"]) for row in of_stages} == {
        ("llamacpp", "llamacpp"), ("transformers", "transformers"), ("peft", "llorch"), ("peft-float64", "llorch"),
        *((name, "transformers", "head_dim") for name in ("transformers", "transformers-float64")),
    }  # fmt: skip
    assert {row["mode"] for row in rows} == {"isolated", "chained", "decode", "exact", "whole", "in parts"}
    assert summary["comparisons"] == len(rows) == summary["passed"]
    from llorch.judging.runners.numpy import BACKENDS

    forward = [row for row in rows if row["mode"] == "chained" and row["checkpoint"] < "15"]
    places = len({(row["case"], row["stage"], row["layer"]) for row in forward})
    closer = summary["closer_to_reference"]
    assert {name: counts["all"]["comparisons"] for name, counts in closer.items()} == dict.fromkeys(BACKENDS, places)


@pytest.fixture
def detail(one_comparison: None) -> str:
    return invoke("verify", "micro-qwen3", "--detail", *ALONE).stdout


def test_detail_has_a_line_per_stage_and_says_where_its_row_lies(detail: str):
    lines = detail.splitlines()
    assert [line for line in lines if "read and decoded by" in line] == [
        "transformers, transformers-float64: read and decoded by transformers, head_dim read by llorch",
        "peft, peft-float64: read and decoded by llorch",
        "peft at 20: read and decoded by llorch, written by llorch",
        "transformers at 20: read and decoded by transformers, written by llorch",
        "llamacpp at 20: read and decoded by llamacpp, written by llorch",
    ]
    shown = [line[4:20].strip() for line in lines if line.startswith("02 ")]
    assert shown == ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm"]
    assert all("isolated" in line or "chained" in line for line in lines if line.startswith("02 "))


@pytest.mark.usefixtures("one_comparison")
def test_a_changed_weight_turns_the_run_red_and_is_located(changed_weight: str):
    result = invoke("verify", changed_weight, *ALONE)
    assert result.exit_code == 1
    assert re.search(r" micro-qwen2: .* 00 foundation: tensors, near, exact, numpy against reader\n", result.stdout)
    assert re.search(r"^  2\.6% .*: blk\.1\.ffn_gate\.weight\b", result.stdout, re.MULTILINE)
    assert re.search(r" input: ffn_gate\n", result.stdout)
    assert "FAIL" in result.stdout.split("06  swiglu")[1].splitlines()[0]


@pytest.mark.usefixtures("one_comparison")
def test_json_of_a_failure_names_the_first_stage_too(changed_weight: str):
    result = invoke("verify", changed_weight, "--json", *ALONE)
    summary = json.loads(result.stdout)["summary"]
    assert result.exit_code == 1
    assert summary["failed"] == summary["comparisons"] - summary["passed"] > 0
    assert [failure["stage"] for failure in summary["first_failures"]] == ["tensors"]


@pytest.mark.usefixtures("few_long_contexts")
@pytest.mark.parametrize("form", [pytest.param((), id="lines"), pytest.param(("--json",), marks=pytest.mark.nightly)])
def test_verify_in_parallel_reports_models_as_in_sequence(
    changed_weight: str, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    two = invoke("verify", changed_weight, "micro-llama3", "--threads", "2", *form)
    with monkeypatch.context() as patch:
        patch.setattr("llorch.cli.verify_plan.verify_stored", rows_of)
        one = invoke("verify", changed_weight, "micro-llama3", *ALONE, *form)
    assert (one.exit_code, two.exit_code, two.stderr) == (1, 1, one.stderr)
    assert two.stdout == one.stdout.replace("threads: 1", "threads: 2; processes: 2")
    assert "micro-llama3/golden.json is missing" in two.stdout


def test_goldens_of_other_weights_are_refused(changed_weight: str, monkeypatch: pytest.MonkeyPatch):
    from llorch.runtime.builtin import goldens_folder

    monkeypatch.setattr("llorch.judging.verify.goldens_folder", goldens_folder)
    weights = f"{changed_weight}.gguf"
    assert_cli_refuses(invoke("verify", changed_weight), 2, f"golden {changed_weight}", weights, "regenerate.py")


def test_a_missing_golden_is_not_run_and_never_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.judging.verify.goldens_folder", lambda: tmp_path)
    result = invoke("verify", "micro-llama")
    assert (result.exit_code, result.stdout.count("- NOT RUN")) == (3, 20)
    assert "regenerate.py" in result.stdout
    assert "1 model, 0 comparisons: 0 passed, 0 failed, 20 checkpoints not run" in result.stdout


def test_without_engines_a_file_is_not_run_and_how_to_add_them_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = write_folder(tmp_path / "tiny-1.5", random_tensors("qwen2"), "qwen2")
    result = invoke("verify", str(folder))
    assert result.exit_code == 3
    assert "tiny-1.5\n" in result.stdout
    assert "NOT RUN: llamacpp: llama_cpp is not installed; get it with: pip install 'llorch[golden]'" in result.stdout
    assert "NOT RUN: transformers: torch is not installed" in result.stdout
    assert_tells(result.stderr, "input", "1,18,35,11,28,5,21,38,15,31,8,25")


def test_a_prompt_that_does_not_fit_is_refused_before_an_engine_runs():
    result = invoke("verify", "story", "--against", "llamacpp", "--prompt", "a fox " * 300)
    assert_cli_refuses(result, 2, 512, "--tokens", "--prompt")


def test_color_is_for_terminals_and_on_request_only(monkeypatch: pytest.MonkeyPatch):
    from llorch.judging.verify import verify_stored

    monkeypatch.setattr("llorch.cli.verify_plan.verify_stored", lambda name: islice(verify_stored(name), 2))
    for name, colored in (("", False), ("FORCE_COLOR", True), ("NO_COLOR", False)):  # each added to those before
        monkeypatch.setenv(name or "_", "1")
        assert ("\x1b[32m" in invoke("verify", "micro-llama3").stdout) == colored


@pytest.mark.live
def test_a_built_in_model_agrees_with_an_engine_that_runs_now():
    done = spawn("verify", "micro-llama", "--against", "llamacpp", "--tokens", TOKENS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("micro-llama   one reference engine: llamacpp\n")
    assert re.search(r"near \d+ %, far \d+ %", done.stdout)
    assert "\nthreads: " in done.stdout
    assert "converted" not in done.stdout
    assert done.stderr == ""


@pytest.mark.live
def test_one_token_is_enough_to_run_but_not_to_show_every_mistake():
    result = invoke("verify", "micro-llama", "--against", "llamacpp", "--tokens", "7")
    assert result.exit_code == 0, result.stdout
    assert_tells(result.stderr, "1 distinct", 8)


@pytest.mark.live
def test_verify_with_a_missing_engine_uses_the_other_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = write_folder(tmp_path / "tiny", random_tensors("llama"))
    result = invoke("verify", str(folder), "--tokens", TOKENS)
    assert result.exit_code == 3, result.stdout
    assert "tiny   one reference engine: llamacpp" in result.stdout
    assert "NOT RUN: transformers" in result.stdout
    assert " 0 failed" in result.stdout
    assert "converted" in result.stdout  # the limit of what is shown of a file


def test_training_is_shown_beside_peft_and_a_missing_golden_of_it_is_not_run(
    detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from llorch.judging.expectations.training import verify_training_stored
    from llorch.runtime.builtin import goldens_folder

    (header,) = [line for line in detail.splitlines() if line.startswith("checkpoint ") and " peft " in line]
    assert "transformers" not in header
    assert "18  second_moment" in detail
    assert "\n18 parameters: " in detail
    shutil.copytree(goldens_folder() / "micro-qwen3", tmp_path / "micro-qwen3")
    (tmp_path / "micro-qwen3" / "training.json").unlink()
    monkeypatch.setattr("llorch.judging.expectations.training.goldens_folder", lambda: tmp_path)
    monkeypatch.setattr("llorch.cli.verify_plan.verify_training_stored", verify_training_stored)
    result = invoke("verify", "micro-qwen3", *ALONE)
    assert result.exit_code == 3
    assert_tells(result.stdout, "training.json", "reference_outputs/regenerate.py")

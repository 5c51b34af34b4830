"""`llorch verify --backend torch`: the report, what was not run, the exit codes and the JSON."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints 14 to 20 judge all of them, every type of packed matrices, and long contexts."""
    from llorch.judging.expectations import packed
    from llorch.judging.expectations.long_contexts import LongSuite
    from llorch.judging.runners import torch
    from llorch.judging.runners import training_torch as torch_runner

    monkeypatch.setattr(torch, "VARIANTS", {suffix: torch.VARIANTS[suffix] for suffix in ("", "-batch")})
    monkeypatch.setattr(torch_runner, "VARIANTS", {"-trainer": torch_runner.VARIANTS["-trainer"]})
    monkeypatch.setattr(packed, "packed_models", lambda target: ("Q8_0",))
    monkeypatch.setattr(LongSuite, "comparisons", lambda suite, runner: iter(()))


@pytest.mark.usefixtures("no_cuda", "few_variants")
def test_a_built_in_model_agrees_on_torch_and_cuda_is_counted_as_not_run():
    result = invoke("verify", "micro-llama3", "--backend", "torch", "--dtype", "float32")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("micro-llama3   torch-cpu-float32\n")
    assert "12  generation" in result.stdout
    *_, absent, last = result.stdout.splitlines()
    assert re.match(r"NOT RUN  torch-cuda-\*: .*\bCUDA\b", absent)
    assert last.startswith("1 model, ")
    assert last.endswith(" 0 failed, 1 backend not run")


@pytest.mark.slow
@pytest.mark.usefixtures("no_cuda", "few_variants")
def test_json_names_backends_and_what_was_not_run(monkeypatch: pytest.MonkeyPatch):
    from llorch.judging.runners import torch

    monkeypatch.delitem(torch.VARIANTS, "-batch")
    found = json.loads(invoke("verify", "micro-qwen3", "--backend", "torch", "--dtype", "bfloat16", "--json").stdout)
    from helpers.stored_goldens import weights_of

    from llorch.judging.runners.torch import variants_for
    from llorch.judging.runners.training_torch import VARIANTS
    from llorch.pytorch.device import target

    at = target("cpu", "bfloat16")
    assert found["summary"]["backends"] == sorted(
        {f"{at}{suffix}" for suffix in (*variants_for(at, weights_of("micro-qwen3")), *VARIANTS)}
    )
    assert {row["backend"] for row in found["comparisons"]} == set(found["summary"]["backends"])
    (absent,) = found["summary"]["backends_not_run"]
    assert (absent["backend"], "CUDA" in absent["reason"]) == ("torch-cuda-*", True)
    assert found["summary"]["ties"] > 0


@pytest.mark.usefixtures("few_variants")
def test_parallel_processes_give_the_same_comparisons_as_one(monkeypatch: pytest.MonkeyPatch):
    from llorch.cli import verify_plan
    from llorch.judging.runners import torch

    workers, n_processes = verify_plan.Workers, list[int]()
    monkeypatch.setattr(verify_plan, "Workers", lambda jobs, n: n_processes.append(n) or workers(jobs, n))
    monkeypatch.delitem(torch.VARIANTS, "-batch")
    words = ("verify", "micro-llama3", "--backend", "torch", "--json", "--threads")
    in_parallel, in_sequence = (json.loads(invoke(*words, n).stdout) for n in ("2", "1"))
    assert n_processes == [2, 1]
    assert in_parallel == in_sequence
    fields = ("checkpoint", "stage", "layer", "case", "engine", "backend", "mode")
    places = [tuple(row[field] for field in fields) for row in in_parallel["comparisons"]]
    assert len(places) == len({*places})


@pytest.mark.usefixtures("few_variants")
def test_packed_matrices_agree_on_torch():
    result = invoke("verify", "quantised", "--backend", "torch")
    assert result.exit_code == 0, result.stdout
    assert "quantised   torch-cpu-float32" in result.stdout
    assert "quantised   torch-cpu-bfloat16" in result.stdout
    assert "1 model, " in result.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
def test_detail_says_which_variant_a_row_is_of():
    result = invoke("verify", "micro-llama3", "--backend", "torch", "--dtype", "float32", "--detail")
    lines = [line for line in result.stdout.splitlines() if line.startswith("05 ")]
    assert lines
    assert all(", torch-cpu-float32" in line for line in lines)


@pytest.mark.usefixtures("no_cuda")
def test_a_device_that_is_not_here_is_never_replaced():
    result = invoke("verify", "micro-llama", "--device", "cuda", "--kernels", "own")
    assert_cli_refuses(result, 3, "CUDA")


def test_without_torch_the_command_that_brings_it_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = invoke("verify", "micro-llama", "--backend", "torch")
    assert_cli_refuses(result, 3, "torch", "pip install 'llorch[torch]'")


def test_a_missing_golden_is_not_run_and_never_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.judging.verify.goldens_folder", lambda: tmp_path)
    result = invoke("verify", "micro-llama", "--backend", "torch", "--dtype", "float32")
    assert (result.exit_code, result.stdout.count("- NOT RUN")) == (3, 20)


@pytest.mark.live
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_agrees_with_engines_that_run_now(dtype: str):
    words = f"micro-qwen2 --backend torch --dtype {dtype} --against llamacpp --against transformers"
    result = invoke("verify", *words.split(), "--tokens", "3,1,4,15,9,2,6,5")
    assert result.exit_code == 0, result.stdout
    assert f"micro-qwen2   torch-cpu-{dtype}\n" in result.stdout
    assert " 0 failed" in result.stdout

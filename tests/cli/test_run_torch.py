"""`llorch run --backend torch`."""

import json

import pytest
import torch
from command_line import invoke, spawn

START = "Once upon a time"
TORCH = ("--backend", "torch")


def test_the_text_is_that_of_the_numpy_path():
    plain = invoke("run", "story", START, "-n", "12")
    on_torch = invoke("run", "story", START, "-n", "12", *TORCH)
    assert (on_torch.stdout, on_torch.stderr, on_torch.exit_code) == (plain.stdout, "", 0)


def test_a_seed_draws_the_same_text_on_both_backends():
    how = ("run", "story", START, "-n", "20", "-t", "1.2", "--top-p", "0.9", "--seed", "4")
    assert invoke(*how, *TORCH).stdout == invoke(*how).stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_dtype_can_be_asked_for(dtype: str):
    result = invoke("run", "story", START, "-n", "5", *TORCH, "--device", "cpu", "--dtype", dtype, "-v")
    assert (result.stdout, result.exit_code) == (", there was a little\n", 0)
    assert result.stderr.startswith(f"story, torch-cpu-{dtype}: prompt 5 tokens")


def test_json_and_stop_strings_work_as_in_numpy():
    how = ("run", "story", START, "-n", "12", "--stop", " boy", "--json")
    ours, theirs = ([json.loads(line) for line in invoke(*how, *more).stdout.splitlines()] for more in (TORCH, ()))
    assert [(t["id"], t["text"], t["finish"]) for t in ours] == [(t["id"], t["text"], t["finish"]) for t in theirs]
    assert ours[-1]["finish"] == "stop"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--device", "cpu"], "--device goes with --backend torch"),
        (["--dtype", "float32"], "--dtype goes with --backend torch"),
        (["--compile"], "--compile goes with --backend torch"),
        ([*TORCH, "--numerics", "ggml"], "--numerics ggml goes with --backend numpy"),
        ([*TORCH, "--kv-cache", "f16"], "--kv-cache f16 goes with --backend numpy"),
        ([*TORCH, "--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_options_that_mean_nothing_to_the_backend_are_usage_errors(options: list[str], problem: str):
    result = invoke("run", "story", START, "-n", "1", *options)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_device_without_a_meaning_is_one_line():
    result = invoke("run", "story", START, *TORCH, "--device", "gpu")
    assert (result.exit_code, result.stderr) == (2, "llorch: device: expected cpu, cuda or cuda:N, got 'gpu'\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_exit_code_3_and_one_line():
    result = invoke("run", "story", START, *TORCH, "--device", "cuda")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("llorch: device cuda: ")
    assert result.stderr.count("\n") == 1


def test_it_runs_as_a_program():
    done = spawn("run", "story", START, "-n", "5", *TORCH)
    assert (done.stdout, done.stderr, done.returncode) == (", there was a little\n", "", 0)

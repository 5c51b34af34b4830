"""`llorch run`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders.random_adapters import random_adapter
from helpers.command_line import REPOSITORY, invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells

import llorch
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.model.model import load

START = "Once upon a time"


def test_the_text_is_that_of_the_python_interface():
    text = "".join(token.text for token in llorch.load("story").generate(START, max_tokens=12))
    assert invoke("run", "story", START, "-n", "12").stdout == text + "\n"


def test_a_prompt_on_stdin_loses_only_its_last_line_end():
    by_argument = invoke("run", "story", START, "-n", "8").stdout
    assert invoke("run", "-n", "8", stdin=START + "\n").stdout == by_argument
    with_line_end = invoke("run", "story", START + "\n", "-n", "8").stdout
    assert invoke("run", "-n", "8", stdin=START + "\n\n").stdout == with_line_end


def test_stdin_is_left_to_the_caller_where_there_is_a_prompt():
    loop = f"printf 'one\\ntwo\\n' | while read line; do {sys.executable} -m llorch run story \"$line\" -n 1; done"
    done = subprocess.run(["sh", "-c", loop], capture_output=True, check=True, cwd=REPOSITORY, text=True)
    assert len(done.stdout.splitlines()) == 2
    assert invoke("run", "story", "-", "-n", "8", stdin=START).stdout == invoke("run", "story", START, "-n", "8").stdout


def test_json_is_one_line_per_token_and_the_last_says_why():
    tokens = [json.loads(line) for line in invoke("run", "story", START, "-n", "6", "--json").stdout.splitlines()]
    assert [token["finish"] for token in tokens] == [None] * 5 + ["length"]
    assert all(token.keys() == {"id", "text", "logprob", "finish"} and token["logprob"] <= 0 for token in tokens)
    assert "".join(token["text"] for token in tokens) + "\n" == invoke("run", "story", START, "-n", "6").stdout


def test_the_same_seed_draws_the_same_text_and_another_seed_another():
    def text(seed: str) -> str:
        return invoke("run", "story", START, "-n", "20", "-t", "1.5", "--seed", seed).stdout

    assert text("3") == text("3") != text("4")


def test_text_ends_before_a_stop_string():
    whole = invoke("run", "story", START, "-n", "30").stdout
    assert "." in whole
    stopped = invoke("run", "story", START, "-n", "30", "--stop", "nowhere", "--stop", ".").stdout
    assert stopped == whole[: whole.index(".")] + "\n"


def test_filters_without_a_temperature_are_remarked_upon():
    result = invoke("run", "story", START, "-n", "2", "--top-k", "5")
    assert_tells(result.stderr, "temperature 0")
    assert invoke("run", "story", START, "-n", "2", "--top-k", "5", "-t", "1").stderr == ""


def test_a_full_context_is_remarked_upon():
    result = invoke("run", "story", "fox " * 500, "-n", "100", "--ignore-eos")
    assert result.exit_code == 0
    assert_tells(result.stderr, "context", 512, "full")


def test_verbose_tells_the_rates():
    result = invoke("run", "story", START, "-n", "3", "-v")
    assert result.stdout == invoke("run", "story", START, "-n", "3").stdout
    assert "tokens/s" in result.stderr
    assert "story: prompt 5 tokens in" in result.stderr
    assert "; 2 more tokens in" in result.stderr
    assert "end: length" in result.stderr


def test_text_that_is_not_utf8_is_refused_in_one_line():
    done = spawn("tokenize", "story", "caf\udce9")
    assert_cli_refuses(done, 2)
    assert done.stderr.startswith("llorch: ")


def test_a_prompt_without_a_model_is_named_as_an_unknown_model():
    result = invoke("run", START)
    assert_cli_refuses(result, 3, "model", "story")
    assert repr(START) in result.stderr


BACKENDS = pytest.mark.parametrize("backend", ["numpy", "torch"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT directory, one that names another base, and a GGUF file, all of one adapter for `story`."""
    made, model = tmp_path_factory.mktemp("adapters"), load("story")
    adapter, base = random_adapter(model.config, lora_alpha=1.0), identity_of(model.weights)
    write_peft(adapter, made / "peft", base=base)
    write_peft(adapter, made / "foreign", base=replace(base, vectors="0" * 64))
    write_lora_gguf(adapter, made / "lora.gguf", model.config)
    return made


@BACKENDS
def test_the_text_is_that_of_the_adapter_and_stderr_says_what_is_known_of_its_base(backend: str, folder: Path):
    model = load("story")
    model.add_adapter("mine", folder / "peft")
    expected = "".join(token.text for token in model.generate(START, max_tokens=12, adapter="mine"))
    result = invoke("run", "story", START, "-n", "12", "--backend", backend, "--adapter", str(folder / "peft"))
    assert (result.stdout, result.exit_code) == (expected + "\n", 0)
    assert result.stderr.startswith(f"{folder / 'peft'}: base: the same ")
    assert result.stderr.count("\n") == 1
    assert result.stdout != invoke("run", "story", START, "-n", "12").stdout


@BACKENDS
def test_a_gguf_adapter_makes_the_same_text(backend: str, folder: Path):
    both = [
        invoke("run", "story", START, "-n", "12", "--backend", backend, "--adapter", str(folder / name))
        for name in ("peft", "lora.gguf")
    ]
    assert both[0].stdout == both[1].stdout
    assert "base: unknown" in both[1].stderr


@BACKENDS
def test_an_adapter_of_another_base_is_refused_until_any_will_do(backend: str, folder: Path):
    how = ("run", "story", START, "-n", "3", "--backend", backend, "--adapter", str(folder / "foreign"))
    refused, taken = invoke(*how), invoke(*how, "--any-base")
    assert_cli_refuses(refused, 2, folder / "foreign", "BaseMismatch")
    assert taken.exit_code == 0
    assert "base: another base" in taken.stderr


def test_an_adapter_of_a_model_of_other_shapes_is_refused(folder: Path):
    result = invoke("run", "micro-llama", START, "--adapter", str(folder / "peft"))
    assert_cli_refuses(result, 2, folder / "peft", "BaseMismatch", "micro-llama.gguf")


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


@pytest.mark.slow_cases("torch")  # which it imports
@pytest.mark.parametrize("backend", [(), TORCH], ids=["numpy", "torch"])
def test_it_runs_as_a_program_and_prints_nothing_else(backend: tuple[str, ...]):
    done = spawn("run", "story", START, "-n", "5", *backend)
    assert (done.stdout, done.stderr, done.returncode) == (", there was a little\n", "", 0)

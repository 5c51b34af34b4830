"""`--numerics`, `--kv-cache` and `--weights` on the command line."""

import json
import re
import struct
from pathlib import Path
from typing import NoReturn

import pytest
from builders.quantised_folders import FOLDERS
from builders.random_adapters import random_adapter
from helpers.command_line import invoke
from helpers.ggml_kernels import NEEDS_GGML
from helpers.refusals import assert_cli_refuses, refuses

from llorch.cli.inputs import say_plan
from llorch.files import GGUFFile, open_weights
from llorch.files.export import write_gguf
from llorch.files.gguf import open_gguf
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.model import load
from llorch.ops.compiled.ggml import NoKernels
from llorch.ops.numerics import GGML_KERNELS, SCHEME
from llorch.runtime.builtin import builtin_path

TOKENS = "--tokens=5,17,33,60,2,42,8,90,71,29"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model("Q4_K_M", tmp_path_factory.mktemp("model")))


@pytest.mark.live
def test_a_quantised_file_is_verified_as_llama_cpp_computes_it(path: str):
    result = invoke("verify", path, TOKENS)
    assert result.exit_code == 0
    assert "numerics ggml; Q4_K, Q6_K: inputs rounded to Q8_K" in result.stdout
    assert re.search(r"\d values flip; .* \d\.\de-\d\d", result.stdout)
    assert "Q4_K_M: weights: 0.00 GB Q4_K, 0.00 GB Q6_K; decoded at load, needs about" in result.stderr
    assert "NOT RUN" not in result.stdout


@pytest.mark.live
def test_json_counts_the_flips_of_every_stage(path: str):
    result = invoke("verify", path, TOKENS, "--kv-cache", "f16", "--numerics", "ggml", "--json")
    rows = json.loads(result.stdout)["comparisons"]
    assert {row["backend"] for row in rows if row["mode"] != "exact"} == {"numpy-ggml"}
    assert sum(row["flips"] for row in rows) > 0


@pytest.mark.live
def test_the_residency_can_be_chosen(path: str):
    result = invoke("verify", path, TOKENS, "--weights", "packed")
    assert result.exit_code == 0
    assert "packed" in result.stderr


@pytest.mark.live
def test_exact_numerics_show_both_engines_the_decoded_weights(path: str):
    result = invoke("verify", path, TOKENS, "--numerics", "exact")
    assert result.exit_code == 0
    assert "inputs rounded" not in result.stdout
    assert "one reference engine" not in result.stdout


@pytest.mark.live
@NEEDS_GGML
def test_verify_compares_ggml_s_kernels_with_llama_cpp_and_with_llorch_s_own_form(path: str):
    result = invoke("verify", path, TOKENS, "--kernels", "ggml", "--json")
    assert result.exit_code == 0
    rows = [row for row in json.loads(result.stdout)["comparisons"] if row["mode"] == "isolated"]
    stages = {row["stage"] for row in rows if row["engine"] == "own-form"}
    assert {"q_proj", "ffn_out", "logits"} < stages
    for engine in ("llamacpp", "own-form", "own-form-float64"):
        places = {(row["case"], row["backend"]) for row in rows if row["engine"] == engine and row["stage"] in stages}
        assert places == {("near", "numpy-ggml-kernels"), ("far", "numpy-ggml-kernels")}
    assert "packed, multiplied by ggml's kernels" in result.stderr


@NEEDS_GGML
def test_verify_compares_ggml_s_kernels_with_the_goldens_of_quantised_types(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.verify_plan.MODELS", {"Q4_0": MODELS["Q4_0"]})
    result = invoke("verify", "--kernels", "ggml", "-v")
    assert result.exit_code == 0
    assert "numerics ggml by ggml's kernels; 1 micro models" in result.stdout
    assert result.stdout.startswith("quantised")


@pytest.mark.parametrize("model", ["{path}", "quantised", ""])
def test_verify_says_why_ggml_s_kernels_do_not_run(path: str, model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.ops.compiled.ggml.ggml_kernels", no_kernels)
    monkeypatch.setattr("llorch.files.kernel_check.ggml_kernels", no_kernels)
    words = [model.format(path=path), TOKENS] if "path" in model else [model] if model else []
    result = invoke("verify", *words, "--kernels", "ggml", "-v")
    assert result.exit_code == 3
    assert "NOT RUN" in result.stdout
    assert "ggml's kernels: no library" in result.stdout


def no_kernels() -> NoReturn:
    raise NoKernels("no library")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["micro-llama", "--kernels", "ggml"], ("micro-llama: ", "goldens", "--against llamacpp")),
        (["{path}", TOKENS, "--kernels", "ggml", "--numerics", "exact"], ("--kernels ggml", "--numerics ggml")),
        (["{path}", TOKENS, "--kernels", "ggml", "--against", "transformers"], ("{path}: --kernels ggml", ".gguf")),
        (["{path}", TOKENS, "--kernels", "ggml", "--backend", "torch"], ("--kernels ggml", "--backend numpy")),
        (["micro-llama", "--numerics", "ggml"], ("micro-llama: ", "goldens", "--against llamacpp")),
        (["micro-llama", "--kv-cache", "f16"], ("micro-llama: ", "goldens", "--against llamacpp")),
        (["{path}", TOKENS, "--weights", "packed", "--numerics", "exact"], ("--weights", "--numerics ggml")),
        (["{path}", TOKENS, "--kv-cache", "f16", "--numerics", "exact"], ("--kv-cache f16", "--numerics ggml")),
        (["{path}", TOKENS, "--numerics", "ggml", "--against", "transformers"], ("{path}: --numerics ggml", ".gguf")),
    ],
)
def test_incompatible_options_are_a_usage_error(path: str, arguments: list[str], facts: tuple[str, ...]):
    result = invoke("verify", *(a.format(path=path) for a in arguments))
    assert_cli_refuses(result, 2, *(fact.format(path=path) for fact in facts))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model `story` in Q8_0."""
    weights = open_weights(builtin_path("story"))
    assert isinstance(weights.source, GGUFFile)
    vocabulary = {key: value for key, value in weights.source.metadata.items() if key.startswith("tokenizer.")}
    path = tmp_path_factory.mktemp("story") / "story.gguf"
    write_gguf(weights, path, ggml_type=GGMLType.Q8_0, tokenizer_metadata=vocabulary)
    return str(path)


def test_run_takes_the_numerics_and_says_where_the_weights_lie(story: str):
    result = invoke("run", story, "Once upon a time", "-n", "4", "--numerics", "ggml", "--weights", "packed")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert "GB Q8_0; packed, " in result.stderr


def run(story: str, *words: str) -> tuple[str, str]:
    """Return the numerics of a run, by --json, and its stderr."""
    result = invoke("run", story, "Once upon a time", "-n", "2", "--json", "-v", *words)
    assert result.exit_code == 0
    return json.loads(result.stdout.splitlines()[-1])["numerics"], result.stderr


BY_GGML = "ggml by ggml's kernels"


@NEEDS_GGML
@pytest.mark.parametrize(
    ("words", "numerics"),
    [
        ([], BY_GGML), (["--weights", "packed"], BY_GGML), (["--weights", "decoded"], "exact"),
        (["--numerics", "exact"], "exact"), (["--numerics", "ggml"], "ggml"), (["--impl", "reference"], "exact"),
        (["--backend", "numpy", "--kernels", "own"], "exact"), (["--kernels", "ggml"], BY_GGML),
        (["--kernels", "ggml", "--kv-cache", "f16"], "ggml with a f16 cache by ggml's kernels"),
    ],
)  # fmt: skip
def test_run_takes_ggml_s_kernels_for_a_large_quantised_file_and_names_them(
    story: str, words: list[str], numerics: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llorch.cli.inputs.is_small", lambda n: False)
    chosen, stderr = run(story, *words)
    assert chosen == numerics
    assert ("packed, multiplied by ggml's kernels" in stderr) == numerics.endswith("kernels")
    assert ("kernels: ggml 0." in stderr) == numerics.endswith("kernels")


@NEEDS_GGML
def test_an_adapter_works_on_ggml_s_kernels(story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = load(story, numerics=GGML_KERNELS)
    adapter = random_adapter(model.config, lora_alpha=1.0)
    write_peft(adapter, tmp_path / "peft", base=identity_of(model.weights))
    model.add_adapter("mine", tmp_path / "peft")
    text = "".join(token.text for token in model.generate("Once upon a time", max_tokens=8, adapter="mine"))
    monkeypatch.setattr("llorch.cli.inputs.is_small", lambda n: False)
    words = ("run", story, "Once upon a time", "-n", "8")
    result = invoke(*words, "--adapter", str(tmp_path / "peft"))
    assert "multiplied by ggml's kernels" in result.stderr
    assert result.stdout == text + "\n" != invoke(*words).stdout


@NEEDS_GGML
def test_chat_takes_ggml_s_kernels_and_names_them(story: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.inputs.is_small", lambda n: False)
    result = invoke("chat", story, "-n", "4", stdin="Hello\n")
    assert result.exit_code == 0
    assert "multiplied by ggml's kernels" in result.stderr


def test_a_small_model_and_a_file_of_floats_are_computed_exactly(story: str, monkeypatch: pytest.MonkeyPatch):
    assert run(story)[0] == "exact"
    monkeypatch.setattr("llorch.cli.inputs.is_small", lambda n: False)
    assert run("story")[0] == "exact"


def test_run_says_why_it_is_slower_without_ggml_s_kernels(story: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.inputs.is_small", lambda n: False)
    monkeypatch.setattr("llorch.files.kernel_check.ggml_kernels", no_kernels)
    numerics, stderr = run(story)
    assert numerics == "exact"
    assert "slower than ggml's kernels: no library" in stderr
    assert "kernels: llorch's, numerics exact" in stderr
    assert_cli_refuses(invoke("run", story, "a", "--kernels", "ggml"), 2, "no library")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--backend", "torch"], ("--kernels ggml", "--backend numpy")),
        (["--numerics", "exact"], ("--kernels ggml", "--numerics ggml")),
        (["--weights", "decoded"], ("--kernels ggml", "--weights decoded")),
    ],
)
def test_options_that_contradict_ggml_s_kernels_are_a_usage_error(story: str, words: list[str], facts: tuple[str, ...]):
    assert_cli_refuses(invoke("run", story, "a", "--kernels", "ggml", *words), 2, *facts)


@pytest.mark.parametrize("kind", [GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.F64], ids=lambda kind: kind.name)
@pytest.mark.parametrize("words", [[], ["--numerics", "ggml"]], ids=["by default", "asked for"])
def test_a_type_that_llama_cpp_has_no_product_for_is_refused_by_name(tmp_path: Path, kind: GGMLType, words: list[str]):
    path = write_model("Q8_0", tmp_path)
    with open_gguf(path) as file:
        last = list(file.tensors.values())[-1]
    content = path.read_bytes()
    at = content.index(last.name.encode()) + len(last.name) + 4 + 8 * len(last.shape)  # behind the dimensions
    grown = b"\1" * (8 * last.shape[0] * last.shape[1])  # zeros would be an interrupted download
    path.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :] + grown)
    result = invoke("verify", str(path), TOKENS, *words)
    assert_cli_refuses(result, 2, f"llorch: {path}: Unsupported: ", last.name, kind.name, "llama.cpp")


@pytest.mark.parametrize("model", ["micro-llama", str(FOLDERS / "ct-w8a8")], ids=["built in", "folder"])
def test_verify_with_scheme_numerics_is_refused(model: str):
    assert_cli_refuses(invoke("verify", model, "--numerics", "scheme"), 2, "--numerics scheme")


def test_scheme_numerics_go_with_numpy():
    result = invoke("run", str(FOLDERS / "ct-w8a8"), "a", "--numerics", "scheme", "--backend", "torch")
    assert_cli_refuses(result, 2, "--numerics scheme", "--backend numpy")


@pytest.mark.parametrize("path", [builtin_path("micro-qwen3-vl-moe"), FOLDERS / "modelopt-fp8"], ids=["float", "fp8"])
def test_scheme_numerics_of_a_model_without_a_known_scheme_are_refused(path: Path):
    with refuses("Unsupported"):
        load(path, numerics=SCHEME)


@pytest.mark.parametrize(("name", "noted"), [("ct-w8a8", False), ("gptq-4bit", True)])
def test_a_note_says_that_a_scheme_is_exact(name: str, noted: bool, capsys: pytest.CaptureFixture[str]):
    say_plan(load(FOLDERS / name, numerics=SCHEME))
    assert ("note: " in capsys.readouterr().err) == noted

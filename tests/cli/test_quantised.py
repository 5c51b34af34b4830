"""`--numerics`, `--kv-cache` and `--weights` on the command line."""

import json
import re
import struct
from pathlib import Path

import pytest
from builders.quantised_folders import FOLDERS
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, refuses

from llorch.cli.inputs import say_plan
from llorch.files import GGUFFile, open_weights
from llorch.files.export import write_gguf
from llorch.files.gguf import open_gguf
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import write_model
from llorch.model.model import load
from llorch.ops.numerics import SCHEME
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


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
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


def test_run_takes_the_numerics_and_says_where_the_weights_lie(tmp_path: Path):
    story = open_weights(builtin_path("story"))
    assert isinstance(story.source, GGUFFile)
    vocabulary = {key: value for key, value in story.source.metadata.items() if key.startswith("tokenizer.")}
    path = tmp_path / "story.gguf"
    write_gguf(story, path, ggml_type=GGMLType.Q8_0, tokenizer_metadata=vocabulary)
    result = invoke("run", str(path), "Once upon a time", "-n", "4", "--numerics", "ggml", "--weights", "packed")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert "GB Q8_0; packed, " in result.stderr


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

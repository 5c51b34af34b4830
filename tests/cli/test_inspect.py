"""`llorch inspect` and `llorch tokenize`."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.quantised_copies import quantised_copy
from builders.quantised_folders import FOLDERS, changed, tensors_of, written
from builders.tiny_models import random_tensors, write_file, write_folder
from builders.whole_folders import write_whole_folder
from click.testing import CliRunner
from helpers.command_line import invoke, spawn
from helpers.refusals import assert_cli_refuses, assert_tells

import llorch
from llorch.cli import main
from llorch.cli.contents import in_short
from llorch.files import GGUFFile
from llorch.files.convert import convert
from llorch.files.metadata import Cursor, StringArray, read_metadata
from llorch.files.quant import GGMLType


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A sound GGUF file of an architecture that llorch does not run, with a hostile text."""
    metadata: dict[str, object] = {"general.name": "[red]\x1b[2J" + "x" * 200}
    return write_file(tmp_path / "foreign.gguf", {"token_embd.weight": np.ones((3, 32), np.float32)}, metadata, "mamba")


def test_json_has_config_tokenizer_and_every_tensor():
    model = llorch.load("micro-qwen3")
    found = json.loads(invoke("inspect", "micro-qwen3", "--json").stdout)
    assert found["config"] == json.loads(json.dumps(asdict(model.config)))
    assert {tensor["name"]: tensor["shape"] for tensor in found["tensors"]} == {
        name: list(info.shape) for name, info in model.weights.source.tensors.items()
    }
    assert found["tokenizer"]["vocab_size"] == model.config.vocab_size
    assert found["problems"] == []


def test_settings_that_no_rule_reads_are_listed_with_their_values(tmp_path: Path):
    unread: dict[str, Any] = {"attention_dropout": 0.1, "num_experts": 4}
    rope_scaling = {"rope_type": "linear", "factor": 2, "x": 1}
    folder = write_folder(tmp_path / "m", random_tensors("llama"), **unread, rope_scaling=rope_scaling)
    found = json.loads(invoke("inspect", str(folder), "--json").stdout)
    unread |= {"rope_scaling.x": 1}
    assert found["unread"] == {"architectures": ["LlamaForCausalLM"]} | unread
    table = invoke("inspect", str(folder)).stdout
    assert all(re.search(rf"^{re.escape(key)} +{value}", table, re.MULTILINE) for key, value in unread.items())
    assert "hidden_size" not in found["unread"]


def test_settings_of_a_whole_model_and_of_a_file_that_no_rule_reads_are_listed(tmp_path: Path):
    whole = json.loads(invoke("inspect", "micro-qwen3-vl-moe", "--json").stdout)["unread"]
    assert "text_config.initializer_range" in whole
    assert not {"text_config.hidden_size", "text_config.eos_token_id", "image_token_id"} & whole.keys()
    source = llorch.load("micro-llama").weights.source
    assert isinstance(source, GGUFFile)
    metadata: dict[str, object] = {
        key: value for key, value in source.metadata.items() if isinstance(value, int | float | str)
    }
    metadata.pop("general.architecture")
    tensors = {name: np.array(source.array(name)) for name in source.tensors}
    path = write_file(tmp_path / "m.gguf", tensors, metadata | {"llama.odd_scale": 3})
    assert json.loads(invoke("inspect", str(path), "--json").stdout)["unread"] == {"llama.odd_scale": 3}


def test_tables_show_a_float32_of_a_file_as_the_decimal_that_it_was():
    table = invoke("inspect", "micro-qwen3.5").stdout
    assert re.search(r"^rms_norm_eps +1e-06\b", table, re.MULTILINE)
    assert re.search(r"^qwen35.attention.layer_norm_rms_epsilon +1e-06\b", table, re.MULTILINE)
    metadata = json.loads(invoke("inspect", "micro-qwen3.5", "--json").stdout)["metadata"]
    assert metadata["qwen35.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-6))


def test_tables_name_config_tokenizer_metadata_and_tensors():
    result = invoke("inspect", "story")
    assert result.exit_code == 0
    for expected in ("hidden_size             192", "eos_token_ids", "llama.block_count", "blk.4.ffn_down.weight"):
        assert expected in result.stdout


def test_kinds_of_layers_are_shown_in_full():
    rows = [" ".join(line.split()) for line in invoke("inspect", "micro-llama4").stdout.splitlines()]
    for expected in (
        "layers 0,2 attention, norms of heads, chunk of 8192", "experts.n_experts 3", "experts.scaled_inputs True",
        "temperature.floor 8192", "rotary_dim 8",
    ):  # fmt: skip
        assert expected in rows, rows[:60]
    assert "layers all: attention" in " ".join(invoke("inspect", "story").stdout.split())


def test_a_file_that_llorch_refuses_is_shown_and_then_refused(foreign: Path):
    result = invoke("inspect", str(foreign))
    assert result.exit_code == 2
    assert "token_embd.weight F32  3 x 32" in result.stdout
    assert "mamba" in result.stderr
    assert "Unsupported" in result.stderr


ARRAYS = {
    "no numbers": np.array([], np.int32), "numbers": np.array([1, 2]), "floats": np.array([1.5, np.nan]),
    "bools": np.array([True, False]), "texts": StringArray(b"\0" * 8 + b"a", np.array([8, 17])),
}  # fmt: skip
MALFORMED = (
    "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template", "llama.embedding_length", "llama.rope.freq_base",
)  # fmt: skip


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("key", [*MALFORMED, "general.name", "general.license"])
def test_a_key_with_an_array_is_shown_and_named_where_it_matters(key: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    def changed(cursor: Cursor, count: int) -> tuple[dict, dict]:
        values, kinds = read_metadata(cursor, count)
        return values | {key: ARRAYS[kind]}, kinds

    monkeypatch.setattr("llorch.files.gguf.read_metadata", changed)
    result = invoke("inspect", "micro-llama3", "--json")
    assert (result.exit_code, "Traceback" in result.stderr) == (2 if key in MALFORMED else 0, False), result.stderr
    assert key in json.loads(result.stdout)["metadata"]
    assert (key in result.stderr) == (key in MALFORMED)


def test_a_folder_whose_weights_are_missing_shows_its_tokenizer(tmp_path: Path):
    folder = write_whole_folder(tmp_path / "model", "llama-bpe")
    (folder / "model.safetensors").unlink()
    result = invoke("inspect", str(folder), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["tensors"], len(found["problems"])) == (2, [], 1)
    assert found["tokenizer"]["bos_token_id"] == 260


def test_a_text_of_the_file_cannot_style_the_output_or_move_the_cursor(foreign: Path):
    done = spawn("inspect", str(foreign), FORCE_COLOR="1", COLUMNS="200")
    assert "[red]\\x1b[2J" in done.stdout
    assert "\x1b[2J" not in done.stdout


def test_a_folder_without_a_vocabulary_is_no_problem(tmp_path: Path):
    folder = write_folder(tmp_path / "tiny", random_tensors("qwen3"), "qwen3")
    result = invoke("inspect", str(folder))
    assert result.exit_code == 0, result.stderr
    assert "Hugging Face folder   25 tensors" in result.stdout
    assert "tokenizer: none" in result.stdout


def test_every_missing_tensor_of_a_folder_is_named(tmp_path: Path):
    tensors = random_tensors("llama")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    result = invoke("inspect", str(write_folder(tmp_path / "tiny", tensors)), "--json")
    assert result.exit_code == 2
    assert "2 Missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in result.stderr
    assert json.loads(result.stdout)["config"] is None


# Type, matrices, bits per weight: bits of a code, and 16 bits of a scale for each group of columns.
SUMMARIES = {
    "ct-mixed": [("FP8", 3, 8.2), ("compressed-tensors 4-bit", 3, 4.5), ("BF16", 3, 16)],
    "ct-fp8-static-kv": [("FP8", 7, 8 + 8 * 14 / 43008), ("BF16", 2, 16)],
    "mlx-4bit": [("MLX 4-bit", 9, 5)],
    "bnb-nf4-double": [("NF4", 7, 4.748), ("BF16", 2, 16)],
    "modelopt-nvfp4": [("NVFP4", 7, 4.505), ("BF16", 2, 16)],
}  # the type up to its comma


def summary_of(path: Path) -> dict:
    result = invoke("inspect", str(path), "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["quantisation"]


@pytest.mark.parametrize("name", SUMMARIES)
def test_inspect_quantised_folder_counts_matrices_and_bits_of_each_type(name: str):
    made = summary_of(FOLDERS / name)
    found = [(one["type"].partition(",")[0], one["n_matrices"]) for one in made["types"]]
    assert found == [row[:2] for row in SUMMARIES[name]]
    bits = [one["bits_per_weight"] for one in made["types"]]
    np.testing.assert_allclose(bits, [row[2] for row in SUMMARIES[name]], atol=6e-4)
    assert made["bits_per_weight"] == pytest.approx(
        8 * sum(one["n_bytes"] for one in made["types"]) / sum(one["n_numbers"] for one in made["types"]), abs=6e-4
    )


def test_inspect_quantised_folder_names_modules_of_floats_and_roundings():
    made = summary_of(FOLDERS / "ct-fp8-static-kv")
    assert made["method"] == "compressed-tensors"
    assert made["not_quantised"] == ["lm_head", "model.embed_tokens"]
    assert made["activations"] == ["E4M3, static scale (7 times)"]
    assert made["kv_cache"] == ["E4M3, static scale (2 times)"]
    assert summary_of(FOLDERS / "gptq-4bit")["activations"] == []
    assert "quant_method" in summary_of(FOLDERS / "modelopt-nvfp4")["not_read"]
    text = " ".join(invoke("inspect", str(FOLDERS / "ct-mixed")).stdout.split())
    assert "compressed-tensors 4-bit, groups of 32 3 8,192 4,608 4.50" in text
    assert "model.layers.*.self_attn.o_proj" in text


def with_floats(folder: Path, modules: list[str]) -> None:
    """Give modules of a folder of compressed-tensors floats in place of codes, and name them in its settings."""
    tensors, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    for module in modules:
        n_out, n_in = tensors[f"{module}.weight"][1]
        tensors[f"{module}.weight"] = ("F32", [n_out, n_in], bytes(4 * n_out * n_in))
        del tensors[f"{module}.weight_scale"]
    config["quantization_config"]["ignore"] += modules
    written(folder, config, tensors)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([0], "model.layers.0.mlp.down_proj"),
        ([1, 2, 4], "model.layers.{1-2,4}.mlp.down_proj"),
        (range(5), "model.layers.*.mlp.down_proj (5 times)"),
    ],
    ids=str,
)
def test_inspect_names_the_layers_whose_modules_are_floats(layers: Iterable[int], expected: str, tmp_path: Path):
    folder = quantised_copy("story", tmp_path / "quantised")
    with_floats(folder, [f"model.layers.{layer}.mlp.down_proj" for layer in layers])
    lines = invoke("inspect", str(folder)).stdout.splitlines()
    (line,) = [one for one in lines if one.startswith("not quantised: ")]
    assert expected in line.removeprefix("not quantised: ").split(", ")


EXPERTS = [f"layers.{layer}.experts.{expert}.up" for layer in range(3) for expert in range(4)]


@pytest.mark.parametrize(
    ("meant", "expected"),
    [
        (EXPERTS, ["layers.*.experts.*.up (12 times)"]),
        (EXPERTS[:4], ["layers.0.experts.*.up (4 times)"]),
        (EXPERTS[::4], ["layers.*.experts.0.up (3 times)"]),
        (EXPERTS[1:4] + EXPERTS[5:8], ["layers.{0-1}.experts.{1-3}.up"]),
        (EXPERTS[:5], ["layers.0.experts.*.up (4 times)", "layers.1.experts.0.up"]),
        (["a{}b", "lm_head"], ["a{}b", "lm_head"]),
        ([], []),
    ],
    ids=str,
)
def test_names_in_short_stand_for_exactly_the_modules_meant(meant: list[str], expected: list[str]):
    assert in_short(meant, [*EXPERTS, "lm_head", "a{}b", "norm"]) == expected


@pytest.mark.parametrize(
    ("name", "codes"),
    [("bnb-int8", "int8"), ("bitnet-bitlinear", "int8"), ("fbgemm-fp8", "E4M3"), ("modelopt-fp8", "E4M3"),
     ("modelopt-nvfp4", "E2M1")],
)  # fmt: skip
def test_inspect_says_that_the_engine_rounds_activations_as_llorch_does_not(name: str, codes: str):
    text = invoke("inspect", str(FOLDERS / name)).stdout
    (line,) = [one for one in text.splitlines() if one.startswith("activations: ")]
    assert_tells(line, "engine", codes, "llorch")
    assert "Unsupported" not in text
    assert summary_of(FOLDERS / name)["activations"] == [codes]


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("Float8DynamicActivationFloat8WeightConfig", r"\D*engine.*\bE4M3\b"),
        ("Int8DynamicActivationIntxWeightConfig", r"\D*engine.*\bint8\b"),
        ("SomeNewConfig", "unknown: "),
        ("Int8WeightOnlyConfig", "not quantised"),
    ],
)
def test_inspect_reads_the_rounding_of_activations_of_a_torchao_config(kind: str, pattern: str, tmp_path: Path):
    config = {"default": {"_type": kind, "_version": 2, "_data": {}}}
    folder = changed(tmp_path, "torchao-int8", lambda q: q.update(quant_type=config))
    text = invoke("inspect", str(folder)).stdout
    assert re.search(f"^activations[^:]*: {pattern}", text, re.MULTILINE), text


def test_inspect_names_an_unexpected_tensor_of_integers_and_blames_no_dtype(tmp_path: Path):
    extra = {"model.extra": ("I32", [1], b"\0\0\0\0")}
    folder = changed(tmp_path, "gptq-4bit", tensors=lambda tensors: tensors.update(extra))
    result = invoke("inspect", str(folder), "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert_tells(problem, "1 Unexpected: model.extra")


def test_inspect_float_folder_has_no_quantisation(tmp_path: Path):
    convert(FOLDERS / "gptq-4bit", tmp_path / "floats")
    assert summary_of(tmp_path / "floats") is None
    assert json.loads(invoke("inspect", "story", "--json").stdout)["quantisation"] is None


def test_inspect_gguf_file_counts_matrices_and_bits_of_each_type(tmp_path: Path):
    convert(FOLDERS / "gptq-4bit", tmp_path / "m.gguf", ggml_type=GGMLType.Q4_0)
    made = summary_of(tmp_path / "m.gguf")
    assert [(one["type"], one["n_matrices"], one["bits_per_weight"]) for one in made["types"]] == [("Q4_0", 9, 4.5)]
    assert (made["method"], made["not_quantised"]) == ("ggml", [])


TEXT = "The fox\tate caf\u00e9 \U0001f98a."


def test_ids_are_those_of_the_tokenizer():
    found = json.loads(invoke("tokenize", "story", TEXT, "--json").stdout)
    assert found["ids"] == llorch.load("story").tokenizer.encode(TEXT)
    assert [token["id"] for token in found["tokens"]] == found["ids"]


def test_bytes_of_the_pieces_make_the_text():
    tokens = json.loads(invoke("tokenize", "story", TEXT, "--no-special", "--json").stdout)["tokens"]
    assert b"".join(bytes.fromhex(token["bytes"]) for token in tokens).decode() == TEXT


def test_a_piece_that_is_part_of_a_character_has_bytes_and_no_text():
    tokens = json.loads(invoke("tokenize", "story", "\U0001f98a", "--no-special", "--json").stdout)["tokens"]
    assert {token["text"] for token in tokens} == {None}
    assert "b'\\xf0'" in invoke("tokenize", "story", "\U0001f98a").stdout


def test_text_lists_one_id_and_one_quoted_piece_per_line():
    lines = invoke("tokenize", "story", "The fox\n").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ['"<|begin_of_text|>"', '"The"', '" fox"', '"\\n"']


@pytest.mark.parametrize(("flags", "n_begin"), [([], 1), (["--no-special"], 0), (["--parse-special"], 2)])
def test_the_text_of_a_control_token_stays_text_unless_asked_for(flags: list[str], n_begin: int):
    found = json.loads(invoke("tokenize", "story", "<|begin_of_text|>x", *flags, "--json").stdout)
    assert found["ids"].count(998) == n_begin


def test_text_may_come_from_stdin():
    assert invoke("tokenize", "story", stdin="The fox\n").stdout == invoke("tokenize", "story", "The fox").stdout


@pytest.mark.nightly_cases("chat-ascii", "chat-latin-1", "chat-utf-8")
@pytest.mark.parametrize("charset", ["utf-8", "latin-1", "ascii"])  # as the locale may say
@pytest.mark.parametrize("verb", ["run", "chat", "tokenize"])
def test_a_byte_on_stdin_that_is_not_utf8_is_named_with_its_offset_in_every_locale(verb: str, charset: str):
    result = CliRunner(charset=charset).invoke(main, [verb, "story"], input=b"caf\xc3\xa9\n \xe9")
    assert (result.exit_code, "Traceback" in result.stderr) == (2, False)
    assert_tells(result.stderr.splitlines()[-1], got=("0xe9", "offset 7"), where="stdin")


def test_text_on_stdin_is_utf8_whatever_the_locale_says():
    result = CliRunner(charset="latin-1").invoke(main, ["tokenize", "story", "--json"], input=b"caf\xc3\xa9\r\n!\n")
    assert json.loads(result.stdout)["ids"] == llorch.load("story").tokenizer.encode("caf\u00e9\n!")


@pytest.mark.parametrize(
    "words",
    [
        ("tokenize", "story", "{}"), ("run", "story", "{}"), ("run", "story", "x", "--stop", "{}"),
        ("run", "story", "--chat", "{}"), ("run", "story", "--chat", "x", "--system", "{}"),
        ("chat", "story", "--system", "{}"), ("trace", "story", "{}", "-o", "t.npz"),
        ("verify", "story", "--prompt", "{}"), ("diagnose", "dump", "--model", "story", "--prompt", "{}"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_byte_of_an_argument_that_is_not_utf8_is_named_with_its_offset(words: tuple[str, ...]):
    result = invoke(*(word.replace("{}", "caf\udce9") for word in words))
    assert_cli_refuses(result, 2, got=("0xe9", "offset 3"))


def test_stdin_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.inputs.MOST_STDIN", 1000)
    assert invoke("tokenize", "story", stdin="x" * 1000).exit_code == 0
    assert_cli_refuses(invoke("tokenize", "story", stdin="x" * 1001), 2, 1000, where="stdin")

import json
from pathlib import Path

import pytest
from helpers.refusals import Refusal, row

from llorch.files.hub.reference import Reference, find_gguf_files, is_folder, name_of, of_folder, read_shard_names

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("spec", "repo", "quant", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "", ""),
        ("org/name:Q4_K_M", "org/name", "Q4_K_M", ""),
        ("org/name@refs/pr/3", "org/name", "", "refs/pr/3"),
        (f"org/na.me:name-Q8_0.gguf@{COMMIT}", "org/na.me", "name-Q8_0.gguf", COMMIT),
    ],
)
def test_a_model_of_the_hub_is_read_and_written_back(spec: str, repo: str, quant: str, revision: str):
    found = Reference.parse(spec)
    assert found == Reference(repo, quant, revision)
    assert str(found) == spec


@pytest.mark.parametrize(
    "spec",
    ["story", "", "models/model.gguf", "a/model.safetensors", "./a/b", "../b", "/a/b", "~/b", "a/b/c", "a/b c", "a/",
     "/b", "a/b:", "a/b@", "a/b@/x", "a\\b", "a/b\n"],
)  # fmt: skip
def test_path_or_built_in_name_is_no_model_of_the_hub(spec: str):
    assert Reference.parse(spec) is None


def test_a_folder_of_the_cache_is_called_as_its_repository_and_any_other_as_itself(tmp_path: Path):
    snapshot = tmp_path / "models--org--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "x-Q8_0.gguf").touch()
    (tmp_path / "mine" / COMMIT).mkdir(parents=True)
    assert name_of(snapshot) == "org/a--b"
    assert name_of(snapshot / "x-Q8_0.gguf") == "x-Q8_0"
    assert name_of(tmp_path / "mine" / COMMIT) == COMMIT


FILES = (
    "README.md", "config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja",
    "original/consolidated.00.pth", "pytorch_model.bin", "onnx/model.onnx", "evil.py", "consolidated.safetensors",
)  # fmt: skip
GGUF = ("m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-bf16.gguf", "m-f16.gguf", "IQ4_K/m-IQ4_K.gguf", "mmproj-F16.gguf")
MORE_PARTS = [f"n-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
PARTS = [f"Q8_0/m-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]


def parts(quant: str, files: tuple[str, ...]) -> list[str]:
    return find_gguf_files(files, Reference("org/m", quant))


def meant(quant: str, files: tuple[str, ...] = GGUF) -> str:
    (name,) = parts(quant, files)
    return name


def test_only_model_files_of_a_folder_are_taken():
    taken = ["additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json", "tokenizer.json"]
    assert of_folder({*FILES, "model.safetensors"}, ()) == sorted([*taken, "model.safetensors"])
    shards = [f"model-{part}.safetensors" for part in (1, 2)]
    index = "model.safetensors.index.json"
    assert of_folder({*FILES, index, *shards, "model-9.safetensors"}, shards) == sorted([*taken, index, *shards])


def test_a_folder_has_a_configuration_and_weights_that_are_no_pickle():
    assert not is_folder(FILES)
    assert not is_folder({"model.safetensors"})
    assert is_folder({*FILES, "model.safetensors.index.json"})


def test_an_index_names_its_shards_once(tmp_path: Path):
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "1.safetensors"}}))
    assert read_shard_names(index) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize(
    ("quant", "name"),
    [("q4_k_m", "m-Q4_K_M.gguf"), ("Q4_K", "m-Q4_K.gguf"), ("F16", "m-f16.gguf"), ("BF16", "m-bf16.gguf"),
     ("IQ4_K", "IQ4_K/m-IQ4_K.gguf"), ("M-F16.gguf", "m-f16.gguf")],
)  # fmt: skip
def test_a_quantisation_is_a_whole_word_of_a_name(quant: str, name: str):
    assert meant(quant) == name


def test_the_only_file_needs_no_word():
    assert meant("", ("README.md", "m-Q8_0.gguf", "mmproj-F16.gguf")) == "m-Q8_0.gguf"


SEVERAL = ("IQ4_K/m-IQ4_K.gguf, m-Q4_K.gguf, m-Q4_K_M.gguf", "m-bf16.gguf, m-f16.gguf")  # but no mmproj
CANNOT_BE_CHOSEN = [
    row("-files0", lambda: meant("", GGUF), FileNotFoundError, "'org/m'", "several", "org/m:QUANT", *SEVERAL),
    row("Q8_0-files1", lambda: meant("Q8_0", ("a-Q8_0.gguf", "b-Q8_0.gguf")), FileNotFoundError, "'org/m:Q8_0'",
        "several", "with org/m:Q8_0", "a-Q8_0.gguf, b-Q8_0.gguf"),
    row("Q3_K-files2", lambda: meant("Q3_K", GGUF), FileNotFoundError, "'org/m:Q3_K'", "of Q3_K", "with org/m:Q3_K",
        *SEVERAL),
    row("Q8_0-files3", lambda: meant("Q8_0", (PARTS[1],)), FileNotFoundError, "'org/m:Q8_0'", PARTS[1], "2 parts"),
    row("Q8_0-files7", lambda: parts("Q8_0", (*PARTS, *MORE_PARTS)), FileNotFoundError, "'org/m:Q8_0'", "several",
        PARTS[0], MORE_PARTS[0]),
    row("-files4", lambda: meant("", ("pytorch_model.bin", "config.json")), FileNotFoundError, "'org/m'",
        "pickles (pytorch_model.bin)"),
    row("-files5", lambda: meant("", ("README.md",)), FileNotFoundError, "'org/m'", "config.json", "model.safetensors",
        "GGUF"),
    row("Q8_0-files6", lambda: meant("Q8_0", FILES), FileNotFoundError, "'org/m:Q8_0'", "GGUF", ":QUANT"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", CANNOT_BE_CHOSEN)
def test_what_cannot_be_chosen_is_said(refusal: Refusal):
    refusal.check()


def test_files_of_gguf_lists_all_parts_in_order():
    assert parts("Q8_0", (PARTS[1], "README.md", PARTS[0], "m-Q4_K.gguf")) == PARTS


def test_a_whole_file_is_taken_before_one_in_parts():
    assert meant("Q8_0", (*PARTS, "m-Q8_0.gguf")) == "m-Q8_0.gguf"

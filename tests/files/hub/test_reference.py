from pathlib import Path

import pytest

from llorch.files.hub.reference import Reference, name_of

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
def test_what_can_only_be_a_path_or_a_name_is_no_model_of_the_hub(spec: str):
    assert Reference.parse(spec) is None


def test_a_folder_of_the_cache_is_called_as_its_repository_and_any_other_as_itself(tmp_path: Path):
    snapshot = tmp_path / "models--org--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "x-Q8_0.gguf").touch()
    (tmp_path / "mine" / COMMIT).mkdir(parents=True)
    assert name_of(snapshot) == "org/a--b"
    assert name_of(snapshot / "x-Q8_0.gguf") == "x-Q8_0"
    assert name_of(tmp_path / "mine" / COMMIT) == COMMIT

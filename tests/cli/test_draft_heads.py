"""Draft heads, which llorch does not compute: each command that leaves one out names it and counts its tensors."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import random_adapter
from builders.tiny_models import write_file
from helpers.command_line import invoke
from helpers.refusals import assert_tells

from llorch.files import open_gguf, open_weights
from llorch.files.convert import convert
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.runtime.builtin import builtin_path
from llorch.training.merge_files import merge

N_TENSORS = 15


def in_file(path: Path) -> Path:
    with open_gguf(builtin_path("micro-qwen3.5")) as source:
        metadata: dict[str, Any] = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in source.metadata.items()
            if not key.startswith(("tokenizer.", "general.architecture"))
        }
        tensors = {name: np.array(source.array(name)) for name in source.tensors}
    prefix, layers = "qwen35.", metadata["qwen35.attention.recurrent_layers"]
    metadata |= {f"{prefix}block_count": 3, f"{prefix}nextn_predict_layers": 1}
    metadata |= {f"{prefix}attention.recurrent_layers": [*layers, False]}
    head = {f"blk.2.nextn.part{number}.weight": np.ones((2, 2), np.float32) for number in range(N_TENSORS)}
    return write_file(path, tensors | head, metadata, "qwen35")


@pytest.fixture(params=["folder", "file"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A model with a draft head, and the names of its tensors."""
    if request.param == "file":
        return in_file(tmp_path / "model.gguf"), "blk.2.*"
    convert(builtin_path("micro-qwen3.5"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    head = {f"mtp.layers.0.part{number}.weight": np.ones((2, 2), np.float32) for number in range(N_TENSORS)}
    container.save_file(container.load_file(path) | head, path, {"format": "pt"})
    return tmp_path / "model", "mtp.*"


def assert_note(text: str, names: str) -> None:
    assert_tells(text, "draft head", N_TENSORS, names)


def test_verify_names_a_draft_head(model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    path, names = model
    for package in ("llama_cpp", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    assert_note(invoke("verify", str(path)).stdout, names)
    (note,) = json.loads(invoke("verify", str(path), "--json").stdout)["summary"]["notes"]
    assert note["model"] == path.name.removesuffix(".gguf")
    assert_note(note["note"], names)


def test_convert_names_a_draft_head(model: tuple[Path, str], tmp_path: Path):
    path, names = model
    for target in ("x.gguf", *(["folder-of-file"] if path.is_file() else [])):
        result = invoke("convert", str(path), str(tmp_path / target))
        assert result.exit_code == 0, result.stderr
        assert_note(result.stderr, names)
    result = invoke("convert", str(path), str(tmp_path / "y.gguf"), "--json")
    assert any(names in note for note in json.loads(result.stdout)["notes"])


def test_inspect_names_a_draft_head(model: tuple[Path, str]):
    path, names = model
    result = invoke("inspect", str(path), "--json")
    (note,) = json.loads(result.stdout)["notes"]
    assert_note(note, names)
    assert note in result.stderr


def test_run_names_a_draft_head(model: tuple[Path, str]):
    path, names = model
    assert_note(invoke("run", str(path), "x").stderr, names)


def test_merge_names_a_draft_head(model: tuple[Path, str], tmp_path: Path):
    path, names = model
    weights = open_weights(path)
    adapter = random_adapter(weights.config, target_modules=("q_proj",))
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    for target in ("merged.gguf", "merged"):
        notes = merge(path, tmp_path / "adapter", tmp_path / target, logits=False).notes
        assert sum(names in note for note in notes) == 1


def test_an_image_part_is_named(tmp_path: Path):
    result = invoke("inspect", "micro-qwen3-vl-moe", "--json")
    (note,) = json.loads(result.stdout)["notes"]
    assert_tells(note, "image part", "model.visual.*")
    assert any(tensor["name"].startswith("model.visual.") for tensor in json.loads(result.stdout)["tensors"])

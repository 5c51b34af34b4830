"""The base that an adapter was made for: recognised in both formats, refused when it is another, unknown when it is."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders.random_adapters import tiny_base
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import assert_tells, refuses

from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.files.quant import GGMLType
from llorch.lora.base import BaseIdentity, cached_identity, identity_of, require_base, require_name


def identity(path) -> BaseIdentity:
    return identity_of(open_weights(path))


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_a_folder_and_its_gguf_file_are_the_same_base(tmp_path, family, tied):
    base = tiny_base(tmp_path / "base", family, tied=tied)
    write_gguf(open_weights(base), tmp_path / "x.gguf")
    folder, file = identity(base), identity(tmp_path / "x.gguf")
    assert folder.digest == file.digest
    assert require_base(folder, file, where="a").kind == "same"


def test_quantised_copy_is_reported_as_unknown(tmp_path, base):
    write_gguf(open_weights(base), tmp_path / "x.gguf", ggml_type=GGMLType.Q8_0)
    status = require_base(identity(base), identity(tmp_path / "x.gguf"), where="a")
    assert status.kind == "unknown"
    assert_tells(status.message, "unknown", "F32 there", "F16, Q8_0 here")


@pytest.mark.parametrize(
    ("name", "changed_part"),
    [
        ("model.layers.1.mlp.down_proj.weight", "matrices"),
        ("model.norm.weight", "norms and biases"),
        ("lm_head.weight", "matrices"),
        ("rope_theta", "constants"),
    ],
)
def test_changed_number_changes_the_base_identity(tmp_path, name, changed_part):
    tensors, constants = random_tensors("llama"), {name: 5000.0} if changed_part == "constants" else {}
    made_for = identity(write_folder(tmp_path / "one", tensors))
    if not constants:
        tensors[name].reshape(-1)[5] = np.nextafter(tensors[name].reshape(-1)[5], np.float32(1))
    other = identity(write_folder(tmp_path / "other", tensors, "llama", **constants))
    with refuses("BaseMismatch", changed_part, tmp_path / "one", tmp_path / "other", where="adapter"):
        require_base(made_for, other, where="adapter")


@pytest.mark.parametrize(
    ("recorded_name", "base_path", "same"),
    [
        ("org/Some-Model", "/models/some_model", True),
        ("org/Some-Model", "/cache/models--org--some-model/snapshots/abc123", True),
        ("/old/place/base", "/new/place/base/", True),
        ("org/Some-Model", "some-model.gguf", True),
        ("org/Some-Model", "/models/other-model", False),
    ],
)
def test_name_without_hash_is_compared_by_its_last_part(recorded_name, base_path, same):
    if same:
        assert require_name(recorded_name, base_path, where="adapter").kind == "named"
        return
    with refuses("BaseMismatch", recorded_name, base_path, "--any-base", where="adapter"):
        require_name(recorded_name, base_path, where="adapter")


def test_an_adapter_that_names_no_base_is_unknown():
    assert require_name(None, "x", where="adapter").kind == "unknown"


def test_base_record_round_trips(tmp_path):
    one = identity(tiny_base(tmp_path / "base"))
    assert BaseIdentity.from_fields(json.loads(one.to_json()), tmp_path) == one


@pytest.fixture
def cached_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base that was digested once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "base", random_tensors("llama"))
    assert cached_identity(open_weights(folder)) == identity_of(open_weights(folder))
    return folder


def is_hashed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the base is hashed again; what comes of it is right in any case."""
    expected, calls = identity_of(open_weights(folder)), []
    monkeypatch.setattr("llorch.lora.base.identity_of", lambda weights: calls.append(1) or identity_of(weights))
    assert cached_identity(open_weights(folder)) == expected
    return bool(calls)


def test_the_same_files_are_read_once(cached_base: Path, monkeypatch: pytest.MonkeyPatch):
    assert not is_hashed_again(cached_base, monkeypatch)
    (entry,) = (cached_base.parent / "cache/llorch/bases").iterdir()
    assert json.loads(entry.read_text())["config"]


def test_in_place_change_is_detected_with_equal_size_and_time(cached_base: Path, monkeypatch: pytest.MonkeyPatch):
    file = cached_base / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(0.5).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert is_hashed_again(cached_base, monkeypatch)


def test_copy_and_changed_config_are_hashed_again(cached_base: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(cached_base, cached_base.parent / "copy")
    assert is_hashed_again(cached_base.parent / "copy", monkeypatch)
    config = json.loads((cached_base / "config.json").read_text())
    (cached_base / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert is_hashed_again(cached_base, monkeypatch)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x", "config": "y"}'])
def test_damaged_cache_entry_is_replaced(content: str, cached_base: Path, monkeypatch: pytest.MonkeyPatch):
    (entry,) = (cached_base.parent / "cache/llorch/bases").iterdir()
    entry.write_text(content)
    assert is_hashed_again(cached_base, monkeypatch)
    assert not is_hashed_again(cached_base, monkeypatch)


def test_unwritable_cache_is_no_error(cached_base: Path, monkeypatch: pytest.MonkeyPatch):
    (cached_base.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cached_base.parent / "file"))
    assert is_hashed_again(cached_base, monkeypatch)

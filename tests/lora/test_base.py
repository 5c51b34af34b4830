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
from llorch.lora.base import BaseIdentity, identity_of, remembered_identity, require_base, require_name


def identity(path) -> BaseIdentity:
    return identity_of(open_weights(path))


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_a_folder_and_its_gguf_file_are_the_same_base(tmp_path, family, tied):
    base = tiny_base(tmp_path / "base", family, tied=tied)
    write_gguf(open_weights(base), tmp_path / "x.gguf")
    folder, file = identity(base), identity(tmp_path / "x.gguf")
    assert folder.digest == file.digest
    assert require_base(folder, file, where="a").kind == "same"


def test_a_quantised_copy_is_unknown_and_says_so(tmp_path, base):
    write_gguf(open_weights(base), tmp_path / "x.gguf", ggml_type=GGMLType.Q8_0)
    status = require_base(identity(base), identity(tmp_path / "x.gguf"), where="a")
    assert status.kind == "unknown"
    assert_tells(status.message, "unknown", "F32 there", "F16, Q8_0 here")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.layers.1.mlp.down_proj.weight", "matrices"),
        ("model.norm.weight", "norms and biases"),
        ("lm_head.weight", "matrices"),
        ("rope_theta", "constants"),
    ],
)
def test_one_changed_number_makes_another_base(tmp_path, name, what):
    tensors, constants = random_tensors("llama"), {name: 5000.0} if what == "constants" else {}
    made_for = identity(write_folder(tmp_path / "one", tensors))
    if not constants:
        tensors[name].reshape(-1)[5] = np.nextafter(tensors[name].reshape(-1)[5], np.float32(1))
    other = identity(write_folder(tmp_path / "other", tensors, "llama", **constants))
    with refuses("BaseMismatch", what, tmp_path / "one", tmp_path / "other", where="adapter"):
        require_base(made_for, other, where="adapter")


@pytest.mark.parametrize(
    ("named", "opened", "same"),
    [
        ("org/Some-Model", "/models/some_model", True),
        ("org/Some-Model", "/cache/models--org--some-model/snapshots/abc123", True),
        ("/old/place/base", "/new/place/base/", True),
        ("org/Some-Model", "some-model.gguf", True),
        ("org/Some-Model", "/models/other-model", False),
    ],
)
def test_a_mere_name_is_compared_by_its_end(named, opened, same):
    if same:
        assert require_name(named, opened, where="adapter").kind == "named"
        return
    with refuses("BaseMismatch", named, opened, "--any-base", where="adapter"):
        require_name(named, opened, where="adapter")


def test_an_adapter_that_names_no_base_is_unknown():
    assert require_name(None, "x", where="adapter").kind == "unknown"


def test_the_record_is_read_back(tmp_path):
    one = identity(tiny_base(tmp_path / "base"))
    assert BaseIdentity.from_fields(json.loads(one.to_json()), tmp_path) == one


@pytest.fixture
def digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base that was digested once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "base", random_tensors("llama"))
    assert remembered_identity(open_weights(folder)) == identity_of(open_weights(folder))
    return folder


def is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the base is hashed again; what comes of it is right in any case."""
    expected, calls = identity_of(open_weights(folder)), []
    monkeypatch.setattr("llorch.lora.base.identity_of", lambda weights: calls.append(1) or identity_of(weights))
    assert remembered_identity(open_weights(folder)) == expected
    return bool(calls)


def test_the_same_files_are_read_once(digested: Path, monkeypatch: pytest.MonkeyPatch):
    assert not is_read(digested, monkeypatch)
    (entry,) = (digested.parent / "cache/llorch/bases").iterdir()
    assert json.loads(entry.read_text())["config"]


def test_a_number_that_was_changed_in_place_is_seen_though_size_and_time_stay(
    digested: Path, monkeypatch: pytest.MonkeyPatch
):
    file = digested / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(0.5).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert is_read(digested, monkeypatch)


def test_a_copy_and_another_configuration_are_read(digested: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(digested, digested.parent / "copy")
    assert is_read(digested.parent / "copy", monkeypatch)
    config = json.loads((digested / "config.json").read_text())
    (digested / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert is_read(digested, monkeypatch)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x", "config": "y"}'])
def test_a_damaged_entry_is_made_anew(content: str, digested: Path, monkeypatch: pytest.MonkeyPatch):
    (entry,) = (digested.parent / "cache/llorch/bases").iterdir()
    entry.write_text(content)
    assert is_read(digested, monkeypatch)
    assert not is_read(digested, monkeypatch)


def test_a_cache_that_cannot_be_written_is_no_fault(digested: Path, monkeypatch: pytest.MonkeyPatch):
    (digested.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(digested.parent / "file"))
    assert is_read(digested, monkeypatch)

"""The digest of a base is looked up where its files are the same, and never where anything changed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_models import random_tensors, write_folder

from llorch.files import open_weights
from llorch.lora import remembered
from llorch.lora.base import identity_of
from llorch.lora.remembered import remembered_identity


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base that was digested once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "base", random_tensors("llama"))
    assert remembered_identity(open_weights(folder)) == identity_of(open_weights(folder))
    return folder


def is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the base is hashed again; what comes of it is right in any case."""
    want, calls = identity_of(open_weights(folder)), []
    monkeypatch.setattr(remembered, "identity_of", lambda weights: calls.append(1) or identity_of(weights))
    assert remembered_identity(open_weights(folder)) == want
    return bool(calls)


def test_the_same_files_are_read_once(base: Path, monkeypatch: pytest.MonkeyPatch):
    assert not is_read(base, monkeypatch)
    (entry,) = (base.parent / "cache/llorch/bases").iterdir()
    assert json.loads(entry.read_text())["config"]


def test_a_number_that_was_changed_in_place_is_seen_though_size_and_time_stay(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    file = base / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(0.5).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert is_read(base, monkeypatch)


def test_a_copy_and_another_configuration_are_read(base: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(base, base.parent / "copy")
    assert is_read(base.parent / "copy", monkeypatch)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert is_read(base, monkeypatch)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x", "config": "y"}'])
def test_a_damaged_entry_is_made_anew(content: str, base: Path, monkeypatch: pytest.MonkeyPatch):
    (entry,) = (base.parent / "cache/llorch/bases").iterdir()
    entry.write_text(content)
    assert is_read(base, monkeypatch)
    assert not is_read(base, monkeypatch)


def test_a_cache_that_cannot_be_written_is_no_fault(base: Path, monkeypatch: pytest.MonkeyPatch):
    (base.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base.parent / "file"))
    assert is_read(base, monkeypatch)

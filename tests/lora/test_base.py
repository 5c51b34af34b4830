"""The base that an adapter was made for: recognised in both formats, refused when it is another, unknown when it is."""

import json

import numpy as np
import pytest
from random_adapters import tiny_base
from tiny_models import random_tensors, write_folder

from llorch.errors import FormatError
from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.files.quant import GGMLType
from llorch.lora.base import BaseIdentity, identity_of, require_base, require_name


def identity(path) -> BaseIdentity:
    return identity_of(open_weights(path))


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_a_folder_and_its_gguf_file_are_the_same_base(tmp_path, family, tied):
    base = tiny_base(tmp_path / "base", family, tied=tied)
    write_gguf(open_weights(base), tmp_path / "x.gguf")
    folder, file = identity(base), identity(tmp_path / "x.gguf")
    assert folder.digest == file.digest
    assert require_base(folder, file, where="a") == "base: the same, number by number"


def test_a_quantised_copy_is_unknown_and_says_so(tmp_path):
    base = tiny_base(tmp_path / "base")
    write_gguf(open_weights(base), tmp_path / "x.gguf", ggml_type=GGMLType.Q8_0)
    verdict = require_base(identity(base), identity(tmp_path / "x.gguf"), where="a")
    assert "unknown" in verdict
    assert "F32 there and F16, Q8_0 here" in verdict


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.layers.1.mlp.down_proj.weight", "matrices"),
        ("model.norm.weight", "norms and biases"),
        ("lm_head.weight", "matrices"),
    ],
)
def test_one_changed_number_makes_another_base(tmp_path, name, what):
    tensors = random_tensors("llama")
    made_for = identity(write_folder(tmp_path / "one", tensors))
    tensors[name].reshape(-1)[5] = np.nextafter(tensors[name].reshape(-1)[5], np.float32(1))
    other = identity(write_folder(tmp_path / "other", tensors))
    with pytest.raises(FormatError, match=f"the {what} of .*other are others") as caught:
        require_base(made_for, other, where="adapter")
    assert caught.value.code == "BaseMismatch"


def test_another_constant_makes_another_base(tmp_path):
    one = identity(write_folder(tmp_path / "one", random_tensors("llama")))
    other = identity(write_folder(tmp_path / "other", random_tensors("llama"), rope_theta=5000.0))
    with pytest.raises(FormatError, match="shapes and constants"):
        require_base(one, other, where="adapter")


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
        assert "without a digest; the name fits" in require_name(named, opened, where="adapter")
        return
    with pytest.raises(FormatError, match="--any-base") as caught:
        require_name(named, opened, where="adapter")
    assert caught.value.code == "BaseMismatch"


def test_an_adapter_that_names_no_base_is_unknown():
    assert require_name(None, "x", where="adapter").startswith("base: unknown")


def test_the_record_is_read_back(tmp_path):
    one = identity(tiny_base(tmp_path / "base"))
    assert BaseIdentity.from_fields(json.loads(one.to_json()), tmp_path) == one

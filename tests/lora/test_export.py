"""An adapter carried from format to format, and what stands in the way of a target."""

import errno
import json
import os
import resource

import numpy as np
import pytest
from builders.random_adapters import EVERY, adapted_logits, random_adapter, same_tensors, tiny_base
from helpers.refusals import assert_tells, refuses

from llorch.files import open_weights
from llorch.lora.base import identity_of
from llorch.lora.config import names_of
from llorch.lora.export import export, plain_adapter
from llorch.lora.files import read_adapter, recorded_base
from llorch.lora.peft_format import write_peft


def write_adapter(folder, base, **settings):
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **settings)
    write_peft(adapter, folder / "adapter", base=identity_of(weights, "its own name"))
    return folder / "adapter", adapter


def test_gguf_export_round_trip_keeps_adapter_and_base(tmp_path, base):
    path, adapter = write_adapter(tmp_path, base)
    export(base, path, tmp_path / "a.gguf")
    export(base, tmp_path / "a.gguf", tmp_path / "back")
    assert same_tensors(read_adapter(tmp_path / "back", open_weights(base).config), adapter)
    assert recorded_base(tmp_path / "back") == recorded_base(path)


def test_different_scales_are_folded_with_a_note(tmp_path, base):
    path, adapter = write_adapter(tmp_path, base, alpha_pattern={"q_proj": 1.0})
    assert any("multiplied" in note for note in export(base, path, tmp_path / "a.gguf").notes)
    expected = adapted_logits(base, adapter)
    actual = adapted_logits(base, read_adapter(tmp_path / "a.gguf", open_weights(base).config))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("target", "room"), [("new.gguf", 4096), ("new.gguf", 100), ("new", 4096)])
@pytest.mark.usefixtures("no_bytecode")
def test_export_to_a_full_disk_names_the_target_and_removes_files(tmp_path, base, target, room):
    path, _ = write_adapter(tmp_path, base)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with refuses(OSError, os.strerror(errno.EFBIG)) as error:
            export(base, path, tmp_path / target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert str(error.value.filename).startswith(str(tmp_path))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("target", ["adapter", "base", "."])
def test_the_target_is_neither_the_adapter_nor_the_base_nor_holds_them(tmp_path, base, target):
    path, _ = write_adapter(tmp_path, base)
    source = tmp_path / ("adapter" if target == "adapter" else "base")
    with refuses(ValueError, f"source {source}", where=tmp_path / target):
        export(base, path, tmp_path / target, force=True)


def test_a_target_that_exists_or_holds_other_files_is_kept(tmp_path, base):
    path, _ = write_adapter(tmp_path, base)
    export(base, path, tmp_path / "new")
    with refuses(FileExistsError, "--force", where=tmp_path / "new"):
        export(base, path, tmp_path / "new")
    export(base, path, tmp_path / "new", force=True)
    (tmp_path / "new" / "thesis.tex").write_text("years of work")
    with refuses(FileExistsError, "thesis.tex", where=tmp_path / "new"):
        export(base, path, tmp_path / "new", force=True)
    (tmp_path / "folder.gguf").mkdir()
    with refuses(FileExistsError, "a folder", where=tmp_path / "folder.gguf"):
        export(base, path, tmp_path / "folder.gguf", force=True)
    (tmp_path / "file").write_text("")
    with refuses(NotADirectoryError, where=(tmp_path / "file", tmp_path / "file" / "a" / "adapter")):
        export(base, path, tmp_path / "file" / "a" / "adapter")


@pytest.mark.parametrize("target", ["new/er/adapter", "new/er/adapter.gguf"])
def test_missing_folders_above_the_target_are_made(tmp_path, base, target):
    path, adapter = write_adapter(tmp_path, base)
    assert export(base, path, tmp_path / target).n_parameters == adapter.n_parameters


def test_refused_export_writes_no_file(tmp_path, base):
    path, _ = write_adapter(tmp_path, base, use_dora=True)
    before = sorted(tmp_path.rglob("*"))
    for target, vllm_safe in (("a.gguf", False), ("new/a.gguf", False), ("folder", True)):
        with refuses("Unsupported", "DoRA", "llorch lora merge", "vLLM" if vllm_safe else "llama.cpp"):
            export(base, path, tmp_path / target, vllm_safe=vllm_safe)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_base_is_refused_unless_allowed(tmp_path, base):
    path, _ = write_adapter(tmp_path, base)
    other = tiny_base(tmp_path / "other", tied=False)
    config = other / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    with refuses("BaseMismatch", "constants", other, where=path):
        export(other, path, tmp_path / "new")
    assert_tells(export(other, path, tmp_path / "new", any_base=True).notes[0], "base", "another", "accepted")


KINDS = {
    "rsLoRA": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 5, "up_proj": 2}},
    "alphas": {"alpha_pattern": {"v_proj": 11.0, r"layers\.0\..*": 2.0}},
    "one layer": {"target_modules": ("q_proj", "v_proj"), "layers_to_transform": (1,), "use_rslora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_export_with_one_rank_and_alpha_keeps_the_logits(tmp_path, kind, base, weights):
    adapter = random_adapter(weights.config, **KINDS[kind])
    plain = plain_adapter(adapter, weights.config)
    expected = adapted_logits(base, adapter)
    np.testing.assert_allclose(adapted_logits(base, plain), expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    write_peft(plain, tmp_path / "adapter", base=identity_of(weights))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"]
    assert not any(config[key] for key in ("rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform"))
    assert {len(tensors.lora_A) for tensors in plain.tensors.values()} == {config["r"]}


def test_adapter_with_one_rank_and_alpha_keeps_its_bits(weights):
    adapter = random_adapter(weights.config)
    plain = plain_adapter(adapter, weights.config)
    assert same_tensors(plain, adapter)
    assert plain.config.lora_alpha == adapter.config.lora_alpha


def test_modules_in_every_layer_are_named_by_suffix(weights):
    assert names_of(random_adapter(weights.config).targets, weights.config)["target_modules"] == tuple(sorted(EVERY))
    some = random_adapter(weights.config, target_modules=("q_proj",), layers_to_transform=(1,))
    assert names_of(some.targets, weights.config)["target_modules"] == ("model.layers.1.self_attn.q_proj",)

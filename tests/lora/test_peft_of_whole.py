"""Names of an adapter in a multimodal model: those written for each base, and those read from others."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.families import WHOLE, WITH_TEXT_CLASS
from builders.family_adapters import family_adapter
from builders.random_adapters import random_adapter, same_tensors
from helpers.refusals import refuses

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files import open_weights
from llorch.files.tensor_names import to_multimodal, to_text_only
from llorch.lora.adapter import Adapter
from llorch.lora.base import BaseIdentity
from llorch.lora.peft_format import has_multimodal_names, read_peft, write_peft
from llorch.lora.targets import targets_of
from llorch.runtime.builtin import EVERY, builtin_path

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE = BaseIdentity(name="base", config="", vectors="", matrices="", types=())
BLOCKS = dict.fromkeys(WHOLE, "model.language_model.layers.") | {"llama4": "language_model.model.layers."}


@cache
def builtin_configs() -> dict[str, ModelConfig]:
    """Map families to the configuration of a built-in model."""
    configs = [open_weights(builtin_path(name)).config for name in reversed(EVERY)]
    return {config.family: config for config in configs}


def family_config(family: str, *, is_multimodal: bool) -> ModelConfig:
    return replace(builtin_configs()[FAMILIES[family].written_as or family], family=family, part_of_whole=is_multimodal)


def write_adapter(adapter: Adapter, folder: Path) -> tuple[dict, dict]:
    write_peft(adapter, folder, base=BASE)
    return json.loads((folder / CONFIG).read_text()), container.load_file(folder / TENSORS)


@pytest.mark.parametrize("family", BLOCKS)
def test_module_path_maps_to_the_multimodal_model_and_back(family: str):
    head = "language_model.lm_head" if family == "llama4" else "lm_head"
    for alone, whole in (("model.layers.1.mlp.up_proj", f"{BLOCKS[family]}1.mlp.up_proj"), ("lm_head", head)):
        assert to_multimodal(alone, FAMILIES[family].layout.multimodal_prefixes) == whole
        assert to_text_only(whole) == to_text_only(alone) == alone


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "qwen3"])
def test_text_only_families_have_one_form(family: str):
    path = "model.layers.1.mlp.up_proj"
    assert to_multimodal(path, FAMILIES[family].layout.multimodal_prefixes) == path


@pytest.mark.parametrize(
    ("family", "is_multimodal", "prefix"),
    [
        *((family, True, blocks) for family, blocks in BLOCKS.items()),
        *(
            (family, False, "model.layers.") for family in WITH_TEXT_CLASS
        ),  # which transformers has a class of text alone for
        *((family, False, BLOCKS[family]) for family in WHOLE if family not in WITH_TEXT_CLASS),  # of GGUF files too
    ],
)
def test_base_folder_selects_the_written_names(tmp_path: Path, family: str, is_multimodal: bool, prefix: str):
    adapter = family_adapter(family_config(family, is_multimodal=is_multimodal))
    assert all(
        name.startswith(f"base_model.model.{prefix}") for name in write_adapter(adapter, tmp_path / "adapter")[1]
    )
    assert has_multimodal_names(tmp_path / "adapter") == adapter.is_multimodal == (prefix != "model.layers.")


@pytest.mark.parametrize("family", BLOCKS)
def test_written_pattern_matches_the_text_part_and_no_vision_module(tmp_path: Path, family: str):
    config = family_config(family, is_multimodal=True)
    targets = targets_of(config).values()
    modules = {t.path.rpartition(".")[2] for t in targets if not t.is_parameter}
    there = tuple(modules & {"q_proj", "up_proj", "lm_head"})  # with experts in all layers there is no up_proj
    values, _ = write_adapter(random_adapter(config, target_modules=there), tmp_path / "adapter")
    chosen = {t.stored_path for t in targets if t.path.endswith(("q_proj", ".up_proj", "lm_head")) and not t.n_experts}
    seeing = {"model.visual.blocks.0.mlp.up_proj", "vision_model.model.layers.0.self_attn.q_proj"}
    every = {t.stored_path for t in targets if not t.is_parameter} | {t.path for t in targets} | seeing
    assert {path for path in every if re.fullmatch(values["target_modules"], path)} == chosen


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("read_as_whole", [True, False])
@pytest.mark.parametrize("written_as_whole", [True, False])
def test_both_forms_are_read_for_both_bases(tmp_path: Path, family, written_as_whole, read_as_whole):
    patterns = {"rank_pattern": {r"model\.layers\.1\..*": 2}, "alpha_pattern": {"o_proj": 7.0}}
    adapter = family_adapter(family_config(family, is_multimodal=written_as_whole), **patterns)
    write_adapter(adapter, tmp_path / "adapter")
    actual = read_peft(tmp_path / "adapter", family_config(family, is_multimodal=read_as_whole))
    assert same_tensors(actual, adapter)
    assert {name: actual.scaling(name) for name in actual.targets} == {n: adapter.scaling(n) for n in adapter.targets}
    assert actual.is_multimodal == (read_as_whole or family not in WITH_TEXT_CLASS)


def test_layers_and_exclusions_are_in_the_pattern(tmp_path: Path):
    config = family_config("qwen3_vl", is_multimodal=True)
    chosen = {"target_modules": ("q_proj", "v_proj"), "exclude_modules": ("v_proj",), "layers_to_transform": (1,)}
    values, _ = write_adapter(random_adapter(config, **chosen), tmp_path / "adapter")
    assert values["target_modules"] == r"model\.language_model\.layers\.(1)\.(self_attn\.q_proj)"
    assert values["exclude_modules"] is values["layers_to_transform"] is None


def test_patterns_equal_in_the_multimodal_model_are_kept(tmp_path: Path):
    config = family_config("qwen3_vl", is_multimodal=True)
    kept = random_adapter(config, rank_pattern={"q_proj": 2})
    moved = random_adapter(config, target_modules=("v_proj",), rank_pattern={r"model\.layers\.0\..*": 2})
    assert write_adapter(kept, tmp_path / "kept")[0]["rank_pattern"] == {"q_proj": 2}
    assert write_adapter(moved, tmp_path / "moved")[0]["rank_pattern"] == {
        r"model\.language_model\.layers\.0\.self_attn\.v_proj": 2
    }


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("qwen2_5_vl", "model.visual.blocks.0.mlp.up_proj"),
        ("qwen3_5", "model.visual.blocks.0.attn.qkv"),
        ("llama4", "vision_model.model.layers.0.self_attn.q_proj"),
        ("llama4", "multi_modal_projector.linear_1"),
    ],
)
def test_adapter_on_a_vision_module_is_refused_in_one_line(tmp_path: Path, family: str, module: str):
    config = family_config(family, is_multimodal=True)
    values, tensors = write_adapter(random_adapter(config, target_modules=("q_proj",)), tmp_path / "adapter")
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(values | {"target_modules": ["q_proj", "qkv", "linear_1"]}))
    more = {f"base_model.model.{module}.lora_{half}.weight": np.ones((3, 3), np.float32) for half in "AB"}
    container.save_file(tensors | more, tmp_path / "adapter" / TENSORS, {"format": "pt"})
    halves = tuple(f"base_model.model.{module}.lora_{half}.weight" for half in "AB")
    with refuses("Unsupported", "PEFT", expected="text", got=(2, "vision", *halves), where=tmp_path / "adapter"):
        read_peft(tmp_path / "adapter", config)


def test_adapter_that_matches_no_text_module_is_refused(tmp_path: Path):
    config = family_config("qwen3_vl", is_multimodal=True)
    values, _ = write_adapter(random_adapter(config), tmp_path / "adapter")
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(values | {"target_modules": r"model\.layers\..*q_proj"}))
    with refuses("Missing", "target_modules", r"'model\\.layers\\..*q_proj'", "text", where=tmp_path / "adapter"):
        read_peft(tmp_path / "adapter", config)

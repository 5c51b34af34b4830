"""What engines are fed."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from benchmarks.atlas import inputs as atlas
from benchmarks.atlas.catalogue import BY_NAME
from benchmarks.atlas.inputs import AtlasInput, every_input, json_config, quantised_inputs, write_input
from llorch.files import open_weights


def test_names_are_unique_and_every_feature_is_used():
    inputs = list(every_input())
    assert len({each.name for each in inputs}) == len(inputs)
    assert {each.feature for each in inputs} == {"", *atlas.FEATURES}
    assert {name for family in atlas.FAMILIES.values() for name in family.features} == atlas.FEATURES.keys()


def test_styles_say_the_same_at_two_places():
    new, old = (json_config(AtlasInput("qwen3", "yarn", style)) for style in ("new", "old"))
    assert new["rope_parameters"] == {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    assert "rope_parameters" not in old
    assert "rope_theta" not in new


def test_styles_are_one_model_to_us(tmp_path: Path):
    new, old = (open_weights(write_input(AtlasInput("llama", "llama3", style), tmp_path)) for style in ("new", "old"))
    assert new.config == old.config
    assert all(np.array_equal(new[name], old[name]) for name in ("embed_tokens", "lm_head", "final_norm"))


@pytest.mark.slow_cases(but=["llama3", "yarn"])
@pytest.mark.parametrize("feature", ["theta", "llama3", "linear", "yarn", "head_dim", "eps", "tied", "biases"])
def test_a_feature_is_another_model(feature: str, tmp_path: Path):
    plain, other = (open_weights(write_input(AtlasInput("llama", each), tmp_path)) for each in ("", feature))
    assert plain.config != other.config


def test_control_inputs_differ_in_one_property():
    assert [each.name for each in AtlasInput("llama", "theta").controls] == ["llama-theta-old", "llama"]
    assert [each.name for each in AtlasInput("llama", "theta", "old").controls] == ["llama-theta", "llama-old"]
    assert [each.name for each in AtlasInput("qwen3", "eps", gguf=True).controls] == ["qwen3.gguf"]
    assert AtlasInput("qwen3_5").controls == []
    assert AtlasInput("story").controls == []


def test_a_split_prompt_is_the_whole_one_in_parts():
    assert [*chain.from_iterable(AtlasInput("llama", "split").parts)] == AtlasInput("llama").parts[0]
    assert len(AtlasInput("llama", "long").parts[0]) > 500


def test_what_is_there_is_not_written_again(tmp_path: Path):
    config = write_input(AtlasInput("llama"), tmp_path) / "config.json"
    before = config.stat().st_mtime_ns
    assert write_input(AtlasInput("llama", gguf=True), tmp_path) == tmp_path / "llama.gguf"
    assert config.stat().st_mtime_ns == before
    assert json.loads(config.read_text())["vocab_size"] == 401


def test_quantised_inputs_are_folders_and_files_with_tokens_of_their_vocabulary(tmp_path: Path):
    inputs = list(quantised_inputs())
    assert [each.name for each in inputs[:2]] == ["gptq-4bit", "gptq-4bit.gguf"]
    assert len(inputs) == 2 * len(atlas.QUANTISED)
    assert not {each.name for each in inputs} & {each.name for each in every_input()}
    assert all(each.is_quantised and not each.controls for each in inputs)
    folder, file = (open_weights(write_input(AtlasInput("ct-w4a16", gguf=gguf), tmp_path)) for gguf in (False, True))
    assert max(AtlasInput("ct-w4a16").parts[0]) < folder.config.vocab_size
    assert np.array_equal(folder["layers.0.q_proj"], file["layers.0.q_proj"])


@pytest.mark.parametrize(
    ("engine", "way", "gguf", "reads"),
    [
        ("transformers", "", False, True), ("transformers", "bfloat16", False, True),
        ("transformers", "sdpa", False, False), ("transformers", "", True, False), ("llama.cpp", "", True, True),
        ("llama.cpp", "F16 cache", True, False), ("mlx-lm", "", False, True), ("tinygrad", "", True, False),
    ],
)  # fmt: skip
def test_engine_gets_quantised_inputs_in_its_form_and_ways(engine: str, way: str, gguf: bool, reads: bool):
    assert BY_NAME[engine].reads(way, gguf=gguf, quantised=True) is reads

"""Models and prompts of the atlas."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import llorch.engines.dumps.writers
from benchmarks.atlas import inputs as atlas
from benchmarks.atlas.catalogue import ADAPTERS, BY_NAME
from benchmarks.atlas.inputs import AtlasInput, every_input, json_config, quantised_inputs, write_input
from llorch.engines.dumps.index import open_raw
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


def test_styles_are_one_model_for_llorch(tmp_path: Path):
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


def test_existing_inputs_are_not_written_again(tmp_path: Path):
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


ADAPTER = """
import os
import numpy as np
from harness import answer

def load(run):
    if run.model == "unknown":
        raise ValueError("this architecture is not supported")
    return 2.0

def compute(engine, run, dump):
    if run.model == "deadly":
        os.abort()
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        dump.add("logits", engine * np.float32([[first_position, *ids]]), tokens=[len(ids) - 1])

answer("numpy", load, compute)
"""


def adapt(folder: Path, models: list[str]) -> int:
    """Ask for a run of each model; the exit status."""
    (folder / "adapter.py").write_text(ADAPTER)
    ask = [
        {"model": model, "parts": [[5, 6], [7]], "out": str(folder / model), "scratch": str(folder / "scratch")}
        for model in models
    ]
    (folder / "runs.jsonl").write_text("\n".join(map(json.dumps, ask)))
    paths = [str(ADAPTERS), llorch.engines.dumps.writers.__path__[0]]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "adapter.py", "runs.jsonl"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode


def outcome(folder: Path, model: str) -> dict[str, str]:
    return json.loads((folder / model / "said.json").read_text())


def test_a_run_that_fails_or_ends_the_process_costs_no_other(tmp_path: Path):
    models = ["unknown", "right", "deadly", "last"]
    assert adapt(tmp_path, models) < 0
    assert outcome(tmp_path, "unknown") | {"version": "", "place": "", "seconds": 0} == {
        "version": "", "seconds": 0, "state": "failed", "phase": "load", "place": "",
        "error": "ValueError: this architecture is not supported",
    }  # fmt: skip
    assert outcome(tmp_path, "right") | {"seconds": 0} == {"version": np.__version__, "state": "done", "seconds": 0}
    assert not (tmp_path / "deadly" / "said.json").exists()
    before = (tmp_path / "right" / "said.json").stat().st_mtime_ns
    assert adapt(tmp_path, [one for one in models if one != "deadly"]) == 0
    assert outcome(tmp_path, "last")["state"] == "done"
    assert (tmp_path / "right" / "said.json").stat().st_mtime_ns == before


def test_adapter_output_is_a_dump(tmp_path: Path):
    assert adapt(tmp_path, ["right"]) == 0
    dump = open_raw(tmp_path / "right")
    assert [(each.ids, each.first_position) for each in dump.passes] == [((5, 6), 0), ((7,), 2)]

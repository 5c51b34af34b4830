"""Merged files, compared with base and adapter: right merges pass, and each wrong merge is named."""

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.converter import SourceConfig, convert, quantise
from builders.damaged_files import MERGE_MISTAKES, merge, write_adapter
from builders.random_adapters import peft_model, save_quietly
from builders.source_folders import read_tensors, write_model, write_source
from helpers.refusals import assert_tells

from llorch.files import open_weights
from llorch.files.opening import open_table
from llorch.judging.source.adapters import MergedTensors
from llorch.judging.source.compare import SourceReport, compare_with_source
from llorch.lora.files import read_adapter

Folders = Mapping[str, Path]
FAMILIES = ("qwen2", "llama")
EXPECTED: dict[str, tuple[str, object]] = {  # mistake: name of the cause, and a fact of its explanation
    "left out in some modules": ("adapter left out", "self_attn.o_proj"),
    "another scale": ("adapter scaled", 4),
    "subtracted": ("adapter subtracted", "mlp.up_proj"),
    "applied twice": ("adapter applied twice", "mlp.up_proj"),
    "another base": ("near values", "embed_tokens"),
}


def compare(file_path: Path, base: Path, adapter: Path | None) -> SourceReport:
    file, weights = open_table(file_path, is_complete=False), open_weights(base)
    with closing(file.source), closing(weights.source):
        tensors = None if adapter is None else MergedTensors(weights, read_adapter(adapter, weights.config))
        return compare_with_source(file, weights, tensors, model="merged")


def failed_weights(report: SourceReport) -> set[str]:
    return {failure.stage_ref.part for failure in report.failures if failure.stage_ref.stage == "weights"}


@pytest.fixture(scope="module")
def adapters(source_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    parent = tmp_path_factory.mktemp("adapters")
    return {family: write_adapter(source_folders[family], parent / family) for family in source_folders}


def merged_file(base: Path, adapter: Path, folder: Path, mistake: str | None, kind: str) -> Path:
    """Merge into a folder, and convert it to a GGUF file unless `kind` is `folder`."""
    merged = merge(base, adapter, folder / "merged", mistake)
    if kind == "folder":
        return merged
    file = convert(merged, folder / "merged.gguf")
    return file if kind == "F32" else quantise(file, folder / "quantised.gguf", kind)


def assert_merge_passes_or_fails(base: Path, adapter: Path, folder: Path, mistake: str | None, kind: str) -> None:
    report = compare(merged_file(base, adapter, folder, mistake, kind), base, adapter)
    if mistake is None:
        assert [failure.note for failure in report.failures] == []
        return
    name, fact = EXPECTED[mistake]
    (cause,) = report.causes
    assert cause.name == name
    assert_tells(cause.sentence, fact)
    assert {*cause.stages} == failed_weights(report) == {*MERGE_MISTAKES[mistake].tensors(base, adapter)}


MERGES = [None, *EXPECTED]


def test_every_mistake_of_a_merge_has_an_expected_cause():
    assert EXPECTED.keys() == MERGE_MISTAKES.keys()


@pytest.mark.parametrize("kind", ["folder", "F32"])
@pytest.mark.parametrize("mistake", MERGES)
def test_merge_into_floats(source_folders: Folders, adapters: Folders, tmp_path: Path, mistake: str | None, kind: str):
    assert_merge_passes_or_fails(source_folders["qwen2"], adapters["qwen2"], tmp_path, mistake, kind)


@pytest.mark.live
@pytest.mark.nightly_cases(but=["another scale-llama-Q4_K_M", "None-llama-Q8_0"])
@pytest.mark.parametrize("kind", ["folder", "F32", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mistake", MERGES)
def test_merge_into_each_type(
    source_folders: Folders, adapters: Folders, tmp_path: Path, mistake: str | None, family: str, kind: str
):
    assert_merge_passes_or_fails(source_folders[family], adapters[family], tmp_path, mistake, kind)


@pytest.mark.nightly_cases("*F32")
@pytest.mark.parametrize("kind", ["folder", "F32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_right_merge_of_other_families_passes(
    source_folders: Folders, adapters: Folders, tmp_path: Path, family: str, kind: str
):
    assert_merge_passes_or_fails(source_folders[family], adapters[family], tmp_path, None, kind)


def test_merge_is_no_copy_of_the_base_and_the_base_no_merge(source_folders: Folders, adapters: Folders, tmp_path: Path):
    base, adapter = source_folders["qwen2"], adapters["qwen2"]
    merged = merge(base, adapter, tmp_path / "merged")
    changed = {*MERGE_MISTAKES["subtracted"].tensors(base, adapter)}
    assert failed_weights(compare(merged, base, None)) == changed
    report = compare(base, base, adapter)
    assert [(cause.name, {*cause.stages}) for cause in report.causes] == [("adapter left out", changed)]


def test_adapter_with_a_product_of_zero_is_no_difference(source_folders: Folders, tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    base = source_folders["qwen2"]
    adapter = write_adapter(base, tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    tensors = {name: 0 * array if "lora_B" in name else array for name, array in load_file(path).items()}
    save_file(tensors, path)
    assert compare(base, base, adapter).failures == []


PEFT = {  # arguments of `peft.LoraConfig`
    "DoRA": {"use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rsLoRA, patterns": {
        "use_rslora": True, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2},
        "alpha_pattern": {"q_proj": 3.0},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
}  # fmt: skip
PEFT_WEIGHTS = {"DoRA": 6, "rsLoRA, patterns": 4, "embedding and head": 4}  # adapted weights of two layers


@pytest.fixture(scope="module")
def exact_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in F32, the type in which PEFT merges."""
    return write_source(tmp_path_factory.mktemp("exact") / "base", "llama", dtype="F32")


def merge_with_peft(base: Path, folder: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write a random adapter and the merge of PEFT; return the adapter and the merged folder."""
    model = peft_model(base, r=3, lora_alpha=5.0, **settings)
    adapter = save_quietly(model, folder / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice of PEFT on tied embeddings
        state = model.merge_and_unload().state_dict()
    tensors = {name: state[name].numpy() for name in read_tensors(base)[0]}  # a tied head is not stored
    (folder / "merged").mkdir()
    return adapter, write_model(folder / "merged", SourceConfig.read(base).values, tensors, {})


@pytest.mark.live
@pytest.mark.parametrize("settings", PEFT)
def test_merge_of_peft_passes_and_another_adapter_fails(exact_base: Path, tmp_path: Path, settings: str):
    adapter, merged = merge_with_peft(exact_base, tmp_path, PEFT[settings])
    report = compare(merged, exact_base, adapter)
    assert [failure.note for failure in report.failures if failure.stage_ref.stage == "weights"] == []
    adapted = failed_weights(compare(merged, exact_base, None))
    assert len(adapted) == PEFT_WEIGHTS[settings]
    report = compare(exact_base, exact_base, adapter)
    assert failed_weights(report) == adapted


@pytest.mark.live
def test_merge_without_the_magnitudes_of_dora_fails(exact_base: Path, tmp_path: Path):
    from llorch.judging.source.tensors import ModelTensors

    adapter, merged = merge_with_peft(exact_base, tmp_path, PEFT["DoRA"])
    weights, (tensors, _) = open_weights(exact_base), read_tensors(merged)
    parts = MergedTensors(weights, read_adapter(adapter, weights.config))
    for name in parts.parts:
        rows = np.arange(len(tensors[name]))
        tensors[name] = (ModelTensors(weights).read(name, rows) + parts.delta(name, rows)).astype(np.float32)
    (wrong := tmp_path / "wrong").mkdir()
    write_model(wrong, SourceConfig.read(exact_base).values, tensors, {})
    assert failed_weights(compare(wrong, exact_base, adapter)) == {*parts.parts}


@pytest.mark.live
def test_merge_into_the_embedding_of_a_tied_base_needs_a_head_with_the_values_of_the_base(tmp_path: Path):
    base = write_source(tmp_path / "base", "qwen3", dtype="F32")
    adapter, merged = merge_with_peft(base, tmp_path, {"target_modules": ["embed_tokens"]})
    head = compare(merged, base, adapter)
    assert failed_weights(head) == {"lm_head.weight"}
    tensors, _ = read_tensors(merged)
    tensors["lm_head.weight"] = read_tensors(base)[0]["model.embed_tokens.weight"]
    (right := tmp_path / "right").mkdir()
    write_model(right, dict(SourceConfig.read(base).values) | {"tie_word_embeddings": False}, tensors, {})
    assert failed_weights(compare(right, base, adapter)) == set()

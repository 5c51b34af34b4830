"""Adapter files that llorch and PEFT write, compared with their source; faults injected into the writer are found."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as container
from builders.families import FAMILIES, random_folder
from builders.family_adapters import family_adapter
from builders.random_adapters import EVERY as MODULES
from builders.random_adapters import fresh, peft_model, random_adapter, save_quietly, tiny_base

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES as TABLE
from llorch.files import open_weights
from llorch.judging.source.adapter_files import compare_adapter_file
from llorch.judging.types import Comparison
from llorch.lora import gguf_format, peft_format, targets
from llorch.lora.adapter import Adapter, LoraTensors
from llorch.lora.base import identity_of
from llorch.lora.export import plain_adapter
from llorch.lora.files import read_adapter
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.runtime.builtin import EVERY, builtin_path
from llorch.stages.comparison import FAIL, PASS

FORMATS = ("adapter.gguf", "peft")
KINDS: dict[str, dict[str, Any]] = {  # of a dense model
    "one scale": {},
    "patterns": {"rank_pattern": {"k_proj": 5, r"layers\.1\..*q_proj": 1}, "alpha_pattern": {"up_proj": 9.0}},
    "rsLoRA": {"use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "one layer": {"layers_to_transform": (1,)},
    "regular expression": {"target_modules": r".*\.(q|k)_proj"},
    "embedding and output": {"target_modules": ("embed_tokens", "lm_head", "v_proj"), "rank_pattern": {"lm_head": 5}},
    "untrained": {},
}


def builtin_config(name: str) -> ModelConfig:
    return open_weights(builtin_path(name)).config


def write(adapter: Adapter, config: ModelConfig, path: Path) -> Path:
    """Write an adapter in the format that the name tells."""
    if path.suffix == ".gguf":
        write_lora_gguf(adapter, path, config)
    else:
        write_peft(adapter, path, base=identity_of(open_weights(builtin_path("micro-llama"))))
    return path


def write_and_compare(adapter: Adapter, config: ModelConfig, path: Path) -> list[Comparison]:
    return compare_adapter_file(write(adapter, config, path), adapter, config)


def failed_names(comparisons: list[Comparison]) -> set[str]:
    return {comparison.stage_ref.part for comparison in comparisons if comparison.verdict == FAIL}


def assert_passes(comparisons: list[Comparison], adapter: Adapter) -> None:
    """Assert that each matrix of the adapter was compared, by its name in transformers, and passed."""
    n_matrices = sum(len(target.parts) for target in adapter.targets.values())
    assert len({comparison.stage_ref.part for comparison in comparisons}) == len(comparisons) == n_matrices
    assert {comparison.note for comparison in comparisons if comparison.verdict == FAIL} == set()
    assert {comparison.verdict for comparison in comparisons} == {PASS}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", EVERY)
def test_adapter_of_each_builtin_model_passes(name: str, format_: str, tmp_path: Path):
    config = builtin_config(name)
    adapter = family_adapter(config)
    assert_passes(write_and_compare(adapter, config, tmp_path / format_), adapter)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", EVERY)
def test_vllm_safe_adapter_of_each_builtin_model_passes(name: str, format_: str, tmp_path: Path):
    config = builtin_config(name)
    adapter = family_adapter(config, target_parameters=())
    path = write(plain_adapter(adapter, config), config, tmp_path / format_)
    assert_passes(compare_adapter_file(path, adapter, config), adapter)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapter_of_each_kind_passes(kind: str, format_: str, tmp_path: Path):
    config = builtin_config("micro-llama")
    adapter = random_adapter(config, **KINDS[kind])
    adapter = fresh(adapter) if kind == "untrained" else adapter
    assert_passes(write_and_compare(adapter, config, tmp_path / format_), adapter)


def test_dora_of_embedding_and_fused_projections_passes(tmp_path: Path):
    config = builtin_config("micro-qwen3-next")
    modules = ("embed_tokens", "in_proj_qkvz", "in_proj_ba", "q_proj")
    adapter = random_adapter(config, target_modules=modules, use_dora=True)
    assert_passes(write_and_compare(adapter, config, tmp_path / "peft"), adapter)


def test_rows_of_one_expert_stack_alone_pass(tmp_path: Path):
    config = builtin_config("micro-llama4")
    for parameter in ("experts.gate_up_proj", "experts.down_proj"):
        adapter = random_adapter(config, target_modules=(), target_parameters=(parameter,))
        for format_ in FORMATS:
            assert_passes(write_and_compare(adapter, config, tmp_path / f"{parameter}-{format_}"), adapter)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.nightly_cases(but=["qwen3_moe"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if TABLE[family].router])
def test_folder_of_peft_with_experts_passes(family: str, tmp_path: Path):
    base = random_folder(family, tmp_path / "base", 0)
    config = open_weights(base).config
    settings = {"rank_pattern": {"gate_up_proj": 5}, "alpha_pattern": {"q_proj": 11.0}}
    settings |= {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    path = save_quietly(
        peft_model(base, multimodal=config.part_of_whole, r=3, lora_alpha=5, **settings), tmp_path / "adapter"
    )
    adapter = read_adapter(path, config)
    assert_passes(compare_adapter_file(path, adapter, config), adapter)


ORDERED_MODULES = {  # built-in model -> modules whose rows or columns have another order in GGUF files
    "micro-llama": {"q_proj", "k_proj"},
    "micro-smollm3": {"q_proj", "k_proj"},
    "micro-qwen3.5": {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
}


@pytest.mark.parametrize("model", ORDERED_MODULES)
def test_writer_that_applies_no_order_is_found(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = builtin_config(model)
    monkeypatch.setattr(targets, "_order_in_gguf", lambda weight: (None, None))
    comparisons = write_and_compare(family_adapter(config), config, tmp_path / "adapter.gguf")
    names = {comparison.stage_ref.part for comparison in comparisons}
    assert failed_names(comparisons) == {name for name in names if name.split(".")[-2] in ORDERED_MODULES[model]}
    assert not any("times" in comparison.note for comparison in comparisons)


@pytest.mark.parametrize("format_", FORMATS)
def test_writer_without_the_scaling_is_found(format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = builtin_config("micro-llama")
    adapter, config_json = random_adapter(config, r=4, lora_alpha=6.0), peft_format.config_json
    unscaled = replace(adapter.config, lora_alpha=4.0)
    monkeypatch.setattr(gguf_format, "common_alpha", lambda adapter: 0.0)
    monkeypatch.setattr(peft_format, "config_json", lambda _, *rest, **names: config_json(unscaled, *rest, **names))
    comparisons = write_and_compare(adapter, config, tmp_path / format_)
    assert {comparison.verdict for comparison in comparisons} == {FAIL}
    assert all(comparison.note.endswith(" 0.6667 times that of the source") for comparison in comparisons)
    assert comparisons[0].difference.error == pytest.approx(1 / 3)


@pytest.mark.parametrize("format_", FORMATS)
def test_writer_of_a_pair_of_another_layer_is_found(format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = builtin_config("micro-llama")
    tensors_in_file, stored_names = gguf_format._tensors_in_file, peft_format._stored_names

    def exchange(values: dict[str, Any], name: str) -> dict[str, Any]:
        first, second = (name.format(layer) for layer in (0, 1))
        return values | {first: values[second], second: values[first]}

    monkeypatch.setattr(
        gguf_format, "_tensors_in_file",
        lambda adapter, *, folded: exchange(tensors_in_file(adapter, folded=folded), "blk.{}.ffn_up.weight.lora_a"),
    )  # fmt: skip
    monkeypatch.setattr(
        peft_format, "_stored_names", lambda *arguments: exchange(stored_names(*arguments), "layers.{}.up_proj.lora_A")
    )
    names = failed_names(write_and_compare(random_adapter(config), config, tmp_path / format_))
    assert names == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)}


def replace_tensors(adapter: Adapter, tensors: Mapping[str, LoraTensors]) -> Adapter:
    return replace(adapter, tensors={**adapter.tensors, **tensors})


def change_one_value(adapter: Adapter, name: str, kind: str, factor: float) -> Adapter:
    """Change one value of the first row of an array."""
    array = adapter.tensors[name].arrays()[kind].copy()
    array.reshape(-1)[1] *= factor
    return replace_tensors(adapter, {name: replace(adapter.tensors[name], **{kind: array})})


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
@pytest.mark.parametrize("name", ["layers.0.k_proj", "layers.1.experts_gate_up_proj", "embed_tokens", "lm_head"])
def test_one_changed_value_is_found(name: str, kind: str, format_: str, tmp_path: Path):
    config = builtin_config("micro-llama4")
    modules, parameters = ("k_proj", "embed_tokens", "lm_head"), ("experts.gate_up_proj",)
    adapter = random_adapter(config, target_modules=modules, target_parameters=parameters)
    path = write(adapter, config, tmp_path / format_)
    rounded, wrong = (change_one_value(adapter, name, kind, factor) for factor in (1 + 1e-6, 1 + 1e-2))
    assert failed_names(compare_adapter_file(path, rounded, config)) == set()
    failures = [c for c in compare_adapter_file(path, wrong, config) if c.verdict == FAIL]
    # Rows of the experts' B are inputs here, which gate and up share.
    assert len(failures) == 1 + (name == "layers.1.experts_gate_up_proj" and kind == "lora_B")
    assert all(c.stage_ref.part.startswith(adapter.targets[name].path.rpartition(".")[0]) for c in failures)
    if name == "layers.0.k_proj":
        n_wrong = 1 if kind == "lora_B" else config.kv_width
        assert failures[0].note.endswith(f"; {n_wrong} of {config.kv_width} rows differ")


def test_other_magnitude_is_found(tmp_path: Path):
    config = builtin_config("micro-qwen3")
    adapter = random_adapter(config, target_modules=("o_proj",), use_dora=True)
    path = write(adapter, config, tmp_path / "peft")
    changed = change_one_value(adapter, "layers.1.o_proj", "magnitude", 1.5)
    comparisons = compare_adapter_file(path, changed, config)
    assert failed_names(comparisons) == {"model.layers.1.self_attn.o_proj.weight"}


@pytest.mark.parametrize("format_", FORMATS)
def test_missing_and_additional_pairs_are_found(format_: str, tmp_path: Path):
    config = builtin_config("micro-qwen3")
    small, large = (random_adapter(config, target_modules=modules) for modules in (("q_proj",), ("q_proj", "o_proj")))
    names = {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(config.n_layers)}
    for stored, source, note in ((small, large, "missing"), (large, small, "additional")):
        path = write(stored, config, tmp_path / f"{note}-{format_}")
        comparisons = compare_adapter_file(path, source, config)
        failures = [c for c in comparisons if c.verdict == FAIL and c.note.startswith(note)]
        assert failed_names(failures) == names


@pytest.mark.parametrize("format_", FORMATS)
def test_missing_pair_that_changes_nothing_passes_with_a_note(format_: str, tmp_path: Path):
    config = builtin_config("micro-qwen3")
    small = random_adapter(config, target_modules=("q_proj",))
    large = fresh(random_adapter(config, target_modules=("q_proj", "o_proj")))
    source = replace_tensors(large, small.tensors)
    for file, adapter, note in ((small, source, "missing"), (source, small, "additional")):
        comparisons = compare_adapter_file(write(file, config, tmp_path / f"{note}-{format_}"), adapter, config)
        assert {comparison.verdict for comparison in comparisons} == {PASS}
        assert {c.stage_ref.part for c in comparisons if c.note.startswith(note)} == {
            f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(config.n_layers)
        }


def test_missing_magnitude_of_a_zero_product_is_found(tmp_path: Path):
    config = builtin_config("micro-qwen3")
    adapter = random_adapter(config, target_modules=("q_proj", "o_proj"), use_dora=True)
    zeros = {name: replace(lora, lora_B=np.zeros_like(lora.lora_B)) for name, lora in adapter.tensors.items()}
    path = write(random_adapter(config, target_modules=("q_proj",), use_dora=True), config, tmp_path / "peft")
    names = failed_names(compare_adapter_file(path, replace_tensors(adapter, zeros), config))
    assert {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(config.n_layers)} <= names


def test_source_matrix_of_no_weight_is_not_skipped(tmp_path: Path):
    config = builtin_config("micro-qwen3")
    adapter = random_adapter(config, target_modules=("q_proj",))
    target = replace(adapter.targets["layers.0.q_proj"], path="model.layers.0.self_attn.qkv_proj")
    renamed = replace(adapter, targets={**adapter.targets, "layers.0.q_proj": target})
    names = failed_names(compare_adapter_file(write(adapter, config, tmp_path / "adapter.gguf"), renamed, config))
    assert names == {Q_WEIGHT, "model.layers.0.self_attn.qkv_proj.weight"}


def test_adapter_of_one_expert_is_found(tmp_path: Path):
    config = builtin_config("micro-qwen3-moe")
    assert config.experts is not None
    adapter = random_adapter(config, target_modules=("q_proj",))
    folder = write(adapter, config, tmp_path / "peft")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["target_modules"].append("up_proj")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    arrays = container.load_file(folder / "adapter_model.safetensors")
    module, size = "model.layers.0.mlp.experts.0.up_proj", config.experts.expert_size
    arrays |= {
        f"base_model.model.{module}.lora_A.weight": np.ones((3, config.hidden_size), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((size, 3), np.float32),
    }
    container.save_file(arrays, folder / "adapter_model.safetensors")
    assert failed_names(compare_adapter_file(folder, adapter, config)) == {f"{module}.weight"}


Q_A, Q_B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
Q_MODULE, Q_WEIGHT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj.weight"
Arrays = dict[str, np.ndarray]
DAMAGES: dict[str, tuple[Callable[[dict[str, Any], Arrays], object], set[str]]] = {
    "half a pair": (lambda settings, arrays: arrays.pop(Q_B), {Q_MODULE, Q_WEIGHT}),
    "foreign tensor": (lambda settings, arrays: arrays.update({"lm_head.weight": np.ones(2)}), {"lm_head.weight"}),
    "unknown layer": (
        lambda settings, arrays: arrays.update({name.replace("0", "9"): arrays[name] for name in (Q_A, Q_B)}),
        {Q_WEIGHT.replace("0", "9")},
    ),
    "cut A": (lambda settings, arrays: arrays.update({Q_A: arrays[Q_A][:, :-1].copy()}), {Q_WEIGHT}),
    "other rank": (lambda settings, arrays: settings["rank_pattern"].update({r"0\..*q_proj": 2}), {Q_MODULE, Q_WEIGHT}),
    "other alpha": (lambda settings, arrays: settings["alpha_pattern"].update({r"0\..*q_proj": 7}), {Q_WEIGHT}),
    "not selected": (
        lambda settings, arrays: settings.update(target_modules=r".*\.([1-9]\.self_attn\.q_proj|k_proj)"),
        {Q_MODULE, Q_WEIGHT},
    ),
    "partly matching expression": (
        lambda settings, arrays: settings.update(target_modules=r"0\.self_attn\.q_proj|.*\.([1-9].*q_proj|k_proj)"),
        {Q_MODULE, Q_WEIGHT},
    ),
    "not listed": (
        lambda settings, arrays: settings.update(target_modules=["k_proj", "1.self_attn.q_proj"]),
        {Q_MODULE, Q_WEIGHT},
    ),
    "magnitudes ignored": (
        lambda settings, arrays: arrays.update({Q_A.replace("A.weight", "magnitude_vector"): np.ones(32)}),
        {Q_MODULE, Q_WEIGHT},
    ),
    "NaN": (lambda settings, arrays: arrays.update({Q_A: np.full_like(arrays[Q_A], np.nan)}), {Q_WEIGHT}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_peft_directory_is_found(damage: str, tmp_path: Path):
    config = builtin_config("micro-qwen3")
    adapter = random_adapter(config, target_modules=("q_proj", "k_proj"))
    folder = write(adapter, config, tmp_path / "peft")
    settings = json.loads((folder / "adapter_config.json").read_text())
    arrays = container.load_file(folder / "adapter_model.safetensors")
    change, names = DAMAGES[damage]
    change(settings, arrays)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    container.save_file(arrays, folder / "adapter_model.safetensors")
    comparisons = compare_adapter_file(folder, adapter, config)
    assert failed_names(comparisons) == names
    assert all(comparison.note for comparison in comparisons if comparison.verdict == FAIL)


Q_LORA_A = "blk.0.attn_q.weight.lora_a"
GGUF_DAMAGES: dict[str, tuple[Callable[[Arrays], object], set[str]]] = {
    "half a pair": (lambda arrays: arrays.pop(Q_LORA_A), {"blk.0.attn_q.weight", Q_WEIGHT}),
    "norm": (lambda arrays: arrays.update({"blk.0.attn_norm.weight": np.ones(32)}), {"blk.0.attn_norm.weight"}),
    "other ranks": (
        lambda arrays: arrays.update({Q_LORA_A: arrays[Q_LORA_A][:2]}),
        {"blk.0.attn_q.weight", Q_WEIGHT},
    ),
    "stack and matrix": (
        lambda arrays: arrays.update({Q_LORA_A: np.stack([arrays[Q_LORA_A]] * 2)}), {"blk.0.attn_q.weight", Q_WEIGHT},
    ),
    "vectors": (
        lambda arrays: arrays.update({Q_LORA_A.replace("lora_a", f"lora_{half}"): np.ones(3) for half in "ab"}),
        {"blk.0.attn_q.weight", Q_WEIGHT},
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", GGUF_DAMAGES)
def test_damaged_gguf_file_is_found(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = builtin_config("micro-qwen3")
    tensors_in_file, (change, names) = gguf_format._tensors_in_file, GGUF_DAMAGES[damage]

    def write_damaged(adapter: Adapter, *, folded: bool) -> Arrays:
        arrays = tensors_in_file(adapter, folded=folded)
        change(arrays)
        return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}

    monkeypatch.setattr(gguf_format, "_tensors_in_file", write_damaged)
    adapter = random_adapter(config, target_modules=("q_proj", "k_proj"))
    assert failed_names(write_and_compare(adapter, config, tmp_path / "adapter.gguf")) == names


def test_reader_that_undoes_no_order_is_found_in_a_gguf_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = open_weights(tiny_base(tmp_path / "base")).config
    path = write(random_adapter(config, target_modules=MODULES), config, tmp_path / "adapter.gguf")
    monkeypatch.setattr(targets, "_order_in_gguf", lambda weight: (None, None))
    names = failed_names(compare_adapter_file(path, read_adapter(path, config), config))
    assert {re.sub(r"\d+", "0", name) for name in names} == {
        "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
    }  # fmt: skip

"""The adapter directory of PEFT: what we write it loads, what it writes we load, and our bytes do not change."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import (
    EVERY,
    adapted_logits,
    peft_model,
    plain_logits,
    random_adapter,
    same_tensors,
    save_quietly,
    tiny_base,
    torch_logits,
)
from helpers.refusals import refuses

from llorch.files import open_safetensors, open_weights
from llorch.lora.base import BaseIdentity, identity_of
from llorch.lora.peft_format import read_peft, read_peft_base, read_peft_copies, write_peft
from llorch.lora.summary import summarise
from llorch.training.merge_files import merge

KINDS = {
    "every matrix": {"target_modules": EVERY},
    "rsLoRA": {"target_modules": ("q_proj", "down_proj"), "use_rslora": True},
    "DoRA": {"target_modules": EVERY, "use_dora": True},
    "embedding and output": {"target_modules": ("embed_tokens", "lm_head", "k_proj")},
    "DoRA of embedding and output": {"target_modules": ("embed_tokens", "lm_head"), "use_dora": True},
    "patterns": {
        "target_modules": EVERY,
        "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {r"layers\.0\.self_attn\..*": 2.5, "down_proj": 11.0},  # PEFT sorts what it saves
    },
    "patterns with alternatives": {
        "target_modules": EVERY,
        "rank_pattern": {"k_proj|v_proj": 5, r"layers\.1\.mlp\.(up|gate)_proj|q_proj": 2},
        "alpha_pattern": {"down_proj|o_proj": 11.0, "o_proj|v_proj": 2.5},
    },
    "one layer, one module left out": {
        "target_modules": ("q_proj", "v_proj", "up_proj"),
        "layers_to_transform": (1,),
        "exclude_modules": ("v_proj",),
    },
    "regular expression": {"target_modules": r".*\.1\..*(gate|k)_proj"},
}
TIED = ["every matrix", "embedding and output", "DoRA of embedding and output"]
CASES = [
    *(("llama", False, kind) for kind in KINDS),
    *(("qwen3", True, kind) for kind in TIED),
    ("qwen2", False, "DoRA"),
]


@pytest.mark.live
@pytest.mark.parametrize(("family", "tied", "kind"), CASES)
def test_peft_computes_the_logits_of_llorch_from_a_folder_of_llorch(tmp_path, family, tied, kind):
    base = tiny_base(tmp_path / "base", family, tied=tied)
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **KINDS[kind])
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    model = peft_model(base, tmp_path / "adapter")
    theirs, ours = torch_logits(model), adapted_logits(base, adapter)
    assert np.abs(theirs - torch_logits(model.unload())).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.live
@pytest.mark.parametrize(("family", "tied", "kind"), CASES)
def test_llorch_computes_the_logits_of_peft_from_a_folder_of_peft(tmp_path, family, tied, kind):
    base = tiny_base(tmp_path / "base", family, tied=tied)
    settings: dict[str, Any] = {key: list(v) if isinstance(v, tuple) else v for key, v in KINDS[kind].items()}
    model = peft_model(base, r=3, lora_alpha=5, **settings)
    adapter = read_peft(save_quietly(model, tmp_path / "adapter"), open_weights(base).config)
    theirs = torch_logits(model)
    np.testing.assert_allclose(adapted_logits(base, adapter), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("kind", KINDS)
def test_peft_folder_round_trip_is_bit_exact(tmp_path, kind, weights):
    adapter = random_adapter(weights.config, **KINDS[kind])
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    actual = read_peft(tmp_path / "adapter", weights.config)
    assert same_tensors(actual, adapter)
    assert {n: actual.scaling(n) for n in actual.targets} == {n: adapter.scaling(n) for n in adapter.targets}


def test_the_bytes_depend_neither_on_the_hash_seed_nor_on_the_order_of_modules(tmp_path, base, weights):
    modules = ("up_proj", "k_proj", "v_proj", "q_proj", "o_proj")
    script = (
        "import sys; from builders.random_adapters import *; from llorch.lora.base import BaseIdentity, identity_of\n"
        "from llorch.lora.peft_format import write_peft\n"
        f"w = open_weights(sys.argv[1]); modules = {tuple(sorted(modules))}\n"
        "write_peft(random_adapter(w.config, target_modules=modules), sys.argv[2], base=identity_of(w, 'base'))\n"
    )
    folders = [tmp_path / f"adapter{number}" for number in (1, 2)]
    write_peft(random_adapter(weights.config, target_modules=modules), folders[0], base=identity_of(weights, "base"))
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = [sys.executable, "-c", script, str(base), str(folders[1])]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    one, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert one == other
    assert one.keys() == {"adapter_config.json", "adapter_model.safetensors", "llorch_base.json"}
    with open_safetensors(folders[0] / "adapter_model.safetensors") as file:
        assert file.metadata == {"format": "pt"}  # some readers refuse a file without it
        assert list(file.tensors) == sorted(file.tensors)


def test_patterns_keep_their_order(tmp_path, weights):
    adapter = random_adapter(weights.config, rank_pattern={r"layers\.1\.self_attn\.q_proj": 7, "q_proj": 2})
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    assert read_peft(tmp_path / "adapter", weights.config).tensors["layers.1.q_proj"].lora_A.shape[0] == 7


def test_base_is_recorded_in_the_adapter_folder(tmp_path, weights):
    identity = identity_of(weights, "a name")
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity)
    assert read_peft_base(tmp_path / "adapter") == identity
    (tmp_path / "adapter" / "llorch_base.json").unlink()
    assert read_peft_base(tmp_path / "adapter") == "a name"  # as PEFT keeps it


@pytest.mark.live
def test_copies_of_base_matrices_that_peft_writes_are_found(tmp_path):
    base = tiny_base(tmp_path / "base", tied=True)
    folder = save_quietly(peft_model(base, r=2, target_modules=["embed_tokens", "lm_head"]), tmp_path / "adapter")
    weights = open_weights(base)
    copies, embedding = read_peft_copies(folder, weights.config), weights.array("embed_tokens")
    assert copies.keys() == {"embed_tokens", "lm_head"}
    assert all(np.array_equal(copy, embedding) for copy in copies.values())


def test_interrupted_write_never_pairs_an_old_config_with_new_tensors(tmp_path, monkeypatch, weights):
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    monkeypatch.setattr(BaseIdentity, "to_json", lambda self: 1 / 0)  # a failure between tensors and configuration
    other = random_adapter(weights.config, lora_alpha=9.0, seed=1)
    with pytest.raises(ZeroDivisionError):
        write_peft(other, tmp_path / "adapter", base=identity_of(weights))
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_peft(tmp_path / "adapter", weights.config)


def test_half_precision_tensors_are_widened(tmp_path):
    import safetensors.numpy as container

    weights = open_weights(tiny_base(tmp_path / "base"))
    folder = tmp_path / "adapter"
    write_peft(random_adapter(weights.config), folder, base=identity_of(weights))
    tensors = container.load_file(folder / "adapter_model.safetensors")
    halves = {name: array.astype(np.float16) for name, array in tensors.items()}
    container.save_file(halves, folder / "adapter_model.safetensors", {"format": "pt"})
    actual = read_peft(folder, weights.config)
    expected = halves["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].astype(np.float32)
    np.testing.assert_array_equal(actual.tensors["layers.0.q_proj"].lora_A, expected, strict=True)


def rename_to_default_adapter(folder: Path) -> Path:
    """Name the tensors of an adapter as the state of a model does, with the name of the adapter."""
    tensors = {}
    for name, array in container.load_file(folder / "adapter_model.safetensors").items():
        owner, _, end = name.partition(".lora_")
        kind = "magnitude_vector.default.weight" if end.startswith("magn") else f"{end[:-6] + 'default.weight'}"
        kind = f"{end}.default" if end.startswith("embedding") else kind
        tensors[f"{owner}.lora_{kind}"] = array
    container.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


NAMED = {"target_modules": ("embed_tokens", "q_proj"), "use_dora": True}


def test_tensors_named_default_are_read(tmp_path, weights):
    adapter = random_adapter(weights.config, **NAMED)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    folder = rename_to_default_adapter(tmp_path / "adapter")
    assert same_tensors(read_peft(folder, weights.config), adapter)
    found = summarise(folder)
    assert (found.problems, len(found.matrices)) == ([], len(adapter.targets))


def test_duplicate_tensor_is_refused(tmp_path, weights):
    write_peft(random_adapter(weights.config), tmp_path / "adapter", base=identity_of(weights))
    tensors = container.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    again = name.replace("lora_A", "lora_A.default")
    container.save_file(tensors | {again: tensors[name] + 1}, tmp_path / "adapter" / "adapter_model.safetensors")
    with refuses("Duplicate", name, again):
        read_peft(tmp_path / "adapter", weights.config)


@pytest.mark.live
def test_peft_reads_tensors_named_default(tmp_path):
    base = tiny_base(tmp_path / "base")
    adapter = random_adapter(open_weights(base).config, **NAMED)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(open_weights(base)))
    theirs = torch_logits(peft_model(base, rename_to_default_adapter(tmp_path / "adapter")))
    np.testing.assert_allclose(adapted_logits(base, adapter), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.live
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head", "q_proj"], ".*(lm_head|k_proj)"])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_tied_embedding_and_output_share_is_read_and_merged(tmp_path, modules, dora):
    base = tiny_base(tmp_path / "base", "qwen3", tied=True)
    model = peft_model(base, r=3, lora_alpha=5, target_modules=modules, ensure_weight_tying=True, use_dora=dora)
    folder, theirs = save_quietly(model, tmp_path / "adapter"), torch_logits(model)
    adapter = read_peft(folder, open_weights(base).config)
    assert {"embed_tokens", "lm_head"} <= adapter.targets.keys()
    merge(base, folder, tmp_path / "merged", any_base=True)
    for ours in (adapted_logits(base, adapter), plain_logits(tmp_path / "merged")):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("modules", [("embed_tokens",), ("lm_head", "q_proj"), ".*(lm_head|k_proj)"])
def test_an_adapter_that_tied_embedding_and_output_share_names_both(tmp_path, modules):
    weights = open_weights(tiny_base(tmp_path / "base", "qwen3", tied=True))
    both = f"{modules}|.*embed_tokens" if isinstance(modules, str) else (*modules, "embed_tokens", "lm_head")
    adapter = random_adapter(weights.config, target_modules=both)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": modules, "ensure_weight_tying": True}))
    assert same_tensors(read_peft(tmp_path / "adapter", weights.config), adapter)

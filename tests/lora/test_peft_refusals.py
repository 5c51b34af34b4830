"""Adapter folders that cannot be used: each is refused with its code and the name of what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import random_adapter, tiny_base
from helpers.refusals import assert_tells, refuses

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.lora.base import identity_of
from llorch.lora.files import read_adapter, recorded_base
from llorch.lora.peft_format import write_peft
from llorch.runtime.errors import FormatError

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("refusals")
    weights = open_weights(tiny_base(folder / "base"))
    adapter = random_adapter(weights.config, target_modules=("q_proj", "v_proj", "embed_tokens"))
    write_peft(adapter, folder / "adapter", base=identity_of(weights))
    return folder / "adapter", weights.config


@pytest.fixture
def adapter(model: tuple[Path, ModelConfig], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model[0], tmp_path / "adapter"))


def with_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = container.load_file(folder / TENSORS)
    change(tensors)
    container.save_file(tensors, folder / TENSORS, {"format": "pt"})


def drop_every_second_tensor(tensors: dict) -> None:
    for name in list(tensors)[::2]:
        del tensors[name]


def rename_tensors(tensors: dict) -> None:
    for name in list(tensors):
        tensors[name.replace("base_model.model.", "")] = tensors.pop(name)


def insert_nan(tensors: dict) -> None:
    tensors[f"{Q}.lora_B.weight"][1, 1] = np.nan


def add_tensor(name: str, shape: tuple[int, ...]) -> Callable[[dict], object]:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "code", "expected_names"),
    [
        (drop_every_second_tensor, "Missing", "layers."),
        (rename_tensors, "Missing", "Unexpected: model.embed_tokens.lora_embedding_A"),
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "Missing", "layers.0.q_proj.lora_A"),
        (add_tensor("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", (3, 32)), "Unexpected", "layers.9"),
        (add_tensor(f"{Q}.lora_A.weight", (4, 32)), "Shape", ("layers.0.q_proj.lora_A", "(3, 32)", "got (4, 32)")),
        (add_tensor(f"{Q}.lora_A.weight", (96,)), "Shape", "got (96,)"),
        (add_tensor(f"{Q}.lora_A.weight", (32, 3)), "Shape", "layers.0.q_proj.lora_A"),
        (add_tensor(f"{Q}.lora_B.weight", (32, 4)), "Shape", "layers.0.q_proj.lora_B"),
        (insert_nan, "NonFinite", "layers.0.q_proj.lora_B"),
        (add_tensor(f"{Q}.lora_B.bias", (32,)), "Unsupported", "lora_bias"),
        (add_tensor(f"{Q}.lora_magnitude_vector", (32,)), "Unexpected", "lora_magnitude_vector"),
        (add_tensor("base_model.model.lm_head.weight", (40, 32)), "Unsupported", "save_embedding_layers"),
        (
            add_tensor("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", (1, 32)),
            "Unsupported",
            "trainable_token_indices",
        ),
        (add_tensor("base_model.model.model.embed_tokens.base_layer.weight", (44, 32)), "Shape", "resized"),
        (add_tensor(f"{Q}.base_layer.weight", (32, 32)), "Unexpected", "base_layer"),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.ones((3, 32), np.int64)}), "DType", "I64"),
    ],
)
def test_invalid_tensors_are_refused_by_name(adapter, model, change, code, expected_names):
    with_tensors(adapter, change)
    with pytest.raises(FormatError) as caught:
        read_adapter(adapter, model[1])
    assert caught.value.code == code
    for name in expected_names if isinstance(expected_names, tuple) else (expected_names,):  # ends of names, too
        assert name in str(caught.value)
    assert_tells(str(caught.value), where=adapter)


def test_mlx_adapter_is_named_in_the_error(adapter, model):
    mlx = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(mlx))
    with refuses("Unsupported", "MLX", where=adapter):
        read_adapter(adapter, model[1])


def test_fully_trained_module_is_named_with_the_remedy(adapter, model):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["lm_head", "norm"]}))
    with refuses("Unsupported", "['lm_head', 'norm']", "merge_and_unload", where=("modules_to_save", config)):
        read_adapter(adapter, model[1])


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("lora_alpha", 0, "OutOfRange"),
        ("lora_alpha", "16", "Malformed"),
        ("r", 0, "OutOfRange"),
        ("r", 8, "Shape"),
        ("r", 2.5, "Malformed"),
        ("r", None, "Missing"),
        ("peft_type", "IA3", "Unsupported"),
        ("target_modules", ["q_proj", "v_proj", "c_attn"], "Missing"),
        ("target_modules", ["q_proj"], "Unexpected"),
        ("target_modules", None, "Missing"),
        ("target_modules", {"q_proj": 1}, "Malformed"),
        ("target_modules", "(", "OutOfRange"),
        ("lora_dropout", 1.5, "OutOfRange"),
        ("use_dora", True, "Missing"),
        ("use_rslora", "yes", "Malformed"),
        ("rank_pattern", {"q_proj": 4}, "Shape"),
        ("alpha_pattern", {"q_proj": -1}, "OutOfRange"),
        ("layers_to_transform", ["0"], "Malformed"),
        ("layers_pattern", "blocks", "Unsupported"),
        ("bias", "lora_only", "Unsupported"),
        ("lora_bias", True, "Unsupported"),
        ("fan_in_fan_out", True, "Unsupported"),
        ("trainable_token_indices", [3], "Unsupported"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "Missing"),
        ("layer_replication", [[0, 1], [0, 2]], "Unsupported"),
        ("alora_invocation_tokens", [1, 2], "Unsupported"),
        ("use_qalora", True, "Unsupported"),
        ("init_lora_weights", "pissa_niter_4", "Unsupported"),
        ("use_time_travel", True, "Unsupported"),
    ],
)
def test_invalid_or_unsupported_fields_are_refused_by_name(adapter, model, field, value, code):
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with refuses(code, *((field,) if code == "Unsupported" else ()), where=adapter):
        read_adapter(adapter, model[1])


def test_advice_to_merge_says_more_for_an_embedding(adapter, model):
    path = adapter / CONFIG
    values = json.loads(path.read_text()) | {"lora_bias": True}
    for modules, told in ((["embed_tokens"], True), (["q_proj"], False)):
        path.write_text(json.dumps(values | {"target_modules": modules}))
        with pytest.raises(FormatError) as caught:
            read_adapter(adapter, model[1])
        assert ("lm_head" in str(caught.value)) == told


def test_unknown_disabled_field_is_ignored_with_its_name(adapter, model, caplog):
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_time_travel": False, "warp_config": None}))
    read_adapter(adapter, model[1])
    assert "use_time_travel" in caplog.text
    assert "warp_config" in caplog.text


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"r": NaN}', b'{"r": 1, "r": 2}'])
def test_a_damaged_configuration_is_refused(adapter, model, text):
    (adapter / CONFIG).write_bytes(text)
    with refuses("Malformed", where=adapter / CONFIG):
        read_adapter(adapter, model[1])


@pytest.mark.parametrize(
    ("cut", "code"),
    [(lambda b: b[:-7], "Truncated"), (lambda b: b"\xff" * 8 + b[8:], "TooLarge"), (lambda b: b"", "Truncated")],
)
def test_a_damaged_tensor_file_is_refused(adapter, model, cut, code):
    (adapter / TENSORS).write_bytes(cut((adapter / TENSORS).read_bytes()))
    with refuses(code, where=adapter / TENSORS):
        read_adapter(adapter, model[1])


def test_a_pickle_is_never_opened(adapter, model):
    (adapter / TENSORS).rename(adapter / "adapter_model.bin")
    with refuses("Unsafe", "adapter_model.bin", where=adapter):
        read_adapter(adapter, model[1])


def test_a_tensor_file_that_is_a_link_out_of_the_folder_is_refused(adapter, model, tmp_path):
    (adapter / TENSORS).rename(tmp_path / "elsewhere")
    (adapter / TENSORS).symlink_to(tmp_path / "elsewhere")
    with refuses("Unsafe", TENSORS, "link", where=adapter):
        read_adapter(adapter, model[1])


def test_missing_file_is_named(adapter, model):
    with refuses(FileNotFoundError, "adapter", where=adapter / "x"):
        read_adapter(adapter / "x", model[1])
    (adapter / CONFIG).unlink()
    with refuses(FileNotFoundError, where=adapter / CONFIG):
        read_adapter(adapter, model[1])


def test_a_lone_tensor_file_is_refused_with_the_remedy(adapter, model):
    with refuses("Unsupported", "folder", CONFIG, where=adapter / TENSORS):
        read_adapter(adapter / TENSORS, model[1])


@pytest.mark.parametrize("text", ["{}", '{"name": "x", "config": "1", "vectors": "2", "matrices": "3", "types": []}'])
def test_a_damaged_record_of_the_base_is_refused(adapter, text):
    (adapter / "llorch_base.json").write_text(text)
    with refuses("Missing" if text == "{}" else "Malformed", "config", where=adapter / "llorch_base.json"):
        recorded_base(adapter)

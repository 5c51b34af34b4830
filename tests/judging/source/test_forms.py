"""The lawful forms of weights, on files that llorch and llama.cpp's converter write."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders.families import random_folder, twin

from llorch.files import GGUFFile, Weights, export, open_weights
from llorch.files import convert as conversion
from llorch.files.convert import convert
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import undo_interleave
from llorch.files.tensor_storage import Layout
from llorch.judging.source.forms import Form, additional, folder_forms, gguf_forms
from llorch.runtime.builtin import EVERY, builtin_path

CONVERTED = [name for name in EVERY if name != "micro-mistral"]  # llama.cpp has no sliding windows for Mistral
BY_LLAMACPP = {  # family -> the folder holds a multimodal model
    "mistral": False, "qwen3_next": False, "qwen3_5": False, "qwen3_5_moe": True, "qwen3_vl_moe": True, "llama4": True,
}  # fmt: skip
Tensors = dict[str, np.ndarray]


def read_tensors(weights: Weights) -> Tensors:
    return {name: weights.source.array(name) for name in weights.source.tensors}


def find_forms(tensors: Tensors, weights: Weights) -> dict[str, Form]:
    """Find the forms of some tensors, in the format and with the configuration of an open model."""
    find = gguf_forms if isinstance(weights.source, GGUFFile) else folder_forms
    return find({name: array.shape for name, array in tensors.items()}, weights.config)


def find_additional(tensors: Tensors, weights: Weights) -> list[str]:
    shapes = {name: array.shape for name, array in tensors.items()}
    return additional(shapes, find_forms(tensors, weights), weights.config)


def apply_form(form: Form, tensors: Tensors) -> np.ndarray:
    """Compute a canonical weight, (rows, columns), by the docstring of `Form`."""
    arrays = [tensors[name] for name in form.tensors]
    assert {array.shape for array in arrays} == {form.shape}
    arrays = [array.swapaxes(-1, -2) if form.is_transposed else array for array in arrays]
    weight = np.concatenate([array.reshape(-1, form.weight_shape[1]) for array in arrays])
    weight = weight if form.rows is None else weight[form.rows]
    weight = weight if form.columns is None else weight[:, form.columns]
    assert weight.shape == form.weight_shape
    match form.value:
        case "same":
            return weight
        case "plus one":
            return weight + np.float32(1)
        case "minus exp":
            return -np.exp(weight.astype(np.float64)).astype(np.float32)


def canonical_weights(weights: Weights) -> Tensors:
    """Compute all weights of an open model; fail for an additional tensor."""
    tensors = read_tensors(weights)
    assert find_additional(tensors, weights) == []
    return {name: apply_form(form, tensors) for name, form in find_forms(tensors, weights).items()}


def differing_names(actual: Tensors, expected: Tensors) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name in actual if not is_equal(name, actual[name], expected[name])]


def is_equal(name: str, actual: np.ndarray, expected: np.ndarray) -> bool:
    """Check for equal bits, of -exp(A_log) for a difference of at most 1 ulp."""
    if name.endswith("A_log"):
        return bool((np.abs(actual - expected) <= np.spacing(np.abs(expected))).all())
    return actual.dtype == np.float32 and actual.tobytes() == expected.tobytes()


def convert_builtin(name: str, tmp_path: Path) -> tuple[Weights, Weights]:
    """Write a built-in model in the other format, in float32; return the new and the built-in model."""
    source = builtin_path(name)
    target = tmp_path / ("model.gguf" if source.is_dir() else "folder")
    convert(source, target, ggml_type=GGMLType.F32)
    return open_weights(target), open_weights(source)


@pytest.mark.parametrize("name", CONVERTED)
def test_both_formats_of_a_builtin_model_have_equal_canonical_weights(name: str, tmp_path: Path):
    written, builtin = convert_builtin(name, tmp_path)
    assert differing_names(canonical_weights(written), canonical_weights(builtin)) == []
    assert_each_value_has_one_weight(written)
    assert_each_value_has_one_weight(builtin)


def assert_each_value_has_one_weight(weights: Weights) -> None:
    """Give each stored value a number, and require that the forms select each number once."""
    outside = ("rope_freqs.weight", "model.visual.")
    stored = {name: array for name, array in read_tensors(weights).items() if not name.startswith(outside)}
    forms, tensors, n_values = find_forms(stored, weights), Tensors(), 0
    for name, array in stored.items():
        tensors[name] = np.arange(n_values, n_values + array.size).reshape(array.shape)
        n_values += array.size
    selected = [apply_form(replace(form, value="same"), tensors).reshape(-1) for form in forms.values()]
    assert np.array_equal(np.sort(np.concatenate(selected)), np.arange(n_values))


@pytest.mark.live
def test_fused_inputs_of_a_delta_net_are_split_as_transformers_does(tmp_path: Path):
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    folder, _ = convert_builtin("micro-qwen3-next", tmp_path)
    tensors, net, prefix = read_tensors(folder), folder.config.delta_net, "model.layers.0.linear_attn."
    assert net is not None
    sizes = SimpleNamespace(
        num_k_heads=net.n_key_heads, num_v_heads=net.n_value_heads, head_k_dim=net.key_head_dim,
        head_v_dim=net.value_head_dim,
    )  # fmt: skip
    fused = [torch.from_numpy(tensors[f"{prefix}in_proj_{part}.weight"].T[None].copy()) for part in ("qkvz", "ba")]
    split = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(sizes, *fused)  # type: ignore[arg-type]
    q, k, v, z, b, a = (array.reshape(array.shape[1], -1).numpy().T for array in split)
    forms = find_forms(tensors, folder)
    for part, expected in (("qkv", np.concatenate([q, k, v])), ("z", z), ("b", b), ("a", a)):
        assert np.array_equal(apply_form(forms[f"{prefix}in_proj_{part}.weight"], tensors), expected), part


@pytest.mark.live
@pytest.mark.weights
@pytest.mark.nightly_cases(but=["qwen3_next"])
@pytest.mark.parametrize("family", BY_LLAMACPP)
def test_file_of_the_llamacpp_converter_has_the_canonical_weights_of_its_folder(family: str, tmp_path: Path):
    folder = random_folder(family, tmp_path / "folder", 0, nested=BY_LLAMACPP[family])
    file = twin(folder, tmp_path / "model.gguf")
    actual, expected = canonical_weights(open_weights(file)), canonical_weights(open_weights(folder))
    assert differing_names(actual, expected) == []
    assert len(actual) >= 30


CHANGES: dict[str, Callable[[Form], Form]] = {
    "inverse rows": lambda form: replace(form, rows=inverse(form.rows)),
    "rows as stored": lambda form: replace(form, rows=None),
    "inverse columns": lambda form: replace(form, columns=inverse(form.columns)),
    "columns as stored": lambda form: replace(form, columns=None),
    "not transposed": lambda form: replace(form, is_transposed=False),
}


def inverse(order: np.ndarray | None) -> np.ndarray:
    assert order is not None
    return np.argsort(order)


@pytest.mark.parametrize(
    ("name", "weight", "change"),
    [
        ("micro-llama", "self_attn.q_proj.weight", "inverse rows"),
        ("micro-smollm3", "self_attn.k_proj.weight", "inverse rows"),
        ("micro-ministral3", "self_attn.k_proj.weight", "rows as stored"),
        ("micro-qwen3.5", "linear_attn.in_proj_qkv.weight", "inverse rows"),
        ("micro-qwen3.5", "linear_attn.in_proj_z.weight", "inverse rows"),
        ("micro-qwen3.5", "linear_attn.conv1d.weight", "rows as stored"),
        ("micro-qwen3.5", "linear_attn.A_log", "inverse rows"),
        ("micro-qwen3.5-moe", "linear_attn.dt_bias", "inverse rows"),
        ("micro-qwen3.5-moe", "linear_attn.in_proj_a.weight", "inverse rows"),
        ("micro-qwen3.5-moe", "linear_attn.out_proj.weight", "inverse columns"),
        ("micro-qwen3.5-moe", "linear_attn.out_proj.weight", "columns as stored"),
        ("micro-qwen3-next", "linear_attn.in_proj_b.weight", "inverse rows"),
        ("micro-qwen3-vl-moe", "mlp.experts.down_proj.weight", "not transposed"),
        ("micro-qwen3-vl-moe", "mlp.experts.up_proj.weight", "inverse rows"),
    ],
)
def test_another_form_gives_another_weight(name: str, weight: str, change: str, tmp_path: Path):
    written, builtin = convert_builtin(name, tmp_path)
    weight, tensors = f"model.layers.0.{weight}", read_tensors(builtin)
    forms = find_forms(tensors, builtin)
    forms[weight] = CHANGES[change](forms[weight])
    actual = {name: apply_form(form, tensors) for name, form in forms.items()}
    assert differing_names(actual, canonical_weights(written)) == [weight]


@pytest.mark.parametrize("weight", ["input_layernorm.weight", "linear_attn.A_log"])
def test_stored_value_of_a_folder_is_not_the_weight(weight: str, tmp_path: Path):
    folder, file = convert_builtin("micro-qwen3.5", tmp_path)
    weight, tensors = f"model.layers.0.{weight}", read_tensors(folder)
    forms = find_forms(tensors, folder)
    forms[weight] = replace(forms[weight], value="same")
    actual = {name: apply_form(form, tensors) for name, form in forms.items()}
    assert differing_names(actual, canonical_weights(file)) == [weight]


def test_fault_in_the_permutation_of_the_writer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = convert_builtin("micro-llama", tmp_path)
    monkeypatch.setattr(export, "interleave", undo_interleave)
    monkeypatch.setattr(conversion, "read_back", lambda *arguments: None)
    convert(folder.path, tmp_path / "wrong.gguf", ggml_type=GGMLType.F32)
    names = differing_names(canonical_weights(open_weights(tmp_path / "wrong.gguf")), canonical_weights(folder))
    assert {name.partition("self_attn.")[2] for name in names} == {"q_proj.weight", "k_proj.weight"}
    assert len(names) == 2 * folder.config.n_layers


def test_fault_in_the_stored_norms_of_the_writer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layout, "_to_stored", lambda layout, array: array)
    monkeypatch.setattr(conversion, "read_back", lambda *arguments: None)
    written, builtin = convert_builtin("micro-qwen3.5", tmp_path)
    names = differing_names(canonical_weights(written), canonical_weights(builtin))
    assert {re.sub(r"^model\.(layers\.\d+\.)?", "", name) for name in names} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight", "norm.weight", "linear_attn.A_log",
    }  # fmt: skip


def rename(tensors: Tensors, pattern: str, replacement: str) -> Tensors:
    return {re.sub(pattern, replacement, name): array for name, array in tensors.items()}


def require_canonical(tensors: Tensors, weights: Weights, expected: Tensors) -> None:
    """Require that tensors, with the configuration of `weights`, are the expected canonical weights."""
    assert find_additional(tensors, weights) == []
    forms = find_forms(tensors, weights)
    assert differing_names({name: apply_form(form, tensors) for name, form in forms.items()}, expected) == []


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"^model\.", ""),  # saved without head
        (r"^model\.", "model.language_model."),
        (r"^(model|lm_head)\.", r"language_model.\1."),
        (r"^model\.", "language_model."),  # a multimodal model, saved without head
    ],
)
def test_prefixes_of_a_folder_do_not_change_the_forms(pattern: str, replacement: str, tmp_path: Path):
    folder, file = convert_builtin("micro-llama", tmp_path)
    tensors = rename(read_tensors(folder), pattern, replacement)
    assert tensors.keys() != read_tensors(folder).keys()
    require_canonical(tensors, folder, canonical_weights(file))


def test_old_file_with_fused_inputs_of_a_delta_net_has_equal_weights(tmp_path: Path):
    folder, file = convert_builtin("micro-qwen3-next", tmp_path)
    fused = read_tensors(folder)["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    tensors = read_tensors(file) | {"blk.0.ssm_in.weight": fused}
    del tensors["blk.0.attn_qkv.weight"], tensors["blk.0.attn_gate.weight"]
    require_canonical(tensors, file, canonical_weights(file))


@pytest.mark.parametrize("name", ["micro-qwen3-moe", "micro-qwen3-next", "micro-llama4"])
def test_fused_experts_of_a_gguf_file_are_read(name: str):
    file = open_weights(builtin_path(name))
    tensors = read_tensors(file)
    for gate in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
        up = gate.replace("gate", "up")
        tensors[gate.replace("gate", "gate_up")] = np.concatenate([tensors.pop(gate), tensors.pop(up)], axis=1)
    require_canonical(tensors, file, canonical_weights(file))


@pytest.mark.parametrize(("size", "hidden"), [(6, 12), (12, 12), (7, 12)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_orientation_of_square_experts_is_that_of_the_other_stack(size: int, hidden: int, is_transposed: bool):
    config = open_weights(builtin_path("micro-llama4")).config
    assert config.experts is not None
    prefix, n_experts = "model.layers.1.feed_forward.experts", config.experts.n_experts
    config = replace(config, hidden_size=hidden, experts=replace(config.experts, expert_size=size))
    shapes = {f"{prefix}.gate_up_proj": (2 * size, hidden), f"{prefix}.down_proj": (hidden, size)}
    names = {name: (n_experts, *(shape[::-1] if is_transposed else shape)) for name, shape in shapes.items()}
    forms = folder_forms(names, config)
    assert {name.removeprefix(prefix) for name in forms} == {
        ".gate_proj.weight",
        ".up_proj.weight",
        ".down_proj.weight",
    }
    assert {form.is_transposed for form in forms.values()} == {is_transposed}
    assert all(form.shape == names[form.tensors[0]] for form in forms.values())


def test_transposed_stack_of_a_gguf_file_has_another_shape_than_its_form():
    file = open_weights(builtin_path("micro-llama4"))
    tensors = read_tensors(file)
    name = next(name for name in tensors if name.endswith("ffn_down_exps.weight"))
    tensors[name] = tensors[name].swapaxes(1, 2)
    (form,) = (form for form in find_forms(tensors, file).values() if form.tensors == (name,))
    assert (form.is_transposed, form.shape) == (False, read_tensors(file)[name].shape)


def test_form_has_the_required_shape_of_a_cut_tensor(tmp_path: Path):
    folder, file = convert_builtin("micro-llama", tmp_path)
    for weights, name in ((folder, "model.layers.0.mlp.up_proj.weight"), (file, "blk.0.ffn_up.weight")):
        tensors = read_tensors(weights)
        shape = tensors[name].shape
        tensors[name] = tensors[name][:-1]
        form = find_forms(tensors, weights)["model.layers.0.mlp.up_proj.weight"]
        assert (form.tensors, form.shape, form.weight_shape) == ((name,), shape, shape)


def test_axes_of_length_1_are_those_of_the_file():
    file = open_weights(builtin_path("micro-qwen2-moe"))
    expected, tensors = canonical_weights(file), read_tensors(file)
    for name in [name for name in tensors if name.endswith("ffn_gate_inp_shexp.weight")]:
        for shape in ((32,), (1, 32), (1, 1, 32)):
            require_canonical(tensors | {name: tensors[name].reshape(shape)}, file, expected)


def test_form_names_the_missing_expert(tmp_path: Path):
    folder, _ = convert_builtin("micro-qwen3-moe", tmp_path)
    tensors = read_tensors(folder)
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[missing]
    form = find_forms(tensors, folder)["model.layers.1.mlp.experts.up_proj.weight"]
    assert [name for name in form.tensors if name not in tensors] == [missing]
    assert form.weight_shape == (7 * 20, 32)


FOREIGN = ["blk.9.attn_q.weight", "model.layers.9.self_attn.q_proj.weight", "score.weight", "mtp.fc.weight"]
FOREIGN += ["model.visual.proj.weight", "model.lm_head.weight", "lm_head.bias", "blk.0.attn_q.scale"]


@pytest.mark.parametrize(
    ("name", "lawful"),
    [
        ("micro-llama", set()),
        ("micro-qwen3-vl-moe", {"model.visual.proj.weight"}),
        ("micro-qwen3.5", {"blk.9.attn_q.weight", "mtp.fc.weight"}),
    ],
)
def test_tensors_of_no_form_are_additional(name: str, lawful: set[str]):
    weights = open_weights(builtin_path(name))
    extras = [*FOREIGN, "rope_freqs.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    tensors = read_tensors(weights) | {extra: np.zeros(4, np.float32) for extra in extras}
    assert find_additional(tensors, weights) == [extra for extra in FOREIGN if extra not in lawful]


def test_second_copy_of_a_weight_is_additional(tmp_path: Path):
    folder, _ = convert_builtin("micro-llama", tmp_path)
    tensors = read_tensors(folder)
    tensors["norm.weight"] = tensors["model.norm.weight"]
    assert find_additional(tensors, folder) == ["norm.weight"]

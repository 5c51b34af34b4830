"""The independent converter writes what llama.cpp's converter writes, and each mistake changes the tensors it names."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from builders.conversion_mistakes import MISTAKES, inject
from builders.converter import (
    Plan,
    SourceConfig,
    convert,
    plan_conversion,
    quantise,
    random_importances,
)
from builders.damaged_files import (
    MERGE_MISTAKES,
    cut_tensor,
    damage_block,
    exchange_rows,
    merge,
    scale_block,
    write_adapter,
)
from builders.families import twin
from builders.random_adapters import logits_of, peft_model, plain_logits
from builders.source_folders import FAMILIES, read_tensors, to_bfloat16, write_source

from llorch.files import open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.files import read_adapter

IDS = [3, 17, 250, 39, 0, 25, 17, 300]
# Matrix products of the same numbers in another order: measured up to 4e-6, relative to the largest logit.
ROUNDING = 2e-5
ULP = 2.0**-23
_REFERENCE = """
import json, sys
from pathlib import Path
tree, jobs = sys.argv[1:]
sys.path[:0] = [tree + "/gguf-py", tree]
import gguf
from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class
for folder, target, kind, words in json.loads(jobs):
    hparams = ModelBase.load_hparams(Path(folder), False)
    model = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    TextModel.get_vocab_base_pre = lambda self, tokenizer, words=words: words  # it knows tokenizers by a hash
    model.set_vocab, model.no_mtp = TextModel._set_vocab_gpt2, True
    model(Path(folder), getattr(gguf.LlamaFileType, kind), Path(target), eager=True).write()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("sources")
    return {family: write_source(parent / family, family) for family in FAMILIES}


def tensors_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Types and bytes of a GGUF file's tensors, read by the gguf package."""
    return {tensor.name: (tensor.tensor_type.name, np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}


def metadata_of(path: Path) -> dict[str, tuple[Any, Any]]:
    """Types and values of a GGUF file's metadata, without those that describe the file."""
    fields = gguf.GGUFReader(path).fields.items()
    skipped = ("GGUF.", "general.name", "general.size_label")
    return {key: (field.types, field.contents()) for key, field in fields if not key.startswith(skipped)}


def changed_names(actual: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    return {name for name in actual.keys() | expected.keys() if not is_same(actual.get(name), expected.get(name))}


def is_same(actual: Any, expected: Any) -> bool:
    if actual is None or expected is None:
        return False
    return np.array_equal(actual[1], expected[1]) and actual[0] == expected[0]


@pytest.mark.live
@pytest.mark.weights
def test_converter_without_a_mistake_equals_llama_cpp(folders: dict[str, Path], tmp_path: Path):
    tree = os.environ.get("LLORCH_LLAMACPP")
    if not tree:
        pytest.skip("NOT RUN: LLORCH_LLAMACPP is not set (tests/support/fetch_vocabularies.py gets the converter)")
    kinds = {"ALL_F32": "F32", "MOSTLY_BF16": "BF16", "MOSTLY_Q8_0": "Q8_0"}
    pairs = [(family, kind) for family in FAMILIES for kind in kinds if kind == "ALL_F32" or family == "qwen3_5"]
    jobs = [
        (str(folders[family]), str(tmp_path / f"{family}-{kind}.gguf"), kind, FAMILIES[family].words)
        for family, kind in pairs
    ]
    command = [sys.executable, "-c", _REFERENCE, tree, json.dumps(jobs)]
    subprocess.run(command, check=True, capture_output=True)
    for family, kind in pairs:
        target, reference = tmp_path / "actual.gguf", tmp_path / f"{family}-{kind}.gguf"
        convert(folders[family], target, kind=kinds[kind])  # type: ignore[arg-type]
        actual, expected = tensors_of(target), tensors_of(reference)
        assert actual.keys() == expected.keys()
        for name in actual:
            tolerance = ULP if name.endswith("ssm_a") else 0  # torch's exp differs from NumPy's in the last bit
            assert actual[name][0] == expected[name][0], name
            np.testing.assert_allclose(actual[name][1], expected[name][1], rtol=tolerance, atol=0, err_msg=name)
        assert metadata_of(target) == metadata_of(reference)


@pytest.mark.live
@pytest.mark.weights
def test_converter_without_a_vocabulary_equals_llama_cpp(tmp_path: Path):
    folder = write_source(tmp_path / "source", "qwen2", vocabulary=False)
    expected = metadata_of(twin(folder, tmp_path / "expected.gguf"))
    assert metadata_of(convert(folder, tmp_path / "actual.gguf")) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_converter_without_a_mistake_gives_the_logits_of_the_folder(
    folders: dict[str, Path], tmp_path: Path, family: str
):
    expected = plain_logits(folders[family], IDS)
    actual = plain_logits(convert(folders[family], tmp_path / "right.gguf"), IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.live
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_and_transformers_compute_the_same(folders: dict[str, Path], tmp_path: Path, family: str):
    from llorch.engines import open_engine

    path = convert(folders[family], tmp_path / "right.gguf")
    logits = []
    for engine_name, model in (("llamacpp", path), ("transformers", folders[family])):
        with open_engine(engine_name, model) as engine:  # type: ignore[arg-type]
            logits.append(engine.logits(IDS))
    np.testing.assert_allclose(*logits, rtol=0, atol=ROUNDING * np.abs(logits[0]).max())


def test_row_lengths_are_multiples_of_256(folders: dict[str, Path]):
    for folder in folders.values():
        for name, array in plan_conversion(folder).tensors.items():
            assert array.ndim == 1 or array.shape[-1] % 256 == 0 or name.endswith("ssm_conv1d.weight"), name


@pytest.mark.parametrize("family", FAMILIES)
def test_mistake_changes_exactly_its_tensors_and_keys(folders: dict[str, Path], family: str):
    right = plan_conversion(folders[family])
    for name, mistake in MISTAKES.items():
        if mistake.applies(right.config):
            assert_changes_are_listed(right, name)


def assert_changes_are_listed(right: Plan, name: str, **where: Any) -> None:
    """Check a mistake in a plan against the right plan."""
    wrong = replace(right, tensors=dict(right.tensors), metadata=dict(right.metadata))
    inject(wrong, name, **where)
    mistake, config = MISTAKES[name], right.config
    tensors, expected = ({key: ("", value) for key, value in plan.tensors.items()} for plan in (wrong, right))
    keys = {key for key in right.metadata if wrong.metadata[key] != right.metadata[key]}
    assert changed_names(tensors, expected) == {*mistake.tensors(config, **where)}, name
    assert keys == {*mistake.metadata(config)}, name
    assert keys or changed_names(tensors, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_has_the_tensors_of_the_configuration(folders: dict[str, Path], family: str):
    plan = plan_conversion(folders[family])
    by_layer = [
        f"blk.{layer}.{name}" for layer in range(plan.config.n_layers) for name in plan.config.weights_of_layer(layer)
    ]
    assert {*by_layer, *plan.config.weights_outside_layers()} == plan.tensors.keys()


def test_every_mistake_applies_to_a_family(folders: dict[str, Path]):
    configs = [SourceConfig.read(folder) for folder in folders.values()]
    assert [name for name, mistake in MISTAKES.items() if not any(map(mistake.applies, configs))] == []


def test_mistake_applies_to_another_layer_or_tensor(folders: dict[str, Path]):
    right = plan_conversion(folders["qwen3"])
    assert_changes_are_listed(right, "down projection of another layer", layer=1)
    assert_changes_are_listed(right, "zeroed matrix", tensor="blk.1.attn_v.weight")
    assert_changes_are_listed(right, "q and k permuted without need", layer=0)


def test_mistake_that_does_not_apply_is_refused(folders: dict[str, Path], tmp_path: Path):
    with pytest.raises(ValueError, match="qwen3"):
        convert(folders["qwen3"], tmp_path / "wrong.gguf", "norms without the 1")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_files_with_two_mistakes_differ_in_the_tensors_of_both(folders: dict[str, Path], tmp_path: Path, kind: Any):
    folder, names = folders["llama"], ["q and k not permuted", "gate and up exchanged", "another epsilon"]
    right = convert(folder, tmp_path / "right.gguf", kind=kind)
    wrong = convert(folder, tmp_path / "wrong.gguf", names, kind=kind)
    config = SourceConfig.read(folder)
    expected = {tensor for name in names for tensor in MISTAKES[name].tensors(config)}
    assert changed_names(tensors_of(wrong), tensors_of(right)) == expected
    metadata, metadata_of_right = metadata_of(wrong), metadata_of(right)
    keys = {key for key in metadata_of_right if metadata[key] != metadata_of_right[key]}
    assert keys == {"llama.attention.layer_norm_rms_epsilon"}


COPIES = [  # family, mistake, tensor of the wrong file, and the tensor of the folder that it must equal
    ("llama", "q and k not permuted", "blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
    ("llama", "k and v exchanged", "blk.1.attn_v.weight", "model.layers.1.self_attn.k_proj.weight"),
    ("qwen2", "k and v exchanged", "blk.1.attn_k.bias", "model.layers.1.self_attn.v_proj.bias"),
    ("llama", "gate and up exchanged", "blk.1.ffn_gate.weight", "model.layers.1.mlp.up_proj.weight"),
    ("llama", "down projection of another layer", "blk.0.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ("llama", "head equal to the embedding", "output.weight", "model.embed_tokens.weight"),
    ("qwen2", "v bias equal to the k bias", "blk.0.attn_v.bias", "model.layers.0.self_attn.k_proj.bias"),
    ("qwen3_moe", "router of another layer", "blk.0.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
    ("qwen3_5", "norms without the 1", "blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_norm.weight"),
    (
        *("qwen3_5", "value heads not reordered", "blk.1.attn_qkv.weight"),
        "model.layers.1.linear_attn.in_proj_qkv.weight",
    ),
    (
        *("qwen3_5", "columns of the delta net's output not reordered", "blk.1.ssm_out.weight"),
        "model.layers.1.linear_attn.out_proj.weight",
    ),
]


@pytest.mark.parametrize(("family", "mistake", "tensor", "source_tensor"), COPIES)
def test_wrong_tensor_equals_a_tensor_of_the_folder(
    folders: dict[str, Path], family: str, mistake: str, tensor: str, source_tensor: str
):
    plan = plan_conversion(folders[family])
    inject(plan, mistake)
    np.testing.assert_array_equal(plan.tensors[tensor], read_tensors(folders[family])[0][source_tensor])


def test_exchanged_layers_have_each_other_s_tensors(folders: dict[str, Path]):
    right, wrong = plan_conversion(folders["qwen3_5"]), plan_conversion(folders["qwen3_5"])
    inject(wrong, "two layers exchanged")
    for name in right.config.weights_of_layer(0):
        for first, second in ((0, 1), (1, 0)):
            expected = right.tensors[f"blk.{second}.{name}"]
            np.testing.assert_array_equal(wrong.tensors[f"blk.{first}.{name}"], expected)


def test_fp8_values_are_the_nearest_of_e4m3(folders: dict[str, Path]):
    right, wrong = plan_conversion(folders["qwen3"]), plan_conversion(folders["qwen3"])
    inject(wrong, "rounded to FP8 first")
    array = right.tensors["blk.0.attn_q.weight"]
    scale = np.abs(array).max() / np.float32(448)
    exponents, mantissas = np.divmod(np.arange(127), 8)  # 127 is NaN
    codes = np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    magnitudes = np.abs(array / scale).ravel().astype(np.float64)
    expected = codes[np.abs(magnitudes[:, None] - codes).argmin(axis=1)]
    actual = np.abs(wrong.tensors["blk.0.attn_q.weight"] / scale).ravel()
    np.testing.assert_allclose(actual, expected, rtol=ULP)


def changed_rows(actual: Path, expected: Path, tensor: str) -> list[int]:
    """Rows of a tensor whose bytes differ; no other tensor differs."""
    changed, right = tensors_of(actual), tensors_of(expected)
    assert changed_names(changed, right) == {tensor}
    return np.flatnonzero((changed[tensor][1] != right[tensor][1]).any(axis=-1).ravel()).tolist()


def values_of(path: Path, tensor: str) -> np.ndarray:
    """Values of a tensor, as the gguf package decodes them."""
    info = next(info for info in gguf.GGUFReader(path).tensors if info.name == tensor)
    return gguf.quants.dequantize(info.data, info.tensor_type)


@pytest.fixture(scope="module")
def right_q8(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(folders["llama"], tmp_path_factory.mktemp("q8") / "right.gguf", kind="Q8_0")


TENSOR = "blk.1.ffn_up.weight"


def test_damage_changes_the_bytes_of_its_rows_only(right_q8: Path, tmp_path: Path):
    damages = {
        (3, 9): lambda path: exchange_rows(path, TENSOR, 3, 9),
        (2,): lambda path: damage_block(path, TENSOR, 21),
        (5,): lambda path: scale_block(path, TENSOR, 40, 1.02),
        tuple(range(500, 512)): lambda path: cut_tensor(path, TENSOR, 500),
    }
    for rows, damage in damages.items():
        path = tmp_path / "damaged.gguf"
        path.write_bytes(right_q8.read_bytes())
        damage(path)
        assert changed_rows(path, right_q8, TENSOR) == [*rows]


def test_damaged_values_are_those_of_the_description(right_q8: Path, tmp_path: Path):
    path, right = tmp_path / "damaged.gguf", values_of(right_q8, TENSOR)
    path.write_bytes(right_q8.read_bytes())
    exchange_rows(path, TENSOR, 3, 9)
    scale_block(path, TENSOR, 40, 1.5)
    cut_tensor(path, TENSOR, 500)
    expected = right.copy()
    expected[[3, 9]] = right[[9, 3]]
    expected[5, :32] *= 1.5
    expected[500:] = 0
    np.testing.assert_allclose(values_of(path, TENSOR), expected, rtol=2**-10)
    damage_block(path, TENSOR, 21)
    damaged = values_of(path, TENSOR)
    columns = np.flatnonzero(damaged[2] != right[2])
    assert np.isfinite(damaged).all()
    assert 25 < len(columns) <= 32
    assert {*columns} <= {*range(160, 192)}
    actual_scale, expected_scale = (tensors_of(file)[TENSOR][1][2, 5 * 34 :][:2] for file in (path, right_q8))
    np.testing.assert_array_equal(actual_scale, expected_scale)


@pytest.mark.live
@pytest.mark.nightly_cases("IQ*")
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q2_K", "Q3_K_S", "Q5_K_S", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_XS"])
def test_quantised_files_have_k_quants_and_damage_keeps_them_finite(
    folders: dict[str, Path], tmp_path: Path, kind: str
):
    right = convert(folders["qwen3_moe"], tmp_path / "right.gguf")
    path = quantise(right, tmp_path / "quantised.gguf", kind, importances=random_importances(right))
    blocks = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    matrices = [name for name in blocks if name.endswith(("_exps.weight", "attn_q.weight", "attn_output.weight"))]
    assert {blocks[name][-2:] for name in matrices} <= {"_K", "XS", "_S"}
    tensor = "blk.1.ffn_down_exps.weight"
    before = values_of(path, tensor)
    damage_block(path, tensor, 7)
    scale_block(path, tensor, 11, 2.0)
    after = values_of(path, tensor)
    assert np.isfinite(after).all()
    assert np.flatnonzero((after != before).any(axis=-1).ravel()).tolist() == [7, 11]
    np.testing.assert_allclose(after.reshape(-1, 256)[11], 2 * before.reshape(-1, 256)[11], rtol=2**-9)


@pytest.mark.live
def test_importances_change_the_quantised_values(folders: dict[str, Path], tmp_path: Path):
    right = convert(folders["llama"], tmp_path / "right.gguf")
    plain = tensors_of(quantise(right, tmp_path / "plain.gguf", "Q4_K_M"))
    weighted = quantise(right, tmp_path / "weighted.gguf", "Q4_K_M", importances=random_importances(right))
    assert TENSOR in changed_names(tensors_of(weighted), plain)


def test_bfloat16_rounds_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    np.testing.assert_array_equal(to_bfloat16(values), expected)
    assert to_bfloat16(values[:4]).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5"])
def test_merged_folder_gives_the_logits_of_base_and_adapter(tmp_path: Path, family: str):
    base = write_source(tmp_path / "base", family, dtype="F32")
    adapter = write_adapter(base, tmp_path / "adapter")
    weights = open_weights(base)
    expected = logits_of(AdaptedWeights(weights, read_adapter(adapter, weights.config)), IDS)
    actual = plain_logits(merge(base, adapter, tmp_path / "merged"), IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())
    assert np.abs(expected - plain_logits(base, IDS)).max() > 0.01 * np.abs(expected).max()


@pytest.mark.live
def test_merged_folder_equals_peft_s_merge(tmp_path: Path):
    base = write_source(tmp_path / "base", "qwen2", dtype="F32")
    adapter = write_adapter(base, tmp_path / "adapter", rank=3, alpha=5.0)
    model = peft_model(base, adapter).merge_and_unload().state_dict()
    tensors, _ = read_tensors(merge(base, adapter, tmp_path / "merged"))
    for name, array in tensors.items():
        np.testing.assert_allclose(array, model[name].numpy(), rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("mistake", MERGE_MISTAKES)
def test_merge_mistake_changes_exactly_its_tensors(folders: dict[str, Path], tmp_path: Path, mistake: str):
    base = folders["qwen2"]
    adapter = write_adapter(base, tmp_path / "adapter")
    right, _ = read_tensors(merge(base, adapter, tmp_path / "right"))
    wrong, dtypes = read_tensors(merge(base, adapter, tmp_path / "wrong", mistake))
    changed = {name for name in right if not np.array_equal(wrong[name], right[name])}
    assert changed == {*MERGE_MISTAKES[mistake].tensors(base, adapter)}
    assert changed
    assert dtypes == read_tensors(base)[1]

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, changed
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.files.quantised.activations import read_activations
from llorch.judging.runners.numpy import run
from llorch.ops.numerics import SCHEME
from llorch.ops.scheme_rounding import SchemeRounding
from llorch.runtime.builtin import builtin_path
from llorch.stages.stage_ref import Pass

RUN = [
    "ct-w8a8", "ct-fp8-dynamic", "ct-fp8-static-kv", "ct-mixed", "ct-fp8-block", "ct-mxfp4", "ct-mxfp8", "ct-nvfp4",
]  # fmt: skip
NAMES_OF_WEIGHTS_ALONE = [
    "ct-w4a16", "gptq-4bit", "awq-gemm", "mlx-4bit", "bnb-nf4", "auto-round-gptq", "torchao-int8", "torchao-float8",
]  # fmt: skip
INT8_DYNAMIC = {
    "_type": "Int8DynamicActivationInt8WeightConfig",
    "_version": 2,
    "_data": {
        "act_mapping_type": {"_data": "SYMMETRIC", "_type": "MappingType"},
        "granularity": {"_data": {"dim": -1}, "_type": "PerRow", "_version": 1},
        "reduce_range": False, "set_inductor_config": True, "weight_only_decode": False,
    },
}  # fmt: skip
INT8_WEIGHT_ONLY = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
PER_TENSOR, PER_ROW = ({"_type": name, "_version": 1, "_data": {}} for name in ("PerTensor", "PerRow"))
INPUTS = ("attn_norm", "attn_context", "ffn_norm", "ffn_act")  # of products


def inputs_changed(name: str, folder: Path, **values: object) -> Path:
    return changed(folder, name, lambda q: q["config_groups"]["group_0"]["input_activations"].update(values))


def golden_of(name: str) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    ids = tuple(json.loads((FOLDERS / "scheme.json").read_text())["ids"])
    with np.load(FOLDERS / "scheme.npz") as arrays:
        return ids, {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}


def farthest(actual: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> float:
    return max(
        float(np.abs(actual[name] - expected).max() / np.abs(expected).max()) for name, expected in golden.items()
    )


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
@pytest.mark.parametrize("name", RUN)
def test_scheme_run_in_float64_equals_compressed_tensors(name: str, packed: bool, tmp_path: Path):
    path = inputs_changed(name, tmp_path, group_size=32) if name == "ct-fp8-block" else FOLDERS / name
    ids, golden = golden_of(name)
    given = {key: golden[key] for key in golden if key.removeprefix("l0.") in INPUTS}
    weights = open_weights(path)
    assert not weights.using(SCHEME).quantises_weights_only
    wide = weights.using(packed=packed).astype(np.float64)
    assert farthest(run(wide.using(SCHEME), Pass(ids), golden=given), golden) < 1e-12
    assert farthest(run(wide, Pass(ids), golden=given), golden) > 1e-4  # exact numerics are seen to differ


def test_scheme_run_with_cached_tokens_equals_one_pass():
    ids, golden = golden_of("ct-fp8-static-kv")
    trace = run(open_weights(FOLDERS / "ct-fp8-static-kv").using(SCHEME).astype(np.float64), Pass(ids), n_cached=20)
    assert np.abs(trace["logits"] - golden["logits"][20:]).max() < 1e-12
    np.testing.assert_array_equal(trace["l0.k_cache"], golden["l0.k_cache"])


@pytest.mark.parametrize("name", NAMES_OF_WEIGHTS_ALONE)
def test_scheme_of_weights_alone_is_exact(name: str):
    weights = open_weights(FOLDERS / name)
    scheme = weights.using(SCHEME)
    assert scheme.quantises_weights_only
    ids = Pass((1, 7, 3, 12))
    np.testing.assert_array_equal(run(scheme, ids)["logits"], run(weights, ids)["logits"])


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("ct-w8a8", SchemeRounding("int8", "dynamic")),
        ("ct-fp8-dynamic", SchemeRounding("E4M3", "dynamic")),
        ("ct-mxfp4", SchemeRounding("E2M1", "e8m0", 32)),
        ("ct-mxfp8", SchemeRounding("E4M3", "e8m0", 32)),
    ],
)
def test_activations_of_a_folder_follow_its_settings(name: str, rounding: SchemeRounding):
    folder: Any = open_weights(FOLDERS / name).source
    assert folder.activations.inputs == dict.fromkeys(folder.source.found, rounding)
    assert folder.activations.caches == {}


def test_static_scales_are_those_of_each_matrix():
    folder: Any = open_weights(FOLDERS / "fp8-tensor-static").source
    numbers = {name: how.number for name, how in folder.activations.inputs.items()}
    assert numbers.keys() == folder.source.found.keys()
    for name, number in numbers.items():
        suffix = next(s for s in ("activation_scale", "input_scale") if folder.source.has(name[:-7], s))
        assert number == folder.array(f"{name.removesuffix('.weight')}.{suffix}").item()
    assert {(how.codes, how.scales) for how in folder.activations.inputs.values()} == {("E4M3", "static")}


def test_fp8_blocks_have_a_scale_per_token_and_block_of_columns():
    folder: Any = open_weights(FOLDERS / "fp8-block-partial").source
    with refuses("Unsupported", expected="128", got="160"):  # 128 divides no width of its matrices
        _ = folder.activations
    whole = {name: replace(found, shape=(64, 256)) for name, found in folder.source.found.items()}
    made = read_activations("fp8", replace(folder.source, found=whole))
    assert made.inputs == dict.fromkeys(whole, SchemeRounding("E4M3", "dynamic", 128))


KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OUTPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
REFUSED: dict[str, tuple[Any, ...]] = {  # a folder and how it is changed; code and facts of the refusal
    "fp8 without blocks": ("fp8-tensor-static", lambda q: q.update(activation_scheme="dynamic"),
                           "Unsupported", "activation_scheme", "got 'dynamic'"),
    **{name: (name, None, "Unsupported", "quant_method")
       for name in ("modelopt-fp8", "modelopt-nvfp4", "fbgemm-fp8", "bnb-int8", "bitnet-bitlinear")},
    "floats": (builtin_path("micro-llama"), None, "Unsupported"),
    "dynamic caches": ("ct-fp8-static-kv", lambda q: q["kv_cache_scheme"].update(dynamic=True),
                       "Unsupported", "dynamic"),
    "caches by heads": ("ct-fp8-static-kv", lambda q: q["kv_cache_scheme"].update(strategy="attn_head"),
                        "Unsupported", "strategy"),
    "a cache without scales": ("ct-fp8-dynamic", lambda q: q.update(kv_cache_scheme=KV_CACHE),
                               "Missing", "model.layers.0.self_attn.k_scale"),
    "outputs": ("ct-w8a8", lambda q: q["config_groups"]["group_0"].update(output_activations=OUTPUTS),
                "Unsupported", "output_activations"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_scheme_that_llorch_does_not_compute_is_refused(case: str, tmp_path: Path):
    name, change, code, *facts = REFUSED[case]
    weights = open_weights(changed(tmp_path, name, change) if change else FOLDERS / name)
    with refuses(code, *facts):
        weights.using(SCHEME)


def torchao_changed(folder: Path, quant_type: object) -> Path:
    return changed(folder, "torchao-int8", lambda q: q.update(quant_type=quant_type))


def int8_dynamic(version: int = 2, **values: object) -> dict[str, object]:
    """Make the settings of torchao's int8 codes of activations and weights, with other values than its defaults."""
    return {"default": {**INT8_DYNAMIC, "_version": version, "_data": {**INT8_DYNAMIC["_data"], **values}}}


@pytest.mark.parametrize("values", [{}, {"granularity": [PER_ROW, PER_ROW]}, {"granularity": None}], ids=str)
def test_torchao_int8_dynamic_folder_rounds_inputs_of_every_matrix(values: dict[str, Any], tmp_path: Path):
    weights = open_weights(torchao_changed(tmp_path, int8_dynamic(**values)))
    folder: Any = weights.source
    assert folder.activations.inputs == dict.fromkeys(
        folder.source.found, SchemeRounding("int8", "dynamic", by_reciprocal=True)
    )
    scheme = weights.using(SCHEME)
    assert not scheme.quantises_weights_only
    ids = Pass((1, 7, 3, 12))
    assert np.abs(run(scheme, ids)["logits"] - run(weights, ids)["logits"]).max() > 1e-4


@pytest.mark.parametrize(
    "quant_type",
    [
        int8_dynamic(reduce_range=True),
        int8_dynamic(weight_only_decode=True),
        int8_dynamic(act_mapping_type={"_data": "ASYMMETRIC", "_type": "MappingType"}),
        int8_dynamic(granularity=PER_TENSOR),
        int8_dynamic(granularity=[PER_TENSOR, PER_ROW]),
        int8_dynamic(version=1),
        {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {}}},
        {"default": {"_type": "SomeNewConfig", "_version": 1, "_data": {}}},
        {"default": {"_type": "FqnToConfig", "_version": 1, "_data": {
            "fqn_to_config": {"lm_head": INT8_WEIGHT_ONLY, "re:.*mlp.*": INT8_DYNAMIC, "model.embed_tokens": None},
        }}},
        "int8_dynamic_activation_int8_weight",
        {},
        None,
    ],
    ids=str,
)  # fmt: skip
def test_torchao_config_that_llorch_does_not_compute_is_refused(quant_type: object, tmp_path: Path):
    weights = open_weights(torchao_changed(tmp_path, quant_type))
    with refuses("Unsupported", "quant_type"):
        weights.using(SCHEME)
    run(weights, Pass((1, 2)))  # exact numerics do not need it


@pytest.mark.parametrize(
    "quant_type",
    ["int8_weight_only", {"default": {"_type": "ModuleFqnToConfig", "_version": 1, "_data": {
        "module_fqn_to_config": {"_default": INT8_WEIGHT_ONLY, "lm_head": None},
    }}}],
    ids=str,
)  # fmt: skip
def test_torchao_configs_of_weights_alone_round_nothing(quant_type: object, tmp_path: Path):
    assert open_weights(torchao_changed(tmp_path, quant_type)).using(SCHEME).quantises_weights_only


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "tensor"},  # dynamic scales of all tokens of a pass
        {"num_bits": 6}, {"symmetric": False}, {"strategy": "channel"}, {"strategy": "group", "group_size": 48},
        {"type": "bfp"}, {"dynamic": "local"}, {"scale_dtype": "torch.uint8"},
    ],
    ids=str,
)  # fmt: skip
def test_input_activations_that_llorch_does_not_compute_are_refused(values: dict[str, object], tmp_path: Path):
    weights = open_weights(inputs_changed("ct-w8a8", tmp_path, **values))
    with refuses("Unsupported"):
        weights.using(SCHEME)
    run(weights, Pass((1, 2)))  # exact numerics do not need them

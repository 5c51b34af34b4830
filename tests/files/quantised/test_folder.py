"""Quantised folders: each opens, its matrices are read alike in every way, and what cannot be meant is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES, Tensor, Tensors, changed, tensors_of, written
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.files import matrix, open_weights
from llorch.files.convert import convert
from llorch.files.packed import Scheme
from llorch.files.quantised import QuantisedFolder
from llorch.model.model import load
from llorch.runtime.errors import FormatError

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"

UP_STACK = "model.layers.0.mlp.switch_mlp.up_proj"


@pytest.mark.parametrize("name", NAMES)
def test_rows_tiles_and_the_whole_matrix_are_the_same_numbers(name: str):
    weights = open_weights(FOLDERS / name)
    quantised = [one for one in weights if isinstance(weights.stored_type(one), Scheme)]
    assert quantised
    for one in quantised:
        stored, whole = weights.as_stored(one), weights.array(one)
        whole = whole[0] if whole.ndim == 3 else whole  # experts: the first
        ids = np.array([len(whole) - 1, 0, 3])
        np.testing.assert_array_equal(stored.decode_rows(ids), whole[ids])
        np.testing.assert_array_equal(stored.decode_rows(slice(1, 6)), whole[1:6])
        np.testing.assert_array_equal(stored.picked(ids).decode(), whole[ids])
        np.testing.assert_array_equal(stored.picked(slice(2, 9)).decode_rows(slice(1, 4)), whole[3:6])
        assert 0 < stored.n_bytes < 4 * whole.size


@pytest.mark.parametrize(
    "name", ["gptq-4bit-act-order", "mlx-3bit", "bnb-nf4-double", "fp8-block-partial", "mlx-4bit-experts"]
)
@pytest.mark.parametrize("in_c", [False, True], ids=["NumPy", "C"])
def test_a_run_with_packed_matrices_gives_the_logits_of_decoded_ones(
    name: str, in_c: bool, monkeypatch: pytest.MonkeyPatch
):
    if in_c:
        monkeypatch.setattr(matrix, "WIDE_LIMIT", 0)
    ids = [1, 7, 3, 22, 11]
    packed, decoded = (load(FOLDERS / name, residency=residency) for residency in ("packed", "decoded"))
    np.testing.assert_allclose(packed.forward(ids), decoded.forward(ids), rtol=0, atol=1e-6)


def test_experts_of_a_stack_are_read_each_from_its_own_bytes():
    stack, source = tensors_of(FOLDERS / "mlx-4bit-experts"), open_weights(FOLDERS / "mlx-4bit-experts").source
    up = f"{UP_STACK}.weight"
    n_experts, n_out, n_words = stack[up][1]
    words = np.frombuffer(stack[up][2], np.uint32).reshape(n_experts, n_out, n_words)
    matrices = [source.packed(f"model.layers.0.mlp.experts.{e}.up_proj.weight") for e in range(n_experts)]
    assert all(np.array_equal(one.raw.view(np.uint32), words[e].reshape(-1)) for e, one in enumerate(matrices))
    assert len({one.raw.tobytes() for one in matrices}) == n_experts
    assert matrices[0].n_bytes == n_out * 64 * 5 // 8  # 4 bits, and two BF16 numbers for 32 columns


def test_settings_may_lie_beside_the_configuration(tmp_path: Path):
    config = json.loads((FOLDERS / "gptq-4bit" / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    folder = written(tmp_path / "old", config, tensors_of(FOLDERS / "gptq-4bit"))
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    source = open_weights(folder).source
    assert isinstance(source, QuantisedFolder)
    assert source.method == "gptq"
    np.testing.assert_array_equal(source.array(f"{Q}.weight"), open_weights(FOLDERS / "gptq-4bit")["layers.0.q_proj"])


@pytest.mark.parametrize(
    "settings",
    [
        {"dynamic": {"+:.*q_proj": {"bits": 8}, ".*up_proj": {"sym": False}, "-:.*k_proj": {"bits": 2}}},
        {"quant_method": "auto-round",
         "extra_config": {"up_proj": {}, "[qk]_proj": {"bits": 2}, Q: {"bits": 8, "act_bits": None}, K: {},
                          "mlp.up_proj$": {"sym": False}}},
    ],
    ids=["gptqmodel", "AutoRound"],
)  # fmt: skip
def test_one_module_may_have_settings_of_its_own(settings: dict[str, object], tmp_path: Path):
    origins = {Q: "gptq-8bit", K: "gptq-4bit", UP: "gptq-4bit-asym"}

    def mix(tensors: Tensors) -> None:
        for module, origin in origins.items():
            stored = tensors_of(FOLDERS / origin)
            tensors |= {name: tensor for name, tensor in stored.items() if name.startswith(f"{module}.")}

    made = open_weights(changed(tmp_path, "gptq-4bit", edit(**settings), mix)).source
    for module, origin in origins.items():
        wanted = open_weights(FOLDERS / origin).source.array(f"{module}.weight")
        np.testing.assert_array_equal(made.array(f"{module}.weight"), wanted, err_msg=module)


SPELLINGS = (
    UP, f"{UP}.weight", UP.removeprefix("model."), f"language_model.{UP}", f"model.language_{UP}",
    UP.replace("model.", "language_model.") + ".weight",
)  # fmt: skip


def renamed(name: str, by: str) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings.update({by: settings.pop(name)})


@pytest.mark.parametrize("stored_name", [UP, f"language_{UP}", f"language_model.{UP}"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_overrides_of_an_mlx_module_hold_in_every_spelling_of_its_name(spelling: str, stored_name: str, tmp_path: Path):
    prefix = stored_name.removesuffix(UP.removeprefix("model."))

    def rename(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)

    name = "mlx-4bit-g64-overrides"
    weights = open_weights(changed(tmp_path, name, renamed(UP, spelling), rename))
    np.testing.assert_array_equal(weights["layers.0.up_proj"], open_weights(FOLDERS / name)["layers.0.up_proj"])


def test_settings_of_one_module_of_auto_round_hold_in_another_spelling(tmp_path: Path):
    def mix(tensors: Tensors) -> None:
        tensors |= {name: one for name, one in tensors_of(FOLDERS / "gptq-8bit").items() if name.startswith(f"{UP}.")}

    settings = edit(quant_method="auto-round", extra_config={f"language_model.{UP}": {"bits": 8}})
    source = open_weights(changed(tmp_path, "gptq-4bit", settings, mix)).source
    assert isinstance(source, QuantisedFolder)
    expected = open_weights(FOLDERS / "gptq-8bit").source.array(f"{UP}.weight")
    np.testing.assert_array_equal(source.array(f"{UP}.weight"), expected)


def test_ignored_module_of_compressed_tensors_is_known_in_another_spelling(tmp_path: Path, caplog):
    def ignore_in_another_spelling(settings: dict[str, Any]) -> None:
        every_linear(settings)
        settings["ignore"].append("language_model.model.layers.0.self_attn.o_proj")

    open_weights(changed(tmp_path, "ct-mixed", ignore_in_another_spelling))
    assert not caplog.messages


NO_MODULE = "model.layers.0.mlp.upproj"


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("gptq-4bit", {"dynamic": {f"+:{NO_MODULE}": {"bits": 8}, "-:.*visual": {}}}, "dynamic"),
        ("auto-round-gptq", {"extra_config": {NO_MODULE: {"bits": 8}, "nothing$": {"bits": 8}, Q: {}}}, "extra_config"),
        ("auto-round-awq", {"extra_config": {NO_MODULE: {"group_size": 64}}}, "extra_config"),
        ("awq-gemm", {"modules_to_not_convert": [NO_MODULE, "visual"]}, "modules_to_not_convert"),
        ("fp8-block-partial", {"modules_to_not_convert": ["lm_head", NO_MODULE]}, "modules_to_not_convert"),
        ("fbgemm-fp8", {"modules_to_not_convert": [NO_MODULE]}, "modules_to_not_convert"),
        ("bitnet-bitlinear", {"modules_to_not_convert": [NO_MODULE]}, "modules_to_not_convert"),
        ("bnb-nf4", {"llm_int8_skip_modules": ["lm_head", NO_MODULE]}, "llm_int8_skip_modules"),
        ("ct-w4a16", {"ignore": ["lm_head", NO_MODULE, "re:.*visual.*"]}, "ignore"),
        ("modelopt-nvfp4", {"ignore": ["lm_head", NO_MODULE, "visual*"]}, "ignore"),
        ("mlx-4bit", {NO_MODULE: False}, "quantization"),
    ],
)
def test_settings_of_a_module_that_is_not_there_are_noted(
    name: str, settings: dict[str, object], key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    open_weights(FOLDERS / name)
    assert not caplog.messages
    open_weights(changed(tmp_path, name, edit(**settings)))
    (message,) = caplog.messages
    assert_tells(message, key, got=NO_MODULE, where=tmp_path)
    assert not re.search("lm_head|visual|nothing", message)


@pytest.mark.parametrize("of_folder", ["group_size", "q_group_size"])
def test_awq_module_of_auto_round_may_have_a_group_size_of_its_own(of_folder: str, tmp_path: Path):
    def halve(tensors: Tensors) -> None:
        for part in ("qzeros", "scales"):
            dtype, (groups, width), data = tensors[f"{DOWN}.{part}"]
            tensors[f"{DOWN}.{part}"] = (dtype, [1, width], data[: len(data) // groups])

    settings = edit(extra_config={DOWN: {"group_size": 64}}, **{"group_size": None, of_folder: 32})
    made = open_weights(changed(tmp_path, "auto-round-awq", settings, halve)).source.array(f"{DOWN}.weight")
    wanted = open_weights(FOLDERS / "auto-round-awq").source.array(f"{DOWN}.weight")
    np.testing.assert_array_equal(made[:, :32], wanted[:, :32])


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel"])
def test_packing_of_auto_round_without_auto_gptq_is_the_second_version(packing: str, tmp_path: Path):
    settings = edit(quant_method="auto-round", packing_format=packing, checkpoint_format=None)
    name = "gptq-v2-4bit-asym-act-order"
    made, wanted = open_weights(changed(tmp_path, name, settings)), open_weights(FOLDERS / name)
    for weight in ("layers.0.q_proj", "layers.0.down_proj"):
        np.testing.assert_array_equal(made[weight], wanted[weight])


@pytest.mark.parametrize("block", [(32, 128), (128, 32), (48, 20)])
def test_blocks_need_not_be_square(block: tuple[int, int], tmp_path: Path):
    def scales(tensors: Tensors) -> None:
        for name, (_, shape, _) in [*tensors.items()]:
            if name.endswith("_proj.weight"):
                counts = [-(-size // own) for size, own in zip(shape, block, strict=True)]
                numbers = np.arange(1, 1 + np.prod(counts), dtype="<f4")
                tensors[f"{name}_scale_inv"] = ("F32", counts, numbers.tobytes())

    made = open_weights(changed(tmp_path, "fp8-block-partial", edit(weight_block_size=[*block]), scales))
    (tmp_path / "ones").mkdir()
    ones = changed(tmp_path / "ones", "fp8-block-partial", edit(weight_block_size=[1, 1]), every_one)
    for name in ("q_proj", "down_proj"):
        codes = open_weights(ones)[f"layers.0.{name}"]
        n_out, n_in = codes.shape
        places = np.arange(n_out)[:, None] // block[0] * -(-n_in // block[1]) + np.arange(n_in) // block[1] + 1
        np.testing.assert_array_equal(made[f"layers.0.{name}"], codes * places.astype(np.float32))


def every_one(tensors: Tensors) -> None:
    """Give every number a scale of its own, 1."""
    for name, (_, shape, _) in [*tensors.items()]:
        if name.endswith("_proj.weight"):
            tensors[f"{name}_scale_inv"] = ("F32", shape, np.ones(shape, "<f4").tobytes())


def test_rows_of_such_a_matrix_are_no_rows_of_bytes():
    with pytest.raises(TypeError, match=r"model.layers.0.self_attn.q_proj.weight"):
        _ = open_weights(FOLDERS / "awq-gemm").as_stored("layers.0.q_proj").by_row


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def cut(name: str, axis: int) -> Callable[[Tensors], object]:
    """Leave only the first half of a tensor of 32-bit or 16-bit numbers."""

    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[name]
        width = {"I32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4, "U32": 4}[dtype]
        array = np.frombuffer(data, f"V{width}").reshape(shape)
        array = array[: len(array) // 2] if axis == 0 else array[:, : array.shape[1] // 2]
        tensors[name] = (dtype, list(array.shape), array.tobytes())

    return change


def with_tensor(name: str, change: Callable[[str, list[int], bytes], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(*tensors[name])})


def cut_rows(name: str, count: int) -> Callable[[Tensors], object]:
    return with_tensor(
        name, lambda dtype, shape, data: (dtype, [count, shape[1]], data[: len(data) * count // shape[0]])
    )


def with_number(name: str, place: int, number: int, n_bytes: int = 2) -> Callable[[Tensors], object]:
    """Put a number of so many bytes into a tensor of such numbers."""
    at, raw = n_bytes * place, number.to_bytes(n_bytes, "little")
    return with_tensor(name, lambda dtype, shape, data: (dtype, shape, data[:at] + raw + data[at + n_bytes :]))


def edit(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings.update(values)


def of_group(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings["config_groups"]["group_0"]["weights"].update(values)


def as_it_is(values: Any) -> None:
    """Change nothing."""


def opened(name: str, settings: Any = as_it_is, tensors: Any = as_it_is) -> Callable[[Path], object]:
    """Open a changed folder and read every weight."""

    def make(folder: Path) -> None:
        weights = open_weights(changed(folder, name, settings, tensors))
        for one in weights:
            weights.array(one)

    return make


def every_linear(settings: dict[str, Any]) -> None:
    settings["config_groups"]["group_0"]["targets"] = ["Linear"]
    settings["ignore"] = ["lm_head"]


def floats_as_gptq(folder: Path) -> object:
    convert(FOLDERS / "gptq-4bit", folder / "floats")
    config = json.loads((folder / "floats" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    return open_weights(written(folder / "floats", config, tensors_of(folder / "floats")))


REFUSALS = [
    row("another width", opened("gptq-4bit", edit(bits=8)), "Shape", f"{DOWN}.qzeros", "bits 8"),
    row("bits of no format", opened("gptq-4bit", edit(bits=5)), "Unsupported", "bits", got=5),
    row("half of the codes", opened("gptq-4bit", tensors=cut(f"{Q}.qweight", 0)), "Shape", f"{Q}.qzeros"),
    row("half of the words", opened("ct-w4a16", tensors=cut(f"{Q}.weight_packed", 1)), "Shape", f"{Q}.weight_packed"),
    row("no scales", opened("gptq-4bit", tensors=without(f"{Q}.scales")), "Missing", f"{Q}.scales", got="none"),
    row("no zero points", opened("awq-gemm", tensors=without(f"{Q}.qzeros")), "Missing", f"{Q}.qzeros", got="none"),
    row("no zero points, asymmetric", opened("ct-w4a16-asym", tensors=without(f"{Q}.weight_zero_point")), "Missing",
        f"{Q}.weight_zero_point", "symmetric"),
    row("no scale of a block", opened("fp8-block-partial", tensors=without(f"{Q}.weight_scale_inv")), "Missing",
        f"{Q}.weight_scale_inv"),
    row("no table", opened("bnb-nf4", tensors=without(f"{Q}.weight.quant_map")), "Missing", f"{Q}.weight.quant_map"),
    row("no state", opened("bnb-nf4", tensors=without(f"{Q}.weight.quant_state.bitsandbytes__nf4")), "Missing", Q),
    row("no biases", opened("mlx-4bit", tensors=without(f"{Q}.biases")), "Missing", f"{Q}.biases"),
    row("a stack of fewer experts", opened("mlx-4bit-experts", tensors=cut(f"{UP_STACK}.biases", 0)), "Shape",
        f"{UP_STACK}.biases"),
    row("groups that do not divide", opened("awq-gemm", edit(group_size=48)), "Inconsistent", "group_size", got=48),
    row("a gemv matrix of more groups", opened("awq-gemv", edit(group_size=-1)), "Inconsistent",
        "model.layers.0.self_attn.o_proj.scales", "group_size", expected=0, got=0.00665665),
    row("a group size of 0", opened("mlx-4bit", edit(group_size=0)), "OutOfRange", "group_size", got=0),
    row("another group size", opened("gptq-4bit", edit(group_size=16)), "Shape", f"{DOWN}.qzeros"),
    row("rows for groups", opened("ct-w4a16", of_group(strategy="channel")), "Shape", f"{DOWN}.weight_scale",
        "channel"),
    row("one scale for blocks", opened("fp8-block-partial", edit(weight_block_size=None)), "Shape",
        f"{DOWN}.weight_scale_inv"),
    row("a module that the settings leave alone", opened("ct-w4a16", edit(ignore=["re:.*q_proj"])), "Inconsistent",
        "ignore", Q),
    row("the same by name", opened("awq-gemm", edit(modules_to_not_convert=["q_proj"])), "Inconsistent",
        "modules_to_not_convert", Q),
    row("the same for blocks", opened("fp8-block-partial", edit(modules_to_not_convert=["mlp"])), "Inconsistent",
        "modules_to_not_convert"),
    row("floats of a module that is named", opened("ct-mixed", every_linear), "Inconsistent", "config_groups",
        "model.layers.0.self_attn.o_proj"),
    row("no target", opened("ct-w4a16", lambda s: s["config_groups"]["group_0"].update(targets=["re:nothing"])),
        "Inconsistent", "config_groups"),
    row("an unknown method", opened("gptq-4bit", edit(quant_method="aqlm")), "Unsupported", "quant_method", got="aqlm"),
    row("no method", opened("gptq-4bit", edit(quant_method=None)), "Missing", "quant_method"),
    row("an unknown format", opened("ct-w4a16", lambda s: s["config_groups"]["group_0"].update(format="marlin-24")),
        "Unsupported", "format", got="marlin-24"),
    row("rotations", opened("ct-w4a16", edit(transform_config={"config_groups": {"u": {"type": "hadamard"}}})),
        "Unsupported", "transform_config"),
    row("zeros left out", opened("ct-w4a16", edit(sparsity_config={"format": "sparse-24-bitmask"})), "Unsupported",
        "sparsity_config"),
    row("an unknown version of AWQ", opened("awq-gemm", edit(version="marlin")), "Unsupported", "version"),
    row("an unknown mode", opened("mlx-4bit", edit(mode="nf4")), "Unsupported", "mode", got="nf4"),
    row("an unknown algorithm", opened("modelopt-nvfp4", edit(quant_algo="W4A8_AWQ")), "Unsupported", "quant_algo"),
    row("act-order without groups", opened("gptq-4bit-act-order", tensors=without(f"{Q}.g_idx")), "Missing",
        f"{Q}.g_idx", "desc_act"),
    row("another order than said", opened("gptq-4bit-act-order", edit(desc_act=False)), "Inconsistent", "desc_act"),
    row("a group that is not there", opened("gptq-4bit-act-order", tensors=with_number(f"{Q}.g_idx", 0, 77, 4)),
        "Inconsistent", f"{Q}.g_idx", "77"),
    row("the second version as the first", opened("gptq-v2-4bit", edit(checkpoint_format="gptq")), "Inconsistent",
        f"{Q}.qzeros", "gptq_v2", got=9),
    row("the first version as the second", opened("gptq-4bit", edit(checkpoint_format="gptq_v2")), "Inconsistent",
        f"{Q}.qzeros", "gptq", got=7),
    row("a scale that is not a number", opened("gptq-4bit", tensors=with_number(f"{Q}.scales", 3, 0x7E00)),
        "NonFinite", f"{Q}.weight", got="nan"),
    row("a scale of 0", opened("ct-w4a16", tensors=with_number(f"{Q}.weight_scale", 5, 0)), "OutOfRange",
        f"{Q}.weight", got="0.0"),
    row("another table", opened("bnb-nf4", edit(bnb_4bit_quant_type="fp4")), "Inconsistent", "bnb_4bit_quant_type"),
    row("another class of BitNet", opened("bitnet-bitlinear", edit(linear_class="trilinear")), "Unsupported",
        "linear_class", got="trilinear"),
    row("codes of no dtype", opened("torchao-int8", tensors=with_tensor(
        f"{Q}._weight_qdata", lambda _, shape, data: ("U8", shape, data))), "Unsupported",
        f"{Q}._weight_qdata", got="U8"),
    row("no whole words", opened("gptq-3bit", tensors=cut_rows(f"{Q}.qweight", 2)), "Inconsistent", f"{Q}.qweight",
        "bits"),
    row("an unknown packing", opened("auto-round-gptq", edit(packing_format="auto_round:mlx")), "Unsupported",
        "packing_format", got="auto_round:mlx"),
    row("AWQ of other bits", opened("awq-gemm", edit(bits=8)), "Unsupported", "bits", got=8),
    row("overrides of no module", opened("mlx-4bit-g64-overrides", renamed(UP, NO_MODULE)), "Inconsistent", NO_MODULE),
    row("overrides of one module twice", opened("mlx-4bit-g64-overrides", edit(**{f"{UP}.weight": {"bits": 8}})),
        "Inconsistent", f"{UP}.weight", got="{'bits': 8}"),
    row("nothing is quantised", floats_as_gptq, "Inconsistent", "quant_method"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_folder_that_cannot_be_meant_is_refused(refusal: Refusal, tmp_path: Path):
    refusal.check(tmp_path)


OPTIONAL = (  # only other numerics need them, or without them columns are in order and the zero point is 0
    "g_idx", "input_scale", "input_global_scale", "activation_scale", "weight_format", "_weight_zero_point",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_folder_without_one_tensor_of_a_matrix_names_it(name: str, tmp_path: Path):
    source = open_weights(FOLDERS / name).source
    assert isinstance(source, QuantisedFolder)
    names = (part for matrix in source.matrices.values() for part in matrix.parts.values())
    module = next(match[0] for match in (re.match(r".*_proj\.", part) for part in names) if match)
    parts = [part for part in source.stored if part.startswith(module) and not part.endswith(OPTIONAL)]
    assert len(parts) > 1
    for missing in parts:
        with refuses("Missing", missing, got="none") as caught:
            open_weights(changed(tmp_path, name, tensors=without(missing)))
        assert not [other for other in parts if f"{other}:" in str(caught.value) and other != missing]


@pytest.mark.parametrize(("name", "n_left_out"), [("ct-fp8-static-kv", 9), ("ct-fp8-block", 0)])
def test_scales_that_exact_numerics_leave_out_are_counted(name: str, n_left_out: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        open_weights(FOLDERS / name)
    assert [f": {n_left_out} scales" in text for text in caplog.messages] == [True] * bool(n_left_out)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("bnb-int8", "*.SCB"), ("bnb-nf4", "*.absmax"), ("gptq-4bit", "*.qweight"), ("awq-gemm", "*.qweight"),
        ("ct-w8a8", "*.weight_scale"), ("ct-w4a16", "*.weight_packed"), ("fp8-block-partial", "*.weight_scale_inv"),
        ("torchao-int8", "*._weight_qdata"), ("mlx-4bit", "*.scales"), ("modelopt-nvfp4", "*.weight_scale_2"),
    ],
)  # fmt: skip
def test_a_quantised_folder_without_settings_is_refused_with_a_hint(name: str, ending: str, tmp_path: Path):
    config = json.loads((FOLDERS / name / "config.json").read_text())
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    with pytest.raises(FormatError) as caught:
        open_weights(written(tmp_path / name, config, tensors_of(FOLDERS / name)))
    assert_tells(str(caught.value), ending, "config.json", "quantization_config")
    assert len(str(caught.value)) < 1200


def test_a_quantised_folder_with_settings_gets_no_hint_about_them(tmp_path: Path):
    folder = opened("gptq-4bit", tensors=lambda t: t.update({"x.qweight": t["lm_head.weight"]}))
    with pytest.raises(FormatError) as caught:
        folder(tmp_path)
    assert "no quantization_config" not in str(caught.value)

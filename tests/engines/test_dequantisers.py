"""The library that judges a quantised folder is chosen by its settings, and its numbers are those of the goldens."""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders.quantised_folders import FOLDERS, changed, tensors_of, written

from llorch.files import open_weights
from llorch.files.quantised import QuantisedFolder

DOWN = "model.layers.0.mlp.down_proj"


def required_package(folder: Path) -> str:
    from llorch.engines.dequantisers import LIBRARIES, Folder

    library = LIBRARIES.get(Folder(folder).library)
    return library.package if library else ""


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("gptq-4bit", "gptqmodel"), ("auto-round-gptq", "gptqmodel"), ("awq-gemm", "autoawq"),
        ("auto-round-awq", "autoawq"), ("auto-round-2bit-asym", ""), ("awq-gemv", ""),
        ("ct-mixed", "compressed-tensors"), ("bnb-nf4", "bitsandbytes"),
        ("mlx-mxfp4", "mlx"), ("torchao-int8", "torchao"), ("bitnet-autobitlinear", "transformers"),
        ("bitnet-bitlinear", ""), ("fp8-block-partial", ""), ("modelopt-nvfp4", ""),
    ],
)  # fmt: skip
def test_library_of_folder_follows_method_and_layout(name: str, package: str):
    assert required_package(FOLDERS / name) == package


def test_library_of_folder_is_chosen_by_settings_next_to_config(tmp_path: Path):
    config = json.loads((FOLDERS / "gptq-4bit" / "config.json").read_text())
    settings = config.pop("quantization_config")
    folder = written(tmp_path / "old", config, tensors_of(FOLDERS / "gptq-4bit"))
    settings.pop("quant_method")
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    assert required_package(folder) == "gptqmodel"


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({}, "autoawq"),
        ({"version": "GEMM"}, "autoawq"),
        ({"version": None, "format": "gemm"}, "autoawq"),
        ({"version": "GEMV"}, ""),
        ({"format": "gemv"}, ""),
    ],
)
def test_library_of_an_awq_folder_follows_its_version(settings: dict[str, str | None], package: str, tmp_path: Path):
    config = json.loads((FOLDERS / "awq-gemm" / "config.json").read_text())
    del config["quantization_config"]["version"]
    config["quantization_config"] |= settings
    assert required_package(written(tmp_path / "awq", config, tensors_of(FOLDERS / "awq-gemm"))) == package


@pytest.mark.parametrize(
    ("extra", "package"),
    [
        (None, "gptqmodel"),
        ({DOWN: {"bits": 8}, "lm_head": {"bits": 16}}, "gptqmodel"),
        ({"down_proj$": {"bits": 8}}, ""),
        ({"down_proj$": {}}, "gptqmodel"),
        ({DOWN: {"bits": 8}, "layers.*down_proj": {"bits": 4}}, "gptqmodel"),
    ],
)
def test_library_of_auto_round_folder_with_expressions_is_none(extra: object, package: str, tmp_path: Path):
    assert (
        required_package(changed(tmp_path, "auto-round-gptq", lambda values: values.update(extra_config=extra)))
        == package
    )


@pytest.fixture
def gptqmodel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of the modules that are made by a stand-in for gptqmodel 7.7, and the conversions to version 2."""
    made: list[dict[str, Any]] = []

    def linear(*, bits: int, group_size: int, sym: bool, desc_act: bool, **sizes: object) -> Any:
        made.append({"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act})
        scales = SimpleNamespace(float=lambda: None)
        return SimpleNamespace(
            load_state_dict=lambda tensors, strict: None, post_init=lambda: None, scales=scales,
            dequantize_weight=lambda: SimpleNamespace(T=made[-1]),
        )  # fmt: skip

    def dynamic_get(dynamic: dict[str, Any] | None, name: str) -> Any:
        return next((values for pattern, values in (dynamic or {}).items() if name.endswith(pattern)), None)

    parts: dict[str, dict[str, object]] = {
        "gptqmodel.nn_modules.qlinear.torch": {"TorchLinear": linear},
        "gptqmodel.quantization.config": {"dynamic_get": dynamic_get},
        "gptqmodel.utils.model": {
            "convert_gptq_v1_to_v2_format_module": lambda module, bits, dtype: made[-1].update(converted=bits)
        },
    }
    for name, functions in parts.items():
        for package in (name.rsplit(".", n)[0] for n in range(name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(functions)
    return made


@pytest.mark.parametrize(
    ("name", "settings", "converted_bits"),
    [
        ("gptq-4bit", {"dynamic": {"0.mlp.down_proj": {"bits": 8, "group_size": 16, "sym": False}}}, 4),
        (
            "auto-round-gptq",
            {"extra_config": {DOWN: {"bits": 8, "group_size": 16, "sym": False, "data_type": None}}},
            4,
        ),
        ("gptq-4bit", {"checkpoint_format": None, "format": "gptq_v2"}, None),
    ],
    ids=["gptqmodel", "AutoRound", "second version"],
)
def test_gptqmodel_receives_the_settings_of_each_module(
    name: str, settings: dict[str, Any], converted_bits: int | None, gptqmodel: list[dict[str, Any]], tmp_path: Path
):
    from llorch.engines.dequantisers import all_dequantised

    def choose(values: dict[str, Any]) -> None:
        values.update(settings)
        for key in [key for key, value in settings.items() if value is None]:
            del values[key]

    made: Any = all_dequantised(changed(tmp_path, name, choose))
    version = {} if converted_bits is None else {"converted": converted_bits}
    usual = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    own = {"bits": 8, "group_size": 16, "sym": False, "desc_act": False, "converted": 8} if converted_bits else usual
    assert made.pop(f"{DOWN}.weight") == own
    assert all(one == usual | version for one in made.values())
    assert len(made) + 1 == len(gptqmodel) == 7


def test_autoawq_receives_the_group_size_of_the_scales(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from llorch.engines import dequantisers

    def decode(qweight: Any, qzeros: object, scales: object, bits: int, group_size: int) -> Any:
        return SimpleNamespace(T=(bits, group_size))

    monkeypatch.setattr(dequantisers, "_import_file", lambda package, ending: SimpleNamespace(dequantize_gemm=decode))

    def whole_rows(tensors: Any) -> None:
        for part in ("qzeros", "scales"):
            dtype, (groups, width), data = tensors[f"{DOWN}.{part}"]
            tensors[f"{DOWN}.{part}"] = (dtype, [1, width], data[: len(data) // groups])

    def rename(values: dict[str, Any]) -> None:
        values["q_group_size"] = values.pop("group_size")

    made: Any = dequantisers.all_dequantised(changed(tmp_path, "awq-gemm", rename, whole_rows))
    assert made.pop(f"{DOWN}.weight") == (4, tensors_of(FOLDERS / "awq-gemm")[f"{DOWN}.qweight"][1][0])
    assert {*made.values()} == {(4, 32)}


@pytest.mark.nightly_cases(but=["bitnet-autobitlinear"])
@pytest.mark.live
@pytest.mark.parametrize("name", ["ct-w4a16", "bnb-nf4-double", "bitnet-autobitlinear"])
def test_all_dequantised_gives_every_matrix_of_the_goldens(name: str):
    from llorch.engines.dequantisers import all_dequantised, dequantised, missing

    assert missing(str(FOLDERS / name)) is None
    wanted = json.loads((FOLDERS / "goldens.json").read_text())[name]["weights"]
    made = all_dequantised(FOLDERS / name)
    assert made.keys() == wanted.keys()
    for weight, array in made.items():
        assert hashlib.sha256(array.float().contiguous().numpy().tobytes()).hexdigest() == wanted[weight]["sha256"]
        alone = dequantised(str(FOLDERS / name), weight)
        assert alone is not None
        assert (alone == array.float().numpy()).all()
    source = open_weights(FOLDERS / name).source
    assert isinstance(source, QuantisedFolder)
    assert made.keys() == source.matrices.keys()

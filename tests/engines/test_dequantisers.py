"""The library that judges a quantised folder is chosen by its settings, and its numbers are those of the goldens."""

import hashlib
import json
from pathlib import Path

import pytest
from builders.quantised_folders import FOLDERS, tensors_of, written

from llorch.files import open_weights
from llorch.files.quantised import QuantisedFolder


def package_of(folder: Path) -> str:
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
    assert package_of(FOLDERS / name) == package


def test_library_of_folder_is_chosen_by_settings_next_to_config(tmp_path: Path):
    config = json.loads((FOLDERS / "gptq-4bit" / "config.json").read_text())
    settings = config.pop("quantization_config")
    folder = written(tmp_path / "old", config, tensors_of(FOLDERS / "gptq-4bit"))
    settings.pop("quant_method")
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    assert package_of(folder) == "gptqmodel"


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
    assert package_of(written(tmp_path / "awq", config, tensors_of(FOLDERS / "awq-gemm"))) == package


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

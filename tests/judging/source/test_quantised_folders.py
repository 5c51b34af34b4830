"""The small quantised folders of the repository, against the float tensors that their writers quantised.

mlx-lm, bitsandbytes, llmcompressor and torchao wrote `mlx-*`, `bnb-*`, `ct-*` and `torchao-*`. A script wrote the
others, GPTQ and AWQ among them, because their own libraries need a GPU or a compiler.

NOT RUN: `gpt-oss-mxfp4`, because llorch refuses its family.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES, tensors_of

from llorch.files import open_weights
from llorch.files.opening import open_table
from llorch.files.packed import has_codes
from llorch.judging.source.compare import SourceReport, compare_with_source

EXCHANGED = (1, 2)  # rows of each Linear weight
METHODS = [  # a folder for each method
    "auto-round-2bit-asym", "awq-gemm", "awq-gemv", "bitnet-bitlinear", "bnb-int8", "bnb-nf4-double", "ct-every-width",
    "ct-fp8-block-wide", "ct-w8a8", "fbgemm-fp8", "gptq-4bit-act-order", "gptq-4bit-qwen2", "mlx-4bit-experts",
    "mlx-mxfp4", "modelopt-nvfp4", "mxfp8", "torchao-int8",
]  # fmt: skip

Sources = Callable[[str], Path]


@pytest.fixture(scope="module")
def sources(writers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sources]:
    """Functions that return the source of a folder by name: the right one, and one with exchanged rows."""
    parent = tmp_path_factory.mktemp("sources")

    def right(name: str) -> Path:
        size = size_of(writers, name)
        return written(writers, parent / size, name, size, writers.float_tensors(size))

    def exchanged(name: str) -> Path:
        size = size_of(writers, name)
        tensors = writers.float_tensors(size)
        for module in writers.shapes(size):
            weight = tensors[f"{module}.weight"]
            weight[[*EXCHANGED]] = weight[[*EXCHANGED[::-1]]]
        return written(writers, parent / f"{size}-exchanged", name, size, tensors)

    return {"right": right, "exchanged": exchanged}


def written(writers: ModuleType, folder: Path, name: str, size: str, tensors: dict[str, Any]) -> Path:
    """Write a source, if it does not exist; a folder with biases has a source of its own with these."""
    settings, stored = writers.config(size), tensors_of(FOLDERS / name)
    if biases := [tensor for tensor in stored if tensor.endswith("_proj.bias")]:
        import torch

        folder = folder.with_name(f"{folder.name}-biases")
        settings |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        for tensor in biases:
            dtype, shape, data = stored[tensor]
            assert dtype == "F16"
            tensors[tensor] = torch.from_numpy(np.frombuffer(data, np.float16).reshape(shape).copy())
    if not folder.exists():
        writers.write(folder, settings, tensors)
    return folder


def size_of(writers: ModuleType, name: str) -> str:
    """Find the size of a folder by the widths in config.json."""
    config = json.loads((FOLDERS / name / "config.json").read_text())
    widths = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    (size,) = (size for size, expected in writers.SIZES.items() if expected == widths)
    return size


def compare(folder: Path, source: Path) -> SourceReport:
    file, weights = open_table(folder, is_complete=False), open_weights(source)
    with closing(file.source), closing(weights.source):
        return compare_with_source(file, weights, model=folder.name)


@pytest.mark.nightly_cases(but=METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_quantised_folder_passes_against_its_float_tensors_and_fails_for_exchanged_rows(
    sources: Mapping[str, Sources], name: str
):
    report = compare(FOLDERS / name, sources["right"](name))
    assert [comparison.note for comparison in report.failures] == []
    quantised = {weight.name: weight for weight in report.weights if has_codes(weight.types[0])}
    assert any(name.endswith("_proj.weight") for name in quantised)
    assert all(0 < weight.error < 0.7 for weight in quantised.values())

    report = compare(FOLDERS / name, sources["exchanged"](name))
    wrong = {weight.name: {row for row, _ in weight.wrong} for weight in report.weights if weight.wrong}
    assert quantised.keys() - {"lm_head.weight", "model.embed_tokens.weight"} <= wrong.keys()
    for weight, rows in wrong.items():
        assert rows == exchanged_rows(report, weight), weight
    assert {cause.name for cause in report.causes} == {"rows in another order"}
    assert {name for cause in report.causes for name in cause.stages} == wrong.keys()


def exchanged_rows(report: SourceReport, name: str) -> set[int]:
    """Return the exchanged rows of a weight; those of experts follow each other."""
    n_experts = 4 if ".experts." in name else 1
    (n_rows,) = (weight.n_rows for weight in report.weights if weight.name == name)
    return {expert * n_rows // n_experts + row for expert in range(n_experts) for row in EXCHANGED}

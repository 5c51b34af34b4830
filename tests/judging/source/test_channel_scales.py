"""Channel scales of AWQ and SmoothQuant: factors between weights pass, if the product is that of the source."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS

from llorch.files import open_weights
from llorch.files.opening import open_table
from llorch.judging.source.compare import SourceReport, compare_with_source

SIZES = {"ct-w8a8": "small", "AWQ": "large"}  # folder: size; "AWQ" is written here, 4-bit with wide rows
LAYER = "model.layers.0."
NORM, POST_NORM = f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight"
Q, K, V, OUT = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
WITH_SCALES = {NORM, Q, K, V, POST_NORM, GATE, UP, DOWN}

Tensors = dict[str, Any]


def unscale(tensors: Tensors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make the source of a file with channel scales: divide by the scales that the file has; return these."""
    import torch

    rng = np.random.default_rng(0)
    widths = [len(tensors[NORM]), len(tensors[NORM]), len(tensors[UP])]
    scales = [torch.from_numpy(np.exp(0.5 * rng.normal(size=width)).astype(np.float32)) for width in widths]
    for norm, readers, scale in ((NORM, (Q, K, V), scales[0]), (POST_NORM, (GATE, UP), scales[1])):
        tensors[norm] *= scale
        for name in readers:
            tensors[name] /= scale
    tensors[UP] *= scales[2][:, None]
    tensors[DOWN] /= scales[2]
    return tuple(scales)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def folders(writers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    """Quantised folders by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDERS.parent))
        by_script = import_module("quantised_writers.by_script")
        patch.setitem(writers.SIZES, "large", (1024, 512))
        folder = tmp_path_factory.mktemp("channel_scales") / "AWQ"
        writers.write(folder, *by_script.awq(64, size="large"))
        yield {"ct-w8a8": FOLDERS / "ct-w8a8", "AWQ": folder}


def compare(
    writers: ModuleType, file_path: Path, folder: Path, change: Callable[[Tensors], object] = lambda tensors: None
) -> SourceReport:
    """Compare a quantised folder with a source without its channel scales, which `change` changes further."""
    size = SIZES[file_path.name]
    tensors = {key: tensor.float() for key, tensor in writers.float_tensors(size).items()}
    unscale(tensors)
    change(tensors)
    for norm in (NORM, POST_NORM):
        tensors[norm] = tensors[norm].bfloat16().float()  # a source has gains in bfloat16
    writers.write(folder, writers.config(size) | {"torch_dtype": "float32"}, tensors)
    file, source = open_table(file_path), open_weights(folder)
    with closing(file.source), closing(source.source):
        return compare_with_source(file, source, model=file_path.name)


def failed(report: SourceReport) -> set[str]:
    return {failure.stage_ref.part for failure in report.failures}


@pytest.mark.nightly_cases("AWQ")
@pytest.mark.parametrize("name", SIZES)
def test_channel_scales_pass_with_a_note(writers: ModuleType, folders: Mapping[str, Path], tmp_path: Path, name: str):
    report = compare(writers, folders[name], tmp_path / "source")
    assert failed(report) == set()
    assert {weight.name for weight in report.weights if weight.has_channel_scales} == WITH_SCALES
    assert {note.stage_ref.part for note in report.notes} >= WITH_SCALES


def exchange(first: int, second: int, tensor: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[tensor][[first, second]] = tensors[tensor][[second, first]].clone()

    return change


def scale(tensor: str, factor: float, rows: slice = slice(None)) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[tensor][rows] *= factor

    return change


def scale_values(tensors: Tensors) -> None:
    """Scale value rows, which several query heads share, and columns of the output."""
    tensors[V][:16] *= 1.5
    tensors[OUT][:, :16] /= 1.5


WRONG: Mapping[str, tuple[Callable[[Tensors], None], set[str]]] = {
    "rows of a reader of a norm exchanged": (exchange(3, 9, Q), {NORM, Q, K, V}),
    "a reader of a norm scaled": (scale(GATE, 1.1), {POST_NORM, GATE, UP, DOWN}),
    "a column of the second matrix of a pair scaled": (scale(DOWN, 1.3), {UP, DOWN}),
    "rows of the second matrix of a pair exchanged": (exchange(3, 9, DOWN), {UP, DOWN}),
    "grouped values scaled": (scale_values, {V, OUT}),
}


@pytest.mark.nightly_cases("*-AWQ")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("mistake", WRONG)
def test_error_beside_channel_scales_fails(
    writers: ModuleType, folders: Mapping[str, Path], tmp_path: Path, name: str, mistake: str
):
    change, expected = WRONG[mistake]
    assert failed(compare(writers, folders[name], tmp_path / "source", change)) == expected


def test_channel_scales_in_a_float_file_fail(writers: ModuleType, tmp_path: Path):
    size = SIZES["ct-w8a8"]
    tensors = {key: tensor.float() for key, tensor in writers.float_tensors(size).items()}
    writers.write(tmp_path / "file", writers.config(size) | {"torch_dtype": "float32"}, tensors)
    unscale(tensors)
    writers.write(tmp_path / "source", writers.config(size) | {"torch_dtype": "float32"}, tensors)
    file, source = open_weights(tmp_path / "file"), open_weights(tmp_path / "source")
    with closing(file.source), closing(source.source):
        assert failed(compare_with_source(file, source, model="file")) == WITH_SCALES

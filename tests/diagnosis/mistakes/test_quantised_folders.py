"""Mistakes of reading quantised folders are named from the stages of an engine that read the weights wrongly.

`wrong_readers` reads tensors of the files wrongly with code of its own. For the other mistakes the wrong matrices are
made by the rows themselves, so only the search for them is tested.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES, tensors_of, written
from faults.wrong_dumps import WHOLE, dump_of
from faults.wrong_readers import FURTHER_READERS, READERS

from llorch.diagnosis.diagnose import findings
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS
from llorch.diagnosis.mistakes.quantised_folders import requantised, scale_denominators
from llorch.diagnosis.replay import UNCHANGED
from llorch.diagnosis.verdict import Finding
from llorch.files import Weights, open_weights
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.judging.expectations import files
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.stage_ref import Tokens

Arrays = Mapping[str, np.ndarray]
BY_NAME = {mistake.name: mistake for mistake in QUANTISED_FOLDERS}
TOKENS = [Tokens((3, 11, 7, 20, 5, 9), 0)]
PROJECTED: Callable[[str], bool] = lambda key: key.endswith(("attn_norm", "_proj"))  # noqa: E731
# Folders where a mistake changes numbers.
CHANGED = {
    "gptq-first-version-as-second": "gptq-4bit", "gptq-second-version-as-first": "gptq-v2-4bit",
    "gptq-zero-point-not-wrapped": "gptq-2bit-asym", "gptq-zero-point-carried": "gptq-4bit-asym",
    "awq-plain-order": "awq-gemm", "awq-zero-point-plus-one": "awq-gemm", "folder-group-one-on": "gptq-4bit",
    "gptq-awq-order": "gptq-4bit", "folder-upper-half-first": "ct-nvfp4",
    "bitsandbytes-lower-half-first": "bnb-nf4", "three-bits-without-gaps": "ct-w3a16-ten-per-word",
    "folder-codes-signed": "ct-w4a16", "folder-zero-point-forgotten": "ct-w8a16-channel",
    "folder-read-as-symmetric": "ct-w4a16-asym", "folder-zero-point-not-scaled": "awq-gemv",
    "zero-point-product-float16": "awq-gemm",
    "mlx-bias-dropped": "mlx-4bit", "mlx-bias-subtracted": "mlx-3bit", "group-index-ignored": "gptq-4bit-act-order",
    "global-scale-turned": "ct-nvfp4", "global-scale-dropped": "modelopt-nvfp4",
    "fp8-scale-divided": "fp8-block-partial",
    "fp8-blocks-of-equal-size": "fp8-block-partial", "fp8-partial-block-with-scale-before": "fp8-block-bf16-scale",
    "fp8-scales-tiled": "ct-fp8-block", "folder-scale-dropped": "ct-w8a8", "folder-scale-float16": "fbgemm-fp8",
    "folder-scale-bfloat16": "awq-gemm", "int8-row-maximum-over-127-5": "bnb-int8",
    "int8-row-maximum-over-128": "bnb-int8", "exponent-bias-128": "ct-mxfp4", "exponent-as-integer": "mlx-mxfp8",
    "nf4-as-fp4": "bnb-nf4", "fp4-as-nf4": "bnb-fp4", "fp4-as-e2m1": "bnb-fp4",
    "nested-offset-dropped": "bnb-nf4-double", "bitnet-scale-turned": "bitnet-bitlinear",
    "bitnet-rows-in-order": "bitnet-autobitlinear",
}  # fmt: skip
# Folders where it changes none.
UNCHANGED_IN = {
    "gptq-first-version-as-second": "gptq-v2-4bit", "gptq-second-version-as-first": "gptq-4bit",
    "gptq-zero-point-not-wrapped": "gptq-4bit", "gptq-zero-point-carried": "gptq-4bit",
    "three-bits-without-gaps": "ct-w3a16", "folder-read-as-symmetric": "gptq-4bit",
    "group-index-ignored": "gptq-4bit", "nested-offset-dropped": "bnb-nf4", "mlx-bias-dropped": "mlx-mxfp4",
    "fp8-blocks-of-equal-size": "ct-fp8-block-wide", "folder-scale-float16": "gptq-4bit",
    "folder-zero-point-not-scaled": "ct-w4a16",
}  # fmt: skip
READ = {(mistake, CHANGED[mistake]): reader for mistake, reader in READERS.items()} | FURTHER_READERS
PLAIN = (
    "awq-zero-point-plus-one", "folder-group-one-on", "gptq-first-version-as-second", "awq-plain-order", "nf4-as-fp4",
    "exponent-bias-128",
)  # fmt: skip


@cache
def right(name: str) -> Weights:
    return open_weights(FOLDERS / name)


@cache
def matrices(name: str) -> Mapping[str, QuantisedMatrix]:
    """By the names of the files."""
    weights = right(name)
    stored = (matrix for weight in weights if len(weights.shape(weight)) > 1 for matrix in weights.all_stored(weight))
    return {matrix.name: matrix for matrix in stored if isinstance(matrix, QuantisedMatrix)}


def read_with(mistake: str, name: str) -> Arrays:
    with np.errstate(all="ignore"):
        return {
            tensor: BY_NAME[mistake].result(matrix, "decode")
            if matrix.ggml_type.name.startswith(BY_NAME[mistake].cases)
            else matrix.decode()
            for tensor, matrix in matrices(name).items()
        }


def changed_by(mistake: str, name: str) -> bool:
    read = read_with(mistake, name)
    return any(not np.array_equal(array, matrices(name)[tensor].decode()) for tensor, array in read.items())


def floats(read: Arrays, name: str, folder: Path) -> Weights:
    """A folder of floats that holds matrices as an engine read them."""
    config = json.loads((FOLDERS / name / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    parts = {part.name for matrix in matrices(name).values() for part in matrix.parts.values()}
    own = {
        tensor: stored
        for tensor, stored in tensors_of(FOLDERS / name).items()
        if tensor not in parts and tensor.endswith((".weight", ".bias")) and stored[0] in ("F16", "BF16", "F32")
    }
    own |= {tensor: ("F32", [*array.shape], array.astype("<f4").tobytes()) for tensor, array in read.items()}
    return open_weights(written(folder / name, kept, own))


def first_cause(name: str, read: Arrays, folder: Path, is_dumped: Callable[[str], bool] = WHOLE) -> Finding | None:
    dump = dump_of(floats(read, name, folder).astype(np.float64), TOKENS, UNCHANGED, is_dumped)
    return next(findings(right(name).astype(np.float64), dump), None)


def require_named(mistake: str, finding: Finding | None) -> None:
    assert finding is not None
    assert (finding.kind, [cause.name for cause in finding.causes]) == ("mistake", [mistake])
    assert finding.causes[0].explained_share > 0.99


def test_each_mistake_is_made_in_a_folder():
    assert CHANGED.keys() == BY_NAME.keys()
    assert {name for name in READERS} <= BY_NAME.keys()


@pytest.mark.parametrize("mistake", BY_NAME)
def test_a_mistake_changes_the_numbers_of_its_folder(mistake: str):
    assert changed_by(mistake, CHANGED[mistake])


@pytest.mark.parametrize("mistake", UNCHANGED_IN)
def test_a_mistake_that_cannot_be_made_in_a_folder_changes_nothing(mistake: str):
    assert not changed_by(mistake, UNCHANGED_IN[mistake])


@pytest.mark.parametrize(("mistake", "name"), READ)
def test_a_row_makes_the_bits_of_an_independent_wrong_reader(mistake: str, name: str):
    made, read = read_with(mistake, name), READ[mistake, name](tensors_of(FOLDERS / name))
    assert read.keys() == made.keys()
    for tensor, array in read.items():
        np.testing.assert_array_equal(made[tensor], array)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=() if one in PLAIN else pytest.mark.slow) for one in BY_NAME]
)
def test_a_mistake_of_reading_is_named(mistake: str, tmp_path: Path):
    name = CHANGED[mistake]
    reader = READERS.get(mistake)
    read = read_with(mistake, name) if reader is None else reader(tensors_of(FOLDERS / name))
    require_named(mistake, first_cause(name, read, tmp_path))


def test_projections_alone_name_it(tmp_path: Path):
    read = READERS["group-index-ignored"](tensors_of(FOLDERS / "gptq-4bit-act-order"))
    require_named("group-index-ignored", first_cause("gptq-4bit-act-order", read, tmp_path, PROJECTED))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ("awq-gemm", "bnb-nf4") else pytest.mark.slow) for one in NAMES]
)
def test_a_right_reader_is_not_accused(name: str, tmp_path: Path):
    read = {tensor: matrix.decode() for tensor, matrix in matrices(name).items()}
    found = first_cause(name, read, tmp_path)
    assert found is None or found.kind == "rounding"


@pytest.mark.parametrize("mistake", BY_NAME)
def test_checkpoint_13_of_a_folder_is_red_with_each_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch):
    """The library's matrices are stood in for by right ones, which the goldens of other libraries judge."""
    name = CHANGED[mistake]
    library = {tensor: matrix.decode() for tensor, matrix in matrices(name).items()}
    read = read_with(mistake, name)

    def asked(engine: str, path: Path, function: str, *args: str) -> np.ndarray | str | None:
        answers = {"dequantised": library.get(args[-1]), "package": "its library"}
        return answers.get(function.rpartition(":")[2])

    folder = right(name).source
    assert isinstance(folder, QuantisedFolder)
    monkeypatch.setattr(files, "in_child", asked)
    comparisons = list(files.compare_matrices(name, folder))
    assert {c.verdict for c in comparisons} == {PASS}
    assert all("its library" in c.note for c in comparisons)
    monkeypatch.setattr(QuantisedFolder, "array", lambda folder, tensor: read[tensor])
    comparisons = list(files.compare_matrices(name, folder))
    red = [c for c in comparisons if c.verdict == FAIL]
    assert red
    assert all(c.stage_ref.checkpoint == "13" and c.tolerance.error == 0 < c.difference.error for c in red)


def first_matrix(name: str) -> QuantisedMatrix:
    return next(iter(matrices(name).values()))


@pytest.mark.parametrize(
    ("name", "largest_codes"),
    [
        ("ct-w4a16", {7, 8, 7.5}), ("gptq-8bit", {127, 128, 127.5}), ("ct-fp8-dynamic", {448}), ("bnb-nf4", {1}),
        ("ct-nvfp4", {6}), ("ct-mxfp4", {6}),
    ],
)  # fmt: skip
def test_scale_denominators_are_the_largest_codes_of_a_format(name: str, largest_codes: set[float]):
    assert {*scale_denominators(first_matrix(name))} == largest_codes


@pytest.mark.parametrize("name", NAMES)
def test_requantised_matrix_is_near_its_floats(name: str):
    like = first_matrix(name)
    array = np.random.default_rng(0).standard_normal((24, 128))
    rounded = requantised(array, like, scale_denominators(like)[0])
    assert np.isfinite(rounded).all()
    assert 1e-4 < np.linalg.norm(rounded - array) / np.linalg.norm(array) < 0.8  # 2 bits: 0.75

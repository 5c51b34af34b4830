"""Matrices of a quantised folder against those of its method's library."""

from collections.abc import Callable

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS

from llorch.files import open_weights
from llorch.files.quantised import QuantisedFolder
from llorch.judging.expectations import files
from llorch.stages.comparison import FAIL, PASS

MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("decode", "share"),
    [
        (np.copy, None),
        (lambda matrix: matrix + np.arange(matrix.shape[1]) % 2, "50.00%"),
        (lambda matrix: matrix[:1], "100.00%"),
        (lambda matrix: None, "100.00%"),
    ],
    ids=["equal", "half_of_the_numbers", "another_shape", "unreadable"],
)
def test_matrix_that_a_library_decodes_otherwise_is_named_with_its_share(
    decode: Callable[[np.ndarray], np.ndarray | None], share: str | None, monkeypatch: pytest.MonkeyPatch
):
    folder = open_weights(FOLDERS / "mxfp8").source
    assert isinstance(folder, QuantisedFolder)

    def call_library(engine: str, path: object, function: str, *args: str) -> np.ndarray | str | None:
        if not function.endswith(":dequantised"):
            return None if function.endswith(":missing") else "its library"
        matrix = folder.array(args[-1])
        return decode(matrix) if args[-1] == MATRIX else matrix

    monkeypatch.setattr(files, "in_child", call_library)
    (comparison,) = files.compare_matrices("m", folder)
    assert comparison.verdict == (FAIL if share else PASS)
    assert comparison.difference.error == (1 / len(folder.matrices) if share else 0)
    assert comparison.note.startswith(f"{MATRIX}: {share}" if share else f"{len(folder.matrices)} matrices")

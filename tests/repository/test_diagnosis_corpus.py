"""benchmarks/diagnosis: the port without its bugs is right, and every bug changes the stage that it names."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import stage_keys
from llorch.builtin import BUILTIN, goldens_folder


@pytest.mark.parametrize("cuts", [(), (5,), (6, 7)], ids=["whole", "chunks", "steps"])
@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("model", BUILTIN)
def test_the_port_is_right(model: str, case: str, cuts: tuple[int, ...]):
    tokens = json.loads((goldens_folder() / model / "golden.json").read_text())["cases"][case]
    port = Port(model, tokens["first_position"])
    for part in np.split(tokens["ids"], cuts):
        port.run(part.tolist())
    truth = load_file(goldens_folder() / model / "truth.safetensors")
    for name, got in stage_keys(port.tape[-1]).items():
        want = truth[f"{case}/{name}"]
        want = rows_of_the_last_pass(want, got.shape)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        assert got.dtype == np.float32
        assert np.linalg.norm(got[finite] - want[finite]) < 3e-6 * np.linalg.norm(want[finite]), name


def rows_of_the_last_pass(want: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axis = next((axis for axis, size in enumerate(shape) if size != want.shape[axis]), 0)
    return np.moveaxis(np.moveaxis(want, axis, 0)[-shape[axis] :], 0, axis)

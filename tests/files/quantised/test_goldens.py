"""The numbers of every quantised folder beside those that another library made of its codes."""

import hashlib
import json

import numpy as np
import pytest
from quantised_folders import FOLDERS, NAMES

from llorch.files import open_weights
from llorch.files.quantised import QuantisedFolder

GOLDENS = json.loads((FOLDERS / "goldens.json").read_text())
JUDGED = [name for name in NAMES if GOLDENS[name]["dequantiser"]]


def opened(name: str) -> QuantisedFolder:
    source = open_weights(FOLDERS / name).source
    assert isinstance(source, QuantisedFolder)
    return source


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


def test_every_folder_has_goldens_or_a_reason():
    assert GOLDENS.keys() >= {*NAMES}
    assert {name for name in NAMES if not GOLDENS[name].get("reason")} == {*JUDGED}
    assert len(JUDGED) > 50


@pytest.mark.parametrize("name", JUDGED)
def test_each_number_is_that_of_the_library(name: str):
    folder, golden = opened(name), GOLDENS[name]
    assert golden["rounds_to"] == "float32"
    assert golden["weights"].keys() == folder.matrices.keys()
    for weight, wanted in golden["weights"].items():
        made = folder.array(weight)
        assert list(made.shape) == wanted["shape"]
        places = np.linspace(0, made.size - 1, len(wanted["samples"])).astype(int)
        np.testing.assert_allclose(made.reshape(-1)[places], wanted["samples"], rtol=1e-8, atol=0, err_msg=weight)
        # Some libraries give a zero without its sign.
        assert wanted["sha256"] in (sha256(made), sha256(made + np.float32(0))), weight


def test_one_number_that_is_off_by_a_bit_is_seen():
    made, golden = opened("mlx-4bit"), GOLDENS["mlx-4bit"]["weights"]
    name = next(iter(golden))
    array = made.array(name)
    array[5, 7] = np.nextafter(array[5, 7], np.float32(9))
    assert golden[name]["sha256"] not in (sha256(array), sha256(array + np.float32(0)))

"""The numbers of every quantised folder beside those that another library made of its codes."""

import hashlib
import json

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES, tensors_of
from helpers.refusals import refuses
from safetensors.numpy import load_file

from llorch.files import open_weights
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.codes import E2M1, E8M0, stream
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

GOLDENS = json.loads((FOLDERS / "goldens.json").read_text())


def opened(name: str) -> QuantisedFolder:
    source = open_weights(FOLDERS / name).source
    assert isinstance(source, QuantisedFolder)
    return source


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


def test_every_folder_has_goldens():
    assert GOLDENS.keys() == {*NAMES, "gpt-oss-mxfp4"}
    assert len(NAMES) > 50


def test_folders_and_goldens_take_less_than_three_million_bytes():
    assert sum(file.stat().st_size for file in FOLDERS.rglob("*") if file.is_file()) < 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_each_number_is_that_of_the_library(name: str):
    folder, golden = opened(name), GOLDENS[name]
    assert golden["weights"].keys() == folder.matrices.keys()
    assert golden["rounds_to"] == ("float16" if name.startswith("awq-gemv") else "float32")
    for weight, wanted in golden["weights"].items():
        made = folder.array(weight).astype(golden["rounds_to"]).astype(np.float32)
        assert list(made.shape) == wanted["shape"]
        places = np.linspace(0, made.size - 1, len(wanted["samples"])).astype(int)
        np.testing.assert_allclose(made.reshape(-1)[places], wanted["samples"], rtol=1e-8, atol=0, err_msg=weight)
        # Some libraries give a zero without its sign.
        assert wanted["sha256"] in (sha256(made), sha256(made + np.float32(0))), weight


LOGITS = load_file(FOLDERS / "logits.safetensors")
WEIGHTS_ALONE = sorted(key.removesuffix("/weights") for key in LOGITS if key.endswith("/weights"))


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_logits_are_those_of_a_foreign_engine_that_read_the_folder(name: str):
    """transformers, compressed-tensors, gptqmodel and others; float64 where the engine computes in it."""
    said, wanted = GOLDENS[name]["forward"], LOGITS[f"{name}/weights"].astype(np.float64)
    weights = open_weights(FOLDERS / name).astype(np.float64)
    ids = np.array(said["tokens"])
    made = forward(ids, weights, KVCache(weights.config, weights.dtype))[said["positions"]]
    # llorch rounds a weight to float32; only the numbers of NVFP4, with two scales of floats, do not fit it.
    allowed = 1e-6 if name == "ct-nvfp4" else 1e-12 if said["dtype"] == "float64" else 1e-5
    assert np.abs(made - wanted).max() / np.abs(wanted).max() < allowed


def test_experts_of_gpt_oss_are_decoded_and_its_family_is_refused():
    stored = tensors_of(FOLDERS / "gpt-oss-mxfp4")
    for name, wanted in GOLDENS["gpt-oss-mxfp4"]["weights"].items():
        blocks, scales = (stored[f"{name}_{part}"] for part in ("blocks", "scales"))
        codes = stream(np.frombuffer(blocks[2], np.uint8).reshape(-1, 16), 4, 32)
        numbers = E2M1[codes] * E8M0[np.frombuffer(scales[2], np.uint8)][:, None]
        experts = numbers.reshape(*scales[1][:2], -1).swapaxes(1, 2)
        assert list(experts.shape) == wanted["shape"]
        assert wanted["sha256"] in (sha256(experts), sha256(experts + np.float32(0)))
    with refuses("Unsupported", "gpt_oss"):
        open_weights(FOLDERS / "gpt-oss-mxfp4")


def test_one_number_that_is_off_by_a_bit_is_seen():
    made, golden = opened("mlx-4bit"), GOLDENS["mlx-4bit"]["weights"]
    name = next(iter(golden))
    array = made.array(name)
    array[5, 7] = np.nextafter(array[5, 7], np.float32(9))
    assert golden[name]["sha256"] not in (sha256(array), sha256(array + np.float32(0)))

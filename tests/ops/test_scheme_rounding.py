import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from llorch.ops.scheme_rounding import CODES, SchemeRounding, round_as_scheme, to_e2m1, to_e4m3

GOLDENS = Path(__file__).parents[2] / "reference_outputs" / "quantised_folders"
KINDS = {
    "int8 token": SchemeRounding("int8", "dynamic"),
    "int4 token": SchemeRounding("int4", "dynamic"),
    "int8 static": SchemeRounding("int8", "static", number=0.02099609375),
    "fp8 token": SchemeRounding("E4M3", "dynamic"),
    "fp8 static": SchemeRounding("E4M3", "static", number=0.00592041015625),
    "fp8 groups of 128": SchemeRounding("E4M3", "dynamic", 128),
    "nvfp4": SchemeRounding("E2M1", "e4m3", 16, 612.3455810546875),
    "mxfp4": SchemeRounding("E2M1", "e8m0", 32),
    "mxfp8": SchemeRounding("E4M3", "e8m0", 32),
}

TORCHAO = SchemeRounding("int8", "dynamic", by_reciprocal=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_equals_compressed_tensors_bit_for_bit(name: str, dtype: type[np.floating]):
    golden = json.loads((GOLDENS / "scheme.json").read_text())["rounded"][name]
    with np.load(GOLDENS / "scheme.npz") as arrays:
        actual = round_as_scheme(arrays["inputs"].astype(dtype), KINDS[name]) + 0  # zeros without a sign
    assert actual.dtype == dtype
    if dtype is np.float64:
        np.testing.assert_array_equal(actual.reshape(-1)[::193], golden["samples"])
    assert sha256(actual.tobytes()).hexdigest() == golden[np.dtype(dtype).name]


def test_goldens_of_scheme_rounding_cover_every_kind():
    assert json.loads((GOLDENS / "scheme.json").read_text())["rounded"].keys() == KINDS.keys()
    assert {how.codes for how in KINDS.values()} == CODES.keys()


def test_round_as_scheme_equals_torchao_bit_for_bit():
    golden = json.loads((GOLDENS / "scheme.json").read_text())["rounded_by_torchao"]
    with np.load(GOLDENS / "scheme.npz") as arrays:
        actual = round_as_scheme(arrays["inputs"].astype(np.float32), TORCHAO) + 0  # zeros without a sign
    np.testing.assert_array_equal(actual.reshape(-1)[::193], golden["samples"])
    assert sha256(actual.tobytes()).hexdigest() == golden["float32"]


def test_round_as_scheme_of_torchao_has_a_least_scale_and_multiplies_by_its_reciprocal():
    x = np.array([[1e-7, -2e-7, 0, 3e-8], [127.5, 63.5, -1, 0.5]], np.float32)
    np.testing.assert_array_equal(round_as_scheme(x, TORCHAO), [np.array([1, -2, 0, 0]) * 2.0**-23, [127, 64, -1, 0]])
    tie = np.array([[80.01, 7.2165885]], np.float32)  # x / s = 11.5 and x * (1 / s) < 11.5
    scale = tie[0, 0] / np.float32(127.5)
    assert tie[0, 1] / scale == 11.5
    assert round_as_scheme(tie, TORCHAO)[0, 1] == 11 * scale


@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_keeps_nan_and_shape(name: str):
    x = np.ones((2, 3, 128), np.float32)
    x[1, 2, 5] = np.nan
    actual = round_as_scheme(x, KINDS[name])
    assert actual.shape == x.shape
    assert np.isnan(actual[1, 2, 5])
    assert np.isfinite(actual[0]).all()


def test_round_as_scheme_of_one_row_does_not_depend_on_other_rows():
    x = np.random.default_rng(0).normal(0, 1, (3, 128))
    for how in KINDS.values():
        np.testing.assert_array_equal(round_as_scheme(x, how)[1:2], round_as_scheme(x[1:2], how))


def test_small_floats_round_ties_to_the_even_code():
    np.testing.assert_array_equal(
        to_e2m1(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5])), [0, 1, 1, 2, 2, 4, 4, -4]
    )
    np.testing.assert_array_equal(to_e4m3(np.array([17.0, 19, 2**-10, 3 * 2**-10, 447])), [16, 20, 0, 2**-8, 448])


@pytest.mark.nightly_cases(but=["int8 static-float32"])
@pytest.mark.live
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_equals_compressed_tensors_run_now(name: str, dtype: type[np.floating]):
    pytest.importorskip("compressed_tensors", reason="NOT RUN: compressed_tensors is not installed")
    from reference_outputs.make_scheme import FUNCTIONS, rounded

    rng = np.random.default_rng(1)
    x = (rng.normal(0, 1, (40, 512)) * np.exp(rng.normal(0, 2, (40, 512)))).astype(dtype)
    np.testing.assert_array_equal(round_as_scheme(x, KINDS[name]), rounded(x, *FUNCTIONS[name]))

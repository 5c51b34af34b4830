from pathlib import Path

import numpy as np
import pytest

from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType, decode
from llorch.verify.quantised_models import matrix_bytes
from llorch.verify.sums import product_limit, spread


def operands(width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, (4, width)).astype(np.float32), rng.normal(0, 1, (64, width)).astype(np.float32)


def matrix(kind: GGMLType, heads: int = 0) -> Matrix:
    shape = (96, 512)
    packed = Packed("w", Path("m.gguf"), matrix_bytes(kind, shape, key="sums"), kind, shape)
    return Matrix(packed, round_inputs=True, interleaved_heads=heads)


def test_the_limit_of_a_product_grows_with_the_root_of_its_width():
    limits = []
    for width in (4096, 16384):
        x, w = operands(width)
        limits.append(product_limit(x, w, x @ w.T))
    assert limits[1] == pytest.approx(2 * limits[0], rel=0.1)
    assert limits[0] == pytest.approx(4 * 2**0.5 * 2**-24 * (4096 / 48) ** 0.5, rel=0.1)


def test_terms_that_cancel_are_counted():
    x, w = operands(512)
    x, w = np.concatenate([x, -x], axis=1), np.concatenate([w, w * np.float32(1.001)], axis=1)
    assert spread(x, w, x @ w.T) > 100


def test_terms_that_all_add_up_grant_no_less():
    x, w = (np.abs(array) for array in operands(512))
    assert spread(x, w, x @ w.T) == 1.0


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K])
@pytest.mark.parametrize("heads", [0, 3])
def test_minima_that_cancel_the_codes_are_counted_as_ggml_sums_them(kind: GGMLType, heads: int):
    """Inputs with a mean in every block: codes and minima give two large sums of opposite sign."""
    made = matrix(kind, heads)
    x = np.random.default_rng(1).normal(1, 0.1, (4, 512)).astype(np.float32)
    y = x @ made.dequantize().T
    assert spread(x, made, y) > 1.05 > spread(x, made.dequantize(), y)
    centred = np.random.default_rng(2).normal(0, 1, (4, 512)).astype(np.float32)
    assert spread(centred, made, centred @ made.dequantize().T) < 4


def test_a_type_without_minima_is_counted_by_its_elements():
    x, _ = operands(512)
    made = matrix(GGMLType.Q6_K)
    array = decode(made.packed.raw, GGMLType.Q6_K, (96, 512))
    assert spread(x, made, x @ array.T) == spread(x, array, x @ array.T)

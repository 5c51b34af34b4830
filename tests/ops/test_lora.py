"""LoRA and DoRA: products and lengths by hand, finite differences, dropout, and the two adapters of a tied table."""

import copy

import numpy as np
import pytest
from helpers.finite_differences import assert_is_gradient

from llorch.ops.dora import dora, dora_backward, row_lengths
from llorch.ops.linear import linear
from llorch.ops.lora import Lora, LoraMatrix, embedding_lora_backward, embedding_lora_delta, lora_backward, lora_delta
from llorch.ops.numerics import QuantMethod

pytestmark = pytest.mark.usefixtures("arithmetic")
SEQ, IN, OUT, R = 5, 4, 6, 3
IDS = np.array([2, 0, 2, 5, 2])


def random_lora(rng, n_in: int, n_out: int, *, dora: bool, dropout: bool = False, dtype: type = np.float64) -> Lora:
    mask = rng.integers(0, 2, (SEQ, n_in)) * 2.0 if dropout else None
    arrays = rng.normal(size=(R, n_in)), rng.normal(size=(n_out, R)), rng.random(n_out) + 0.5
    lora_A, lora_B, magnitude = (array.astype(dtype) for array in arrays)
    return Lora(lora_A, lora_B, 0.7, magnitude if dora else None, None if mask is None else mask.astype(dtype))


def test_the_delta_matches_a_product_worked_by_hand():
    lora_A, lora_B = np.array([[1.0, 2.0, 0.0]]), np.array([[3.0], [-1.0]])
    np.testing.assert_array_equal(lora_delta(np.array([[1.0, 1.0, 9.0]]), lora_A, lora_B, scaling=0.5), [[4.5, -1.5]])


def test_lora_backward_is_the_gradient(rng):
    x, lora = rng.normal(size=(SEQ, IN)), random_lora(rng, IN, OUT, dora=False)
    grad = rng.normal(size=(SEQ, OUT))
    d_x, d_A, d_B = lora_backward(grad, x, lora.lora_A, lora.lora_B, scaling=0.7)

    def weighed(x, A, B):
        return float((lora_delta(x, A, B, scaling=0.7) * grad).sum())

    assert_is_gradient(d_x, lambda v: weighed(v, lora.lora_A, lora.lora_B), x, "x")
    assert_is_gradient(d_A, lambda v: weighed(x, v, lora.lora_B), lora.lora_A, "A")
    assert_is_gradient(d_B, lambda v: weighed(x, lora.lora_A, v), lora.lora_B, "B")


def test_with_B_of_zeros_every_gradient_by_A_is_exactly_0_and_that_by_B_is_not(rng):
    x, lora_A, grad = rng.normal(size=(SEQ, IN)), rng.normal(size=(R, IN)), rng.normal(size=(SEQ, OUT))
    d_x, d_A, d_B = lora_backward(grad, x, lora_A, np.zeros((OUT, R)), scaling=0.7)
    assert not d_x.any()
    assert not d_A.any()
    assert d_B.all()


def test_an_embedding_adapter_is_a_lora_on_one_hot_inputs(rng):
    lora, grad = random_lora(rng, 7, OUT, dora=False), rng.normal(size=(SEQ, OUT))
    one_hot, A, B = np.eye(7)[IDS], lora.lora_A, lora.lora_B
    np.testing.assert_allclose(
        embedding_lora_delta(IDS, A, B, scaling=0.7), lora_delta(one_hot, A, B, scaling=0.7), rtol=0, atol=1e-14
    )
    _, want_A, want_B = lora_backward(grad, one_hot, A, B, scaling=0.7)
    d_A, d_B = embedding_lora_backward(grad, IDS, A, B, scaling=0.7)
    np.testing.assert_allclose(d_A, want_A, rtol=0, atol=1e-14)
    np.testing.assert_allclose(d_B, want_B, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_the_backward_of_a_matrix_is_its_gradient(rng, dora, dropout):
    base, x = rng.normal(size=(OUT, IN)), rng.normal(size=(SEQ, IN))
    lora, grad = random_lora(rng, IN, OUT, dora=dora, dropout=dropout), rng.normal(size=(SEQ, OUT))
    d_x, trained = LoraMatrix(base, lora).backward(grad, x)
    assert list(trained) == ["lora_A", "lora_B", "magnitude"][: 2 + dora]
    lengths = np.linalg.norm(base + 0.7 * lora.lora_B @ lora.lora_A, axis=1)  # the constant of DoRA's gradient

    def weighed(x, tensors):
        kept = x if lora.mask is None else x * lora.mask
        added = lora_delta(kept, tensors["lora_A"], tensors["lora_B"], scaling=0.7)
        gain = tensors.get("magnitude", lengths) / lengths
        return float(((x @ base.T + (gain - 1) * (kept @ base.T) + gain * added) * grad).sum())

    tensors = {name: getattr(lora, name) for name in trained}
    assert weighed(x, tensors) == pytest.approx(float((LoraMatrix(base, lora).forward(x) * grad).sum()), rel=1e-13)
    assert_is_gradient(d_x, lambda v: weighed(v, tensors), x, "x")
    for name, actual in trained.items():
        assert_is_gradient(actual, lambda v, name=name: weighed(x, tensors | {name: v}), tensors[name], name)


@pytest.mark.parametrize("dora", [False, True])
def test_the_backward_of_picked_rows_is_their_gradient(rng, dora):
    table, lora, grad = rng.normal(size=(7, OUT)), random_lora(rng, 7, OUT, dora=dora), rng.normal(size=(SEQ, OUT))
    trained = LoraMatrix(table, embedding_lora=lora).rows_backward(grad, IDS)
    lengths = np.linalg.norm(table + 0.7 * (lora.lora_B @ lora.lora_A).T, axis=0)

    def weighed(tensors):
        whole = table + 0.7 * (tensors["lora_B"] @ tensors["lora_A"]).T
        return float(((whole * tensors.get("magnitude", lengths) / lengths)[IDS] * grad).sum())

    tensors = {name: getattr(lora, name) for name in trained}
    rows = LoraMatrix(table, embedding_lora=lora).rows(IDS)
    assert weighed(tensors) == pytest.approx(float((rows * grad).sum()), rel=1e-13)
    for name, actual in trained.items():
        assert_is_gradient(actual, lambda v, name=name: weighed(tensors | {name: v}), tensors[name], name)


@pytest.mark.parametrize("dora", [False, True])
def test_the_merged_matrix_makes_the_same_products_and_the_merged_table_the_same_rows(rng, dora):
    base, x = rng.normal(size=(OUT, IN)), rng.normal(size=(SEQ, IN))
    matrix = LoraMatrix(base, random_lora(rng, IN, OUT, dora=dora), embedding_lora=random_lora(rng, OUT, IN, dora=dora))
    np.testing.assert_allclose(x @ matrix.dequantize().T, matrix.forward(x), rtol=0, atol=1e-13)
    np.testing.assert_allclose(matrix.table()[IDS], matrix.rows(IDS), rtol=0, atol=1e-13)
    assert not np.allclose(matrix.table(), matrix.dequantize(), rtol=0.1)


def test_tied_embedding_has_separate_adapters_for_input_and_output(rng):
    base, x = rng.normal(size=(7, IN)), rng.normal(size=(SEQ, IN))
    head, rows = random_lora(rng, IN, 7, dora=False), random_lora(rng, 7, IN, dora=False)
    both = LoraMatrix(base, head, embedding_lora=rows)
    np.testing.assert_array_equal(both.forward(x), LoraMatrix(base, head).forward(x))
    np.testing.assert_array_equal(both.rows(IDS), LoraMatrix(base, embedding_lora=rows).rows(IDS))
    np.testing.assert_array_equal(LoraMatrix(base, head).rows(IDS), base[IDS])
    np.testing.assert_array_equal(LoraMatrix(base, embedding_lora=rows).forward(x), linear(x, base))
    d_x, nothing = LoraMatrix(base, embedding_lora=rows).backward(both.forward(x), x)
    np.testing.assert_array_equal(d_x, both.forward(x) @ base)
    assert nothing == {}
    assert LoraMatrix(base, head).rows_backward(x, IDS) == {}


def test_lora_full_dropout_gives_base_product_and_zero_gradients(rng):
    base, x, grad = rng.normal(size=(OUT, IN)), rng.normal(size=(SEQ, IN)), rng.normal(size=(SEQ, OUT))
    lora = random_lora(rng, IN, OUT, dora=False)
    matrix = LoraMatrix(base, Lora(lora.lora_A, lora.lora_B, 0.7, mask=np.zeros((SEQ, IN))))
    np.testing.assert_array_equal(matrix.forward(x), linear(x, base))
    d_x, trained = matrix.backward(grad, x)
    np.testing.assert_allclose(d_x, grad @ base, rtol=0, atol=1e-14)
    assert not any(gradient.any() for gradient in trained.values())


def test_lora_matrix_keeps_dtype_and_does_not_change_its_inputs(rng, dtype):
    base, x = rng.normal(size=(OUT, IN)).astype(dtype), rng.normal(size=(SEQ, IN)).astype(dtype)
    lora = random_lora(rng, IN, OUT, dora=True, dropout=True, dtype=dtype)
    rows = random_lora(rng, OUT, IN, dora=True, dtype=dtype)
    held = [base, x, *vars(lora).values(), *vars(rows).values()]
    before = copy.deepcopy(held)
    matrix = LoraMatrix(base, lora, embedding_lora=rows)
    assert isinstance(matrix, QuantMethod)
    assert (matrix.shape, matrix.n_bytes, matrix.activations) == (base.shape, base.nbytes, "F32")
    y, picked = linear(x, matrix), matrix.rows(IDS)
    d_x, trained = matrix.backward(y, x)
    results = [y, picked, d_x, *trained.values(), *matrix.rows_backward(picked, IDS).values()]
    assert {array.dtype for array in (*results, matrix.dequantize(), matrix.table())} == {np.dtype(dtype)}
    for array, old in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.fixture
def arrays(rng):
    """W x, delta, magnitude and lengths."""
    return *rng.normal(size=(2, 5, 4)), rng.normal(size=4), rng.random(4) + 0.5


def test_row_norms_are_those_of_base_plus_delta():
    lengths = row_lengths(np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[2.0, 2.0], [2.0, 12.0]]))
    np.testing.assert_array_equal(lengths, [5, 13])


def test_row_norms_of_long_rows_are_rounded_once(rng):
    weight = rng.normal(size=(3, 5000)).astype(np.float32)
    expected = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=1)).astype(np.float32)
    np.testing.assert_array_equal(row_lengths(weight, np.zeros_like(weight)), expected, strict=True)


def test_magnitude_equal_to_the_row_norm_adds_only_the_delta(arrays):
    of_base, delta, _, lengths = arrays
    np.testing.assert_array_equal(dora(of_base, delta, lengths, lengths), delta)


def test_dora_output_is_the_product_with_rows_of_the_learned_magnitude(rng):
    x, weight, addition = rng.normal(size=(5, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    magnitude, lengths = rng.random(4) + 0.5, row_lengths(weight, addition)
    directed = (weight + addition) / lengths[:, None] * magnitude[:, None]
    np.testing.assert_allclose(np.linalg.norm(directed, axis=1), magnitude, rtol=1e-15)
    of_base = x @ weight.T
    actual = of_base + dora(of_base, x @ addition.T, magnitude, lengths)
    np.testing.assert_allclose(actual, x @ directed.T, rtol=0, atol=1e-14)


def test_dora_backward_is_the_gradient_with_constant_row_norms(arrays, rng):
    of_base, delta, magnitude, lengths = arrays
    grad = rng.normal(size=(5, 4))
    d_base, d_delta, d_magnitude = dora_backward(grad, of_base, delta, magnitude, lengths)

    def weighed(of_base, delta, magnitude):
        return float((dora(of_base, delta, magnitude, lengths) * grad).sum())

    assert_is_gradient(d_base, lambda v: weighed(v, delta, magnitude), of_base, "of_base")
    assert_is_gradient(d_delta, lambda v: weighed(of_base, v, magnitude), delta, "delta")
    assert_is_gradient(d_magnitude, lambda v: weighed(of_base, delta, v), magnitude, "magnitude")


def test_dtypes_are_kept(arrays, dtype):
    of_base, delta, magnitude, lengths = (array.astype(dtype) for array in arrays)
    results = [dora(of_base, delta, magnitude, lengths), row_lengths(of_base, delta)]
    results += dora_backward(delta, of_base, delta, magnitude, lengths)
    assert {array.dtype for array in results} == {np.dtype(dtype)}
